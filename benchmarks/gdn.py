"""How close the kernel that splits fused linear-attention projections comes to the GPU's own copy.

    python benchmarks/gdn.py [--tokens 8192] [--rounds 5]

For the shapes of Qwen3.5-35B-A3B, 397B-A17B and 27B, both orders: GB/s read and written, as a share of
what `torch.Tensor.copy_` moves on this GPU for the same number of bytes, next to torch's split and cat,
and sglang's own kernels if sglang is installed. All are timed in one run, in turns; medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

# Where sglang keeps its kernels: 0.5.23, and releases before it.
_PEERS = (
    "sglang.kernels.ops.attention.triton_gdn_fused_proj",
    "sglang.jit_kernel.triton.gdn_fused_proj",
)
_MODELS = ("35B", "397B", "27B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU found; this benchmark measures a GPU's memory")
    print(torch.cuda.get_device_name(0))
    peer = _peer()
    print(f"{'model':<6} {'order':<12} {'copy GB/s':>9} {'ours':>6} {'torch':>6} {'sglang':>7}")
    for name in _MODELS:
        for interleaved in (False, True):
            print(_row(name, interleaved, asked.tokens, asked.rounds, peer))


def _peer() -> Any:
    """sglang's own kernels, None if it is not installed. SystemExit if no known place has them."""
    if importlib.util.find_spec("sglang") is None:
        return None
    for name in _PEERS:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # sglang's file is there, and something it needs is not
    sys.exit(f"sglang is installed, and has its kernels in none of {', '.join(_PEERS)}")


def _row(name: str, interleaved: bool, tokens: int, rounds: int, peer: Any) -> str:
    import torch

    from qconvert.validators.kernels.triton import gdn

    heads = {"35B": gdn.HEADS_35B, "397B": gdn.HEADS_397B, "27B": gdn.HEADS_27B}[name]
    groups = heads.keys if interleaved else 1
    columns = sum(heads.segments)
    qkvz = torch.randn(tokens, columns, device="cuda").bfloat16()
    ba = torch.randn(tokens, 2 * heads.values, device="cuda").bfloat16()
    moved = 2 * (qkvz.nbytes + ba.nbytes)
    plain = torch.empty(moved // 4, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(plain)
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(plain),
        "ours": lambda: gdn.split(qkvz, ba, heads, groups),
        "torch": lambda: _dense(gdn.split_reference(qkvz, ba, heads, groups)),
    }
    if peer is not None and not (interleaved and heads.values // heads.keys == 3):
        ending = "" if interleaved else "_contiguous"
        theirs = getattr(peer, f"fused_qkvzba_split_reshape_cat{ending}")
        dims = heads.keys, heads.values, heads.key_dim, heads.value_dim
        work["sglang"] = lambda: theirs(qkvz, ba, *dims)
    rates = {what: [moved / _milliseconds(call) / 1e6] for what, call in work.items()}
    for _ in range(rounds - 1):
        for what, call in work.items():
            rates[what].append(moved / _milliseconds(call) / 1e6)
    copy = median(rates.pop("copy"))
    shares = [f"{median(found) / copy:>6.1%}" for found in rates.values()]
    order = "interleaved" if interleaved else "contiguous"
    return f"{name:<6} {order:<12} {copy:>9.0f} {' '.join(shares)}"


def _dense(mixed: Any) -> None:
    """What follows wants dense rows: torch's views have to be copied for it."""
    for part in (mixed.z, mixed.b, mixed.a):
        part.contiguous()


def _milliseconds(call: Callable[[], object]) -> float:
    """One call's time, from many, with the caches emptied before each."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=25, rep=100, return_mode="median"))


if __name__ == "__main__":
    main()
