"""Searches for scales in Triton against numpy's form, bit for bit: in its interpreter by
tests/test_gpu_searches.py, on a GPU by `python tests/gpu_searches.py`, which also tells GB/s.

Prints a line a case: fits or differs, the op, the weights, and whether the kernel took it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import both_forms
from test_compiled import (
    _ORDINARY,
    DECODERS,
    ENCODERS,
    WEIGHTS,
    Encoder,
    any_bits,
    gaussian,
    outcome,
    with_zeros,
)

from qconvert.core.graph import Buffer, Op
from qconvert.formats.amx.encode import Amx
from qconvert.ops import compiled
from qconvert.ops.gpu import choice
from qconvert.ops.rowwise import Recode

_SEARCHES = {
    name: found for name, found in ENCODERS.items() if getattr(found.op, "search_loop", None)
}


def main() -> int:
    os.environ[both_forms.VARIABLE] = "none"  # this compares the forms itself
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = "cpu" if interpreted else "cuda:0"
    bad = 0
    for number, (name, found) in enumerate(_SEARCHES.items()):
        for weights in WEIGHTS:
            if interpreted and _left_out(number, weights):
                continue
            for tall, wide in _shapes(found, weights, interpreted):
                random = np.random.default_rng(len(name) + tall)
                shape = tall * found.rows, wide * found.columns
                ins = found.ins(random, weights(random, *shape))
                plain = outcome(found.op, ins, on=False)
                made, taken = _on(device, found.op, ins)
                fits = made == plain and (taken > 0 or weights not in _ORDINARY)
                bad += not fits
                print(
                    "fits" if fits else "differs", name, weights.__name__, list(shape),
                    "taken" if taken else "declined", sep="\t",
                )  # fmt: skip
    # Behind the decoder of every source encoding.
    search = ENCODERS["w4a16 g32, searched"].op
    for name, decoder in DECODERS.items():
        op: Any = Recode(decoder.op, (search,))  # type: ignore[arg-type]
        ins = decoder.made(np.random.default_rng(len(name)), decoder.scales[0])
        made, taken = _on(device, op, ins)
        fits = made == outcome(op, ins, on=False) and taken
        bad += not fits
        print("fits" if fits else "differs", name, "decoded", "[]", "taken", sep="\t")
    if not interpreted:
        _speed(device)
    return 1 if bad else 0


def _left_out(number: int, weights: Any) -> bool:
    """In the interpreter each search has gaussian weights, and of the other kinds those that the search
    before it has not. QCONVERT_ALL=1 leaves none out."""
    every = weights is gaussian or os.environ.get("QCONVERT_ALL") == "1"
    return not every and (number + WEIGHTS.index(weights)) % 2 == 1


def _shapes(found: Encoder, weights: Any, interpreted: bool) -> Sequence[tuple[int, int]]:
    """Rows and columns, in the least that an op takes. The interpreter takes a second for some hundred
    columns; of AMX's, large ones once: words of more than 3584 columns lie in blocks."""
    if not interpreted:
        return (1, 1), (3, 2), (40, 7), (2, 60)
    if not isinstance(found.op, Amx):
        return ((3, 2),) if found.columns < 128 else ((3, 1),)
    if found.op.shards == 1:
        return ((2, 3584 // found.rows + 1),) if weights is gaussian else ((1, 1),)
    return ((1, 1),) if weights in (with_zeros, any_bits) else ()


# What a kernel is given, by Triton's types.
_INTS = {
    "weight": "*i16", "ladder": "*fp32", "codes": "*i8", "scale": "*fp32", "zero": "*i8", "flag": "*i32",
    "count": "i32", "width": "i32", "eps": "fp32", "least_size": "fp32", "most_step": "fp32",
}  # fmt: skip
_NVFP4 = {
    "weight": "*i16", "packed": "*u8", "scales": "*u8", "flag": "*i32", "count": "i32", "own": "fp32",
}  # fmt: skip
_AMX = {
    "weight": "*i16", "steps": "*fp64", "errors": "*fp64", "target": "*i32", "scale": "*fp32",
    "flag": "*i32", "rows": "i32", "width": "i32", "rungs": "i32", "one_127th": "fp32",
}  # fmt: skip
_SIZES = {"GROUPS": 16, "LANES": 64, "COLUMNS": 64}
# PTX that does not round.
_EXACT = {"mov", "neg", "abs", "min", "max", "setp", "selp", "ld", "st", "cvt", "shfl"}


def compile_all() -> int:
    """Compile each kernel for compute capability 9.0, and print what of its instructions rounds."""
    from qconvert.ops.gpu import amx_search, searches

    found: set[str] = set()
    for symmetric, signed in ((True, True), (True, False), (False, False)):
        for dtype in range(3):
            constants = {
                "LOW": -8, "HIGH": 7, "SYMMETRIC": symmetric, "SIGNED": signed, "DTYPE": dtype, **_SIZES,
            }  # fmt: skip
            found |= _instructions(searches._ints, _INTS, constants)
    for modelopt in (True, False):
        constants = {"MODELOPT": modelopt, "BLOCKS": 64}
        found |= _instructions(searches._nvfp4, _NVFP4, constants)
    for most, height in ((7, 128), (127, 64)):
        constants = {
            "MOST": most, "ROWS": 2, "AT_ONCE": 8, "STEPS": 4, "HEIGHT": height,
            "PER_BLOCK": 3584 // height,
        }  # fmt: skip
        found |= _instructions(amx_search._amx, _AMX, constants)
    print(*sorted(found), sep="\n")
    return 0


def _instructions(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> set[str]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qconvert.ops.gpu.rounding import OPTIONS

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
    found = set(re.findall(r"^\s*((?:\w+\.)*f(?:32|64))\b", made.asm["ptx"], re.MULTILINE))
    return {name for name in found if name.split(".")[0] not in _EXACT}


def _on(device: str, op: Op, ins: Sequence[Buffer]) -> tuple[Any, bool]:
    """What an op makes where a kernel may answer, and whether one did."""
    taken: list[bool] = []

    def counted(loop: str) -> Callable[..., bool] | None:
        kernel = choice.kernel(loop)
        if kernel is None:
            return None

        def run(*args: Any) -> bool:
            taken.append(kernel(*args))
            return taken[-1]

        return run

    choice.use(device)
    vars(compiled)["kernel"] = counted
    try:
        return outcome(op, ins, on=False), any(taken)
    finally:
        vars(compiled)["kernel"] = choice.kernel
        choice.use(None)


def _speed(device: str) -> None:
    """GB of BF16 a second through the op, host to host, one process."""
    for name, found in _SEARCHES.items():
        columns = max(1, 4096 // found.columns) * found.columns
        rows = max(1, 8192 // found.rows) * found.rows
        ins = found.ins(np.random.default_rng(0), gaussian(np.random.default_rng(1), rows, columns))
        choice.use(device)
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            outcome(found.op, ins, on=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        choice.use(None)
        print(f"{name}\t{2 * rows * columns / min(seconds) / 1e9:.2f} GB/s", flush=True)


if __name__ == "__main__":
    sys.exit(compile_all() if sys.argv[1:] == ["compile"] else main())
