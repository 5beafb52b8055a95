"""What sgl_kernel 0.4.5 defines of functions that quantize nothing, in torch: held against the package
where it loads, and in its place where it does not.

A function that is absent must raise: sorted tokens that nobody wrote are read as addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """silu of the first half of [tokens, 2 N] times the second, [tokens, N]."""
    gate, up = input.float().chunk(2, -1)
    return _given(out, (functional.silu(gate) * up).to(input.dtype))


def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: Any = None,
) -> Tensor:
    """Rows [tokens, N] over the root of their mean square, times a weight [N]."""
    return _given(out, _normal(input, weight.float(), eps))


def gemma_rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: Any = None,
) -> Tensor:
    """`rmsnorm` with a weight that is stored less 1."""
    return _given(out, _normal(input, 1 + weight.float(), eps))


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    """Add the input to the residual, in place, and put its `rmsnorm` into the input."""
    residual += input
    input.copy_(_normal(residual, weight.float(), eps))


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    """`fused_add_rmsnorm` with a weight that is stored less 1."""
    residual += input
    input.copy_(_normal(residual, 1 + weight.float(), eps))


def _normal(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = input.float()
    scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (values * scale * weight).to(input.dtype)


def _given(out: Tensor | None, made: Tensor) -> Tensor:
    if out is None:
        return made
    return out.copy_(made)


def topk_softmax(
    topk_weights: Tensor, topk_ids: Tensor, gating_output: Tensor, renormalize: bool = False,
    moe_softcapping: float = 0.0, correction_bias: Tensor | None = None,
) -> None:  # fmt: skip
    """The k largest probabilities of logits [tokens, experts] and their experts (int32), both
    [tokens, k]. Raises NotImplementedError for a cap or a correction."""
    if moe_softcapping or correction_bias is not None:
        raise NotImplementedError("topk_softmax with a cap or a correction has no stand-in")
    top = gating_output.float().softmax(-1).topk(topk_weights.shape[-1], -1)
    values = top.values / top.values.sum(-1, keepdim=True) if renormalize else top.values
    topk_weights.copy_(values)
    topk_ids.copy_(top.indices)


def moe_sum_reduce(
    input_tensor: Tensor, output_tensor: Tensor, routed_scaling_factor: float = 0.0
) -> None:
    """Sum [tokens, k, N] over k, times a factor, into [tokens, N]."""
    output_tensor.copy_(input_tensor.float().sum(1) * routed_scaling_factor)


def moe_align_block_size(
    topk_ids: Tensor, num_experts: int, block_size: int, sorted_token_ids: Tensor, experts_ids: Tensor,
    num_tokens_post_pad: Tensor, cumsum_buffer: Tensor, pad_sorted_token_ids: bool = False,
    ignore_invalid_expert: bool = False,
) -> None:  # fmt: skip
    """Slots (token * k + place) in the order of their experts, those of each expert filled up to whole
    blocks with a slot that does not exist, the count of slots; the expert of each block; and in all how
    many slots there are so. `num_experts` counts one more, for experts of other ranks, whose number is
    -1 and which come first."""
    if ignore_invalid_expert:
        raise NotImplementedError("moe_align_block_size has no stand-in that leaves out experts")
    slots = topk_ids.flatten()
    bucket = slots.long() + 1
    counts = torch.bincount(bucket, minlength=num_experts)
    blocks = -(-counts // block_size)
    starts = (blocks.cumsum(0) - blocks) * block_size
    order = bucket.argsort(stable=True)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(slots), device=slots.device) - first[bucket[order]]
    sorted_token_ids.fill_(len(slots))
    sorted_token_ids[starts[bucket[order]] + place] = order.to(sorted_token_ids.dtype)
    numbers = torch.arange(num_experts, device=slots.device, dtype=experts_ids.dtype) - 1
    found = numbers.repeat_interleave(blocks)
    experts_ids[: len(found)] = found
    num_tokens_post_pad[0] = len(found) * block_size


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    silu_and_mul, rmsnorm, gemma_rmsnorm, fused_add_rmsnorm, gemma_fused_add_rmsnorm, topk_softmax,
    moe_sum_reduce, moe_align_block_size,
)  # fmt: skip
_TOKENS, _WIDTH, _EXPERTS, _CHOSEN, _BLOCK = 37, 512, 8, 2, 16


def differences(package: Any, device: str = "cuda") -> list[str]:
    """Functions of a package that compute something else than defined above, and what."""
    found = []
    for function in FUNCTIONS:
        try:
            wanted, made = (_tried(one, device) for one in (function, _of(package, function)))
        except Exception as error:
            found.append(f"{function.__name__}: {type(error).__name__}: {error}")
            continue
        for number, (mine, yours) in enumerate(zip(wanted, made, strict=True)):
            if mine.is_floating_point():
                lost = float((mine.float() - yours.float()).norm() / mine.float().norm())
                if not lost < 0.01:
                    found.append(f"{function.__name__}: result {number} differs by {lost:.4f}")
            elif not torch.equal(mine.cpu(), yours.cpu()):
                found.append(f"{function.__name__}: result {number} differs")
    return found


def _of(package: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(package, function.__name__)
    return found


def _tried(function: Callable[..., Any], device: str) -> list[Tensor]:
    """What a function computes of the same random inputs, in an order that no thread decides."""
    generator = torch.Generator().manual_seed(17)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    name = function.__name__
    values = random(_TOKENS, 2 * _WIDTH)
    if name == "silu_and_mul":
        return [function(values)]
    if name in ("rmsnorm", "gemma_rmsnorm"):
        return [function(values, random(2 * _WIDTH))]
    if name in ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm"):
        residual = random(_TOKENS, 2 * _WIDTH)
        function(values, residual, random(2 * _WIDTH))
        return [values, residual]
    if name == "moe_sum_reduce":
        made = torch.empty(_TOKENS, _WIDTH, dtype=torch.bfloat16, device=device)
        function(random(_TOKENS, _CHOSEN, _WIDTH), made, 2.5)
        return [made]
    weights = torch.empty(_TOKENS, _CHOSEN, device=device)
    chosen = torch.empty(_TOKENS, _CHOSEN, dtype=torch.int32, device=device)
    logits = torch.randn(_TOKENS, _EXPERTS, generator=generator).to(device)
    topk_softmax(weights, chosen, logits)
    if name == "topk_softmax":
        function(weights, chosen, 2 * logits, True)
        return [weights, chosen]
    return aligned(function, chosen)


def aligned(align: Callable[..., Any], chosen: Tensor) -> list[Tensor]:
    """The slots of each block of `align`, sorted, the expert of each block, and how many slots there
    are: for experts [tokens, k] that were chosen, with buffers as sglang's
    `moe_runner/triton_utils/moe_align_block_size.py` makes them."""
    count = chosen.numel()
    most = count * _BLOCK
    if count > _EXPERTS:
        most = count + (_EXPERTS + 1) * (_BLOCK - 1)
    most = -(-most // 4) * 4
    integers: dict[str, Any] = {"dtype": torch.int32, "device": chosen.device}
    slots, total = torch.empty(most, **integers), torch.empty(1, **integers)
    experts, sums = (
        torch.empty(-(-most // _BLOCK), **integers), torch.empty(_EXPERTS + 2, **integers),
    )  # fmt: skip
    align(chosen, _EXPERTS + 1, _BLOCK, slots, experts, total, sums, True)
    end = int(total)
    return [slots[:end].reshape(-1, _BLOCK).sort(-1).values, experts[: end // _BLOCK], total]
