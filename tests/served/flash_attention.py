"""Attention of sequences of several lengths, by its definition in float32, in place of vLLM's
compiled one (`vllm/vllm_flash_attn/__init__.py`): MLA's prefill alone asks for it here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from vllm.vllm_flash_attn.flash_attn_interface import *  # noqa: F403
    from vllm.vllm_flash_attn.flash_attn_interface import (  # noqa: F401
        FA2_AVAILABLE,
        FA3_AVAILABLE,
        fa_version_unsupported_reason,
        get_scheduler_metadata,
        is_fa_version_supported,
    )
except ImportError:  # read by a linter, without vLLM
    pass


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    softmax_scale: float | None = None, causal: bool = False, return_softmax_lse: bool = False,
    out: Tensor | None = None, **_: Any,
) -> Any:  # fmt: skip
    """q [tokens, heads, d], k and v [tokens, kv heads, d or dv], cut at the cumulated lengths ->
    [tokens, heads, dv] and, if asked for, the logarithm of the sum [heads, tokens]."""
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    made = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
    sums = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    repeat = q.shape[1] // k.shape[1]
    for first, last, low, high in zip(starts, starts[1:], ends, ends[1:], strict=False):
        if first == last:
            continue
        keys = k[low:high].float().repeat_interleave(repeat, 1)
        values = v[low:high].float().repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys)
        scores *= softmax_scale or q.shape[-1] ** -0.5
        if causal:
            count, length = last - first, high - low
            seen = torch.ones(count, length, dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(~seen.tril(length - count), float("-inf"))
        sums[:, first:last] = scores.logsumexp(-1)
        made[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    if out is not None:
        out.copy_(made)
        made = out
    return (made, sums) if return_softmax_lse else made
