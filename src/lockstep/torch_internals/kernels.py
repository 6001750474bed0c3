"""Attention kernels of aten, which give the log-sum-exp of the scores, and take it in backward."""

from __future__ import annotations

import torch

from lockstep.torch_internals.versions import expect, probed

_aten = torch.ops.aten

flash_for_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
"""Relies on: (query, key, value, dropout_p, is_causal, scale=) -> (output, log-sum-exps [b, h, s])."""
flash_for_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Relies on: (gradient, query, key, value, output, log-sum-exps, dropout_p, is_causal, scale=) -> three gradients."""
flash = _aten._scaled_dot_product_flash_attention
"""Relies on: the same with return_debug_mask behind is_causal, and more results behind the two."""
flash_backward = _aten._scaled_dot_product_flash_attention_backward
"""Relies on: (..., log-sum-exps, None, None, length of queries, of keys, dropout_p, is_causal, two states of random
numbers that are not read without dropout, scale=)."""
efficient = _aten._scaled_dot_product_efficient_attention
"""Relies on: (query, key, value, bias, compute_log_sumexp, dropout_p, is_causal, scale=); rows in multiples of 32."""
efficient_backward = _aten._scaled_dot_product_efficient_attention_backward
"""Relies on: (gradient, query, key, value, bias, output, log-sum-exps, seed, offset, dropout_p, which of four gradients
are wanted, is_causal, scale=)."""

_LAST_ARGUMENTS = {
    flash_for_cpu: "query key value dropout_p is_causal attn_mask scale",
    flash_for_cpu_backward: "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
    flash: "query key value dropout_p is_causal return_debug_mask scale",
    flash_backward: "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
    "philox_seed philox_offset scale",
    efficient: "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
    efficient_backward: "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p "
    "grad_input_mask is_causal scale",
}


@probed("scaled_dot_product_attention", "has its kernels")
def probe() -> None:
    """Compare the kernel of the CPU with the formula; of all, the names and order of their arguments."""
    for operator, arguments in _LAST_ARGUMENTS.items():
        found = [argument.name for argument in operator.default._schema.arguments]
        expect(found == arguments.split(), f"the arguments of {operator}")
    q, k, v = torch.arange(3 * 12, dtype=torch.float32).sin().view(3, 1, 1, 3, 4)
    scores = (q @ k.mT * 0.5).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), float("-inf"))
    out, lse, *_ = flash_for_cpu(q, k, v, 0.0, True, scale=0.5)
    expect(torch.allclose(out, scores.softmax(-1) @ v, atol=1e-5), "the output of attention")
    expect(torch.allclose(lse, scores.logsumexp(-1), atol=1e-5), "the log-sum-exps of scores")
