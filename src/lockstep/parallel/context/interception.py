"""Attention inside a block whose sequence is split goes to the ring or to Ulysses.

Also when activation checkpointing runs the block's forward again in backward.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.comm.tree import Args, Kwargs
from lockstep.config.enums import CPMethod
from lockstep.errors import UsageError
from lockstep.parallel.context.arguments import Masks, Visible
from lockstep.parallel.context.layout import SequenceLayout
from lockstep.parallel.context.ring import ring_attention
from lockstep.parallel.context.ulysses import ulysses_attention
from lockstep.torch_internals.dispatch import TorchFunction


class SplitSequence(TorchFunctionMode):
    """Active within the forward of ``block``, where each rank has hidden states of shape ``hidden``."""

    def __init__(
        self,
        block: str,
        layout: SequenceLayout,
        method: CPMethod,
        hidden: tuple[int, ...],
        masks: Masks,
    ) -> None:
        super().__init__()
        self.block, self.layout, self.length = block, layout, hidden[1]
        self.method = method
        self.masks = masks
        self.attentions = 0
        """Calls of attention so far."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            return self.multi_head_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise UsageError."""
        end = "" if remedy.endswith("...") else "."
        raise UsageError(
            f"Block '{self.block}' {what} (context parallelism, cp = {self.layout.size}). {remedy}{end}"
        )

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute ``scaled_dot_product_attention`` over the whole sequence. Takes and returns this rank's positions:
        [batch, heads, positions / N, head_dim], or without heads; the mask is that of the whole sequence."""
        # Without heads.
        if query.ndim == key.ndim == value.ndim == 3:
            q, k, v = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
            return self.attention(q, k, v, mask, dropout_p, is_causal, scale=scale).squeeze(1)
        if key.ndim == value.ndim == query.ndim and 1 == key.shape[1] == value.shape[1]:
            # One head of keys for all, as broadcasting has it too.
            enable_gqa = True
        self._check_attention(query, key, value, enable_gqa, is_causal)
        if attn_mask is not None and is_causal:
            self.refuse(
                "calls attention with is_causal=True and with a mask, but torch accepts only one of them",
                "Pass one of them",
            )
        self.attentions += 1
        # Keys of another length are those of another sequence, which every rank has whole.
        if key.shape[2] != self.length:
            return self._of_whole_keys(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
        # Autocast would act within torch's function, which is not called here.
        query, key, value = _cast_by_autocast(query, key, value)
        if self.method is CPMethod.ULYSSES:
            try:
                return ulysses_attention(
                    *(query, key, value, self.layout, attn_mask),
                    dropout_p=dropout_p,
                    is_causal=is_causal,
                    scale=scale,
                )
            except UsageError as error:
                raise UsageError(f"Block '{self.block}': {error}") from None
        return self._ring(query, key, value, attn_mask, dropout_p, is_causal, scale)

    @property
    def whole(self) -> int:
        """Positions of all ranks."""
        return self.length * self.layout.size

    def _ring(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Call ``ring_attention``, unless its mask or dropout would need all keys at once."""
        if mask is not None and mask.shape[-2:] == (self.whole, self.whole):
            # A mask that only hides later positions is the causal one, which the ring applies by itself, chunk by
            # chunk.
            visible = self.masks.visible(mask)
            is_causal = visible is Visible.UP_TO_QUERY
            mask = mask if visible is Visible.OTHER else None
        if mask is not None and mask.shape[-1] == self.length:
            self.refuse(
                f"calls attention with a mask {list(mask.shape)} of the {self.length} positions that this rank "
                "holds",
                "Make it of the whole sequence, before the blocks, and pass it to them (with cp_method=ulysses)",
            )
        if mask is not None:
            self.refuse(
                "calls attention with a mask, but with cp_method=ring no rank sees all keys at once",
                "Use is_causal=True without a mask and pad on the right, or use cp_method=ulysses",
            )
        if dropout_p > 0:
            self.refuse(
                f"calls attention with dropout_p={dropout_p}, which cp_method=ring does not apply",
                "Set the model's attention dropout to 0, or use cp_method=ulysses",
            )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        # The ring wants one width: narrower queries, keys or values get zeros on the right, which add nothing.
        width, of_values = max(query.shape[-1], value.shape[-1]), value.shape[-1]
        q, k, v = (
            F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (query, key, value)
        )
        return ring_attention(q, k, v, self.layout, is_causal, scale)[..., :of_values]

    def _of_whole_keys(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        """Compute cross-attention: each rank has all keys, those of another sequence, so that nothing is sent.

        Whether they come from this rank's positions instead, the first batch shows.
        """
        # A mask of the whole sequence has a row for each query: this rank takes those of its own.
        if mask is not None and mask.ndim > 1 and mask.shape[-2] == self.whole:
            mask = self.layout.local(mask, mask.ndim - 2)
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )

    def multi_head_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        v_proj_weight: Tensor | None = None,
        static_k: Tensor | None = None,
        static_v: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Compute what ``nn.MultiheadAttention`` calls, on tensors [s, b, width]; masks are of the whole sequence."""
        if need_weights:
            self.refuse("asks nn.MultiheadAttention for the weights", "Call it with need_weights=False")
        if any(extra is not None for extra in (bias_k, bias_v, static_k, static_v)) or add_zero_attn:
            self.refuse(
                "has an nn.MultiheadAttention with add_bias_kv, add_zero_attn or static keys",
                "Use one without",
            )
        if query.ndim != 3:
            self.refuse(f"calls nn.MultiheadAttention on {list(query.shape)}", "Give it a batch dimension")
        if use_separate_proj_weight:
            weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
        else:
            assert in_proj_weight is not None
            weights = in_proj_weight.chunk(3)
        biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None,) * 3
        # torch's function is replaced as a whole, because it would look at the sizes of the sequence on the way.
        q, k, v = (
            # [s, b, width] to [b, heads, s, head_dim]
            F.linear(tensor, weight, bias).unflatten(2, (num_heads, -1)).permute(1, 2, 0, 3)
            for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        # As in torch: the mask is causal then, and not read.
        hint = is_causal and key_padding_mask is None
        mask = None if hint else _merged(attn_mask, key_padding_mask, num_heads, q.dtype)
        out = self.attention(q, k, v, mask, dropout_p if training else 0.0, hint)
        return F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), None

    def _check_attention(
        self, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, is_causal: bool
    ) -> None:
        """Raise UsageError unless heads and lengths of q [b, h, s, d], k and v [b, g, t, d] can be split."""
        if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
            self.refuse(
                f"calls attention on queries {list(query.shape)} and keys {list(key.shape)}",
                "Reshape them to [batch, heads, sequence, head dim]",
            )
        lengths = [tensor.shape[2] for tensor in (query, key, value)]
        if lengths != [self.length] * 3:
            what = (
                f"calls attention on {lengths[0]} queries, {lengths[1]} keys and {lengths[2]} values, but each rank "
                f"holds {self.length} positions of the sequence"
            )
            remedy = (
                "Only attention of the whole sequence to itself, or to another sequence that is an argument, "
                "can be split; leave other modules out with blocks=..."
            )
            if lengths[0] != self.length or lengths[1] != lengths[2] or is_causal:
                self.refuse(what, remedy)
        heads, key_heads = query.shape[1], key.shape[1]
        grouped = enable_gqa and key_heads == value.shape[1] and heads % key_heads == 0
        if key.shape[0] != query.shape[0] or not (grouped or heads == key_heads == value.shape[1]):
            self.refuse(
                f"calls attention on queries {list(query.shape)}, keys {list(key.shape)} and values "
                f"{list(value.shape)}",
                "Give them the same batch size and number of heads, or enable_gqa=True",
            )


def _cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for attention; exchanged keys are smaller then, too."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _merged(mask: Tensor | None, padding: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    """Masks of ``nn.MultiheadAttention``, in which True hides, as one that is added: [..., S, S] or [b, 1, 1, S]."""
    if mask is not None:
        mask = _added(mask, dtype)
        # [b * heads, S, S] to [b, heads, S, S]
        mask = mask if mask.ndim == 2 else mask.unflatten(0, (-1, heads))
    if padding is None:
        return mask
    hidden = _added(padding, dtype)[:, None, None]
    return hidden if mask is None else mask + hidden


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
