"""A mixture-of-experts layer: a router, and feed-forward networks of which each token visits a few.

With all experts on one device it is a plain module. ``expert_parallel`` spreads its experts over ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import ConfigError, UsageError
from lockstep.parallel.expert.collectives import AllToAll, Ranks, ScaledGradient, SumOverRanks
from lockstep.parallel.expert.router import (
    Router,
    Routing,
    balance_loss,
    capacity,
    count_choices,
    kept_slots,
    sum_of_squared_logsumexp,
    traffic,
    within_capacity,
)
from lockstep.torch_internals import autograd as torch_autograd

ActivationFunction = Callable[[torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """E feed-forward networks of one shape, activation(x W_in^T + b_in) W_out^T + b_out, their weights stacked.

    Parameters: ``weight_in`` (E, hidden, width), ``weight_out`` (E, width, hidden), and with ``bias`` ``bias_in``
    (E, hidden), ``bias_out`` (E, width). They may be DTensors that are sharded on dim 0: a rank then applies its own.
    """

    gradient_factor: float = 1.0
    """What the gradients of the stacked parameters are multiplied with."""

    def __init__(
        self, width: int, hidden: int, num_experts: int, activation: ActivationFunction, bias: bool
    ) -> None:
        super().__init__()
        self.activation = activation
        self.weight_in = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.weight_out = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.bias_in = nn.Parameter(torch.empty(num_experts, hidden)) if bias else None
        self.bias_out = nn.Parameter(torch.empty(num_experts, width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as ``nn.Linear`` does: uniform within 1 / sqrt(inputs)."""
        for weight, bias in ((self.weight_in, self.bias_in), (self.weight_out, self.bias_out)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, rows: torch.Tensor, per_expert: list[int]) -> torch.Tensor:
        """Rows (n, width), sorted by expert, ``per_expert`` for each of those held here."""
        # An expert without rows takes part too: its gradients are zeros, and all ranks have the same graph.
        weights = zip(
            rows.split(per_expert),
            self._local_experts(self.weight_in),
            self._local_experts_or_none(self.bias_in),
            self._local_experts(self.weight_out),
            self._local_experts_or_none(self.bias_out),
            strict=True,
        )
        return torch.cat(
            [
                F.linear(self.activation(F.linear(part, weight_in, bias_in)), weight_out, bias_out)
                for part, weight_in, bias_in, weight_out, bias_out in weights
            ]
        )

    def _local_experts(self, stacked: nn.Parameter) -> tuple[torch.Tensor, ...]:
        """Return the weights of each expert that this rank holds."""
        local_part: torch.Tensor = stacked
        if is_dtensor(stacked):
            local_part = stacked.to_local()
        if self.gradient_factor != 1:
            local_part = ScaledGradient.apply(local_part, self.gradient_factor)
        # Not by index: gradients of that would each be as large as all experts together.
        return tuple(local_part.unbind())

    def _local_experts_or_none(self, stacked: nn.Parameter | None) -> tuple[torch.Tensor | None, ...]:
        return (
            (None,) * len(self._local_experts(self.weight_in))
            if stacked is None
            else self._local_experts(stacked)
        )

    def extra_repr(self) -> str:
        num_experts, hidden, width = self.weight_in.shape
        return f"num_experts={num_experts}, width={width}, hidden={hidden}, bias={self.bias_in is not None}"


@dataclass(frozen=True)
class Load:
    """How the tokens of one call were spread. Tensors, so that nothing waits for the device.

    - ``balance_loss``, ``z_loss``: 0-d, with gradients.
    - ``tokens_per_expert`` (E,), int64: choices of each expert, before any were dropped.
    - ``dropped_fraction``: 0-d; of all choices, those over an expert's capacity.

    Where tokens are routed together with other ranks, all of them count.
    """

    balance_loss: torch.Tensor
    z_loss: torch.Tensor
    tokens_per_expert: torch.Tensor
    dropped_fraction: torch.Tensor


class MixtureOfExperts(nn.Module):
    """Each token (..., width) goes through ``top_k`` of ``num_experts`` feed-forward networks, chosen by a router.

        y = sum over the k chosen experts e of gate_e(x) * expert_e(x)

    Args:
        width: Features of a token.
        hidden: Features inside an expert.
        capacity_factor: In one call, an expert takes at most ceil(capacity_factor * top_k * tokens / num_experts)
            choices. All first choices come before all second ones, and tokens come in their order. Further choices
            are dropped and add nothing to the output. For a token whose choices are all dropped, the layer returns
            zeros, so only a residual connection around the layer carries it on. None: nothing is dropped.
        activation: The function between the two linear layers of an expert.
        bias: Whether these linear layers have biases.
        renormalize: Whether the k gates are scaled to add up to 1. None: only if ``top_k`` is above 1.

    After a call, ``load`` tells how the tokens were spread over the experts. Two more losses keep the router
    balanced. Add them to the training loss:
    ``loss + 0.01 * load_balance_loss(model) + 0.001 * router_z_loss(model)``.

    Raises:
        ConfigError: a size or a number of experts is not possible.

    Examples:
        ```python
        import torch
        from lockstep.nn import MixtureOfExperts, load_balance_loss

        layer = MixtureOfExperts(width=16, hidden=32, num_experts=4, top_k=2)
        output = layer(torch.randn(2, 8, 16))  # [batch, sequence, width], as the input
        loss = output.square().mean() + 0.01 * load_balance_loss(layer)
        loss.backward()
        ```
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        capacity_factor: float | None = None,
        activation: ActivationFunction = F.gelu,
        bias: bool = True,
        renormalize: bool | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(width, hidden, num_experts, top_k, capacity_factor, renormalize)
        self.width = width
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.router = Router(
            width, num_experts, top_k, renormalize=top_k > 1 if renormalize is None else renormalize
        )
        self.experts = Experts(width, hidden, num_experts, activation, bias)
        self.ranks: Ranks | None = None
        self._load: Load | None = None

    @property
    def load(self) -> Load:
        """How the tokens of the last call were spread over the experts.

        Raises:
            UsageError: the layer was not called yet.
        """
        if self._load is None:
            raise UsageError(
                "This MixtureOfExperts was not called yet. Call the model before asking for its load."
            )
        return self._load

    @property
    def balance_loss(self) -> torch.Tensor:
        """The load-balance loss of the last call, 1 at best (formula: ``router.balance_loss``); 0-d, with gradients."""
        return self.load.balance_loss

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [..., width] from [..., width]. If the experts are spread over ranks, all of these must call it."""
        if hidden.shape[-1] != self.width:
            raise UsageError(
                f"MixtureOfExperts got tokens of {hidden.shape[-1]} features, but width is {self.width}. "
                "Pass (..., width)."
            )
        # [..., width] -> [T, width]
        tokens = hidden.reshape(-1, self.width)
        routing: Routing = self.router(tokens)
        ranks = self._ranks_now()
        counts, rank = count_choices(routing.experts, self.num_experts)[None], 0
        if ranks is not None:
            counts, rank = ranks.gather_counts(counts[0]), ranks.data.rank()
        kept = counts
        if self.capacity_factor is not None:
            kept = within_capacity(counts, capacity(counts, self.capacity_factor))
        self._remember(self._measured(routing, counts, kept, ranks))

        # (n,), by expert; slot token * k + choice
        slots = kept_slots(routing.experts, kept[rank])
        rows = _as_computed(tokens[slots // self.top_k])
        outputs = self._apply_experts(rows, kept.sum(1), ranks)
        # Slots that were dropped stay zeros.
        chosen = outputs.new_zeros(tokens.shape[0] * self.top_k, self.width).index_copy(0, slots, outputs)
        # [T * k, width] -> [T, k, width], times the gates [T, k, 1], added up over the choices
        combined = (chosen.view(-1, self.top_k, self.width) * routing.gates.unsqueeze(-1)).sum(1)
        return combined.to(outputs.dtype).view(hidden.shape)

    def _apply_experts(self, rows: torch.Tensor, kept: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
        """Send ``rows`` (n, width), sorted by expert, through their experts. ``kept`` (R, E): each rank's rows for
        each."""
        if ranks is None or ranks.experts is None:
            mine = kept[0 if ranks is None else ranks.data.rank()]
            return self.experts(rows, mine.tolist())
        plan = traffic(kept[list(ranks.members)].cpu(), ranks.experts.rank())
        order = plan.order.to(rows.device)
        # Sorted by expert, rows are also sorted by the rank that holds it, as an all-to-all sends them.
        arrived = AllToAll.apply(rows, plan.sent, plan.received, ranks.experts)
        outputs = self.experts(arrived[order], plan.per_expert)
        # The inverse of ``order``: outputs go back as the rows came.
        in_order_of_arrival = torch.empty_like(outputs).index_copy(0, order, outputs)
        return AllToAll.apply(in_order_of_arrival, plan.received, plan.sent, ranks.experts)

    def _ranks_now(self) -> Ranks | None:
        """Return the ranks that take part now. In eval mode a rank that holds all experts needs no other, and may be
        called alone."""
        if self.ranks is None or (self.ranks.experts is None and not self.training):
            return None
        return self.ranks

    def _measured(
        self, routing: Routing, counts: torch.Tensor, kept: torch.Tensor, ranks: Ranks | None
    ) -> Load:
        """Measure ``counts`` and ``kept`` (R, k, E). Only sums over tokens travel: E probabilities and one z-loss."""
        sums = torch.cat([routing.probabilities.sum(0), sum_of_squared_logsumexp(routing.logits)[None]])
        if ranks is not None:
            sums = SumOverRanks.apply(sums, ranks.data)
        tokens_per_expert = counts.sum((0, 1))
        choices = tokens_per_expert.sum().clamp_min(1)
        # There are k choices of each token, so that these are means over tokens.
        means = sums * self.top_k / choices
        return Load(
            balance_loss=balance_loss(tokens_per_expert / choices, means[:-1]),
            z_loss=means[-1],
            tokens_per_expert=tokens_per_expert,
            dropped_fraction=(tokens_per_expert.sum() - kept.sum()) / choices,
        )

    def _remember(self, load: Load) -> None:
        if not is_recomputing():
            self._load = load
            return
        # What the first forward left is in the graph, unless it ran without gradients.
        first = self._load
        if first is not None and load.balance_loss.requires_grad and not first.balance_loss.requires_grad:
            warnings.warn(
                "A MixtureOfExperts inside reentrant activation checkpointing: its balance loss has no gradient. "
                "Use checkpoint(..., use_reentrant=False), or Accelerator(parallel='activation=full').",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, object]:
        # It is a part of a graph, which can neither be copied nor pickled.
        return {**self.__dict__, "_load": None}

    def extra_repr(self) -> str:
        return f"capacity_factor={self.capacity_factor}"


def layers(model: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """Yield (name, layer) of each ``MixtureOfExperts`` in a model, or that it is itself."""
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module


def load_balance_loss(model: nn.Module) -> torch.Tensor:
    """Return the sum of the load-balance losses of all layers of ``model`` in the last forward; 0-d, with gradients.

    Each of them is 1 if all experts get equally many tokens, and the number of experts if one gets all of them.

    Reference: Fedus et al., Switch Transformers, JMLR 2022.

    Raises:
        UsageError: the model has no ``MixtureOfExperts``, or one of them was not called yet.

    Examples:
        ```python
        import torch
        from lockstep.nn import MixtureOfExperts, load_balance_loss

        model = torch.nn.Sequential(MixtureOfExperts(16, 32, num_experts=4), torch.nn.Linear(16, 1))
        loss = model(torch.randn(8, 16)).square().mean() + 0.01 * load_balance_loss(model)
        loss.backward()
        assert model[0].router.weight.grad is not None
        ```
    """
    return torch.stack([layer.load.balance_loss for layer in _some_layers(model)]).sum()


def router_z_loss(model: nn.Module) -> torch.Tensor:
    """Return the sum of the router z-losses of all layers of ``model`` in the last forward; 0-d, with gradients.

    The router z-loss of a layer is the mean over tokens of (log sum_e exp logit_e)^2. It keeps logits small.

    Reference: Zoph et al., ST-MoE, 2022.

    Raises:
        UsageError: the model has no ``MixtureOfExperts``, or one of them was not called yet.

    Examples:
        ```python
        import torch
        from lockstep.nn import MixtureOfExperts, router_z_loss

        model = torch.nn.Sequential(MixtureOfExperts(16, 32, num_experts=4), torch.nn.Linear(16, 1))
        loss = model(torch.randn(8, 16)).square().mean() + 1e-3 * router_z_loss(model)
        loss.backward()
        assert router_z_loss(model) >= 0
        ```
    """
    return torch.stack([layer.load.z_loss for layer in _some_layers(model)]).sum()


def is_recomputing() -> bool:
    """Return whether this is a forward inside a backward, as activation checkpointing repeats it."""
    return torch_autograd.is_in_backward()


def _some_layers(model: nn.Module) -> list[MixtureOfExperts]:
    found = [layer for _, layer in layers(model)]
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no MixtureOfExperts, so it has no such loss. Remove this call."
        )
    return found


def _as_computed(rows: torch.Tensor) -> torch.Tensor:
    """Cast to the type in which autocast will compute, so that rows travel in it."""
    device = rows.device.type
    return rows.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else rows


def _check_sizes(
    width: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    capacity_factor: float | None,
    renormalize: bool | None,
) -> None:
    for name, value in (("width", width), ("hidden", hidden), ("num_experts", num_experts)):
        if value < 1:
            raise ConfigError(
                f"MixtureOfExperts: {name} is {value}, but must be at least 1. Pass a larger one."
            )
    if not 1 <= top_k <= num_experts:
        raise ConfigError(
            f"MixtureOfExperts: top_k is {top_k}, but a token can choose 1 to {num_experts} of {num_experts} experts. "
            "Pass one of these."
        )
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise ConfigError(
            f"MixtureOfExperts: capacity_factor is {capacity_factor}, but must be above 0 and finite. "
            "Pass 1.25, for instance, or None to drop nothing."
        )
    if renormalize and top_k == 1:
        raise ConfigError(
            "MixtureOfExperts: with top_k=1 and renormalize=True every gate is 1, and the router would never learn. "
            "Drop renormalize, or use a larger top_k."
        )
