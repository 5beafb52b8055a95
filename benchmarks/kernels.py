"""Row ops in numpy's form and in compiled loops, one core, taking turns: what the machine's noise does
to one it does to both. Figures are CPU time, which neighbours disturb least."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer, Op
from qconvert.core.int_scheme import IntScheme
from qconvert.formats.amx.encode import Amx
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.formats.fp8.encode import EncodeFp8
from qconvert.formats.int_packed.decode import DequantInts
from qconvert.formats.int_packed.encode import encoder
from qconvert.formats.int_packed.packers import KeepInt8, PackGptq, PackQuantized
from qconvert.formats.mx.decode import DequantMxfp4
from qconvert.formats.mx.encode import EncodeMx
from qconvert.formats.nvfp4.decode import DequantNvfp4
from qconvert.formats.nvfp4.encode import PackNvfp4
from qconvert.ops import compiled

_ROWS, _COLUMNS = 512, 4096
_GLOBAL = TensorType("F32", (1,))


class Measured(NamedTuple):
    """Seconds of both forms for one matrix, medians; bytes are those of its BF16 side."""

    name: str
    nbytes: int
    numpy: float
    compiled: float


def measured(runs: int) -> Iterator[Measured]:
    """Each op on a matrix of gaussian weights. SystemExit where the two forms differ."""
    for name, op, ins in _ops():
        kinds = [one.type for one in ins]
        outs = [Buffer(kind, memoryview(bytearray(kind.nbytes))) for kind in op.infer(*kinds)]
        scratch = memoryview(bytearray(op.scratch(*kinds)))
        seconds: dict[bool, list[float]] = {False: [], True: []}
        made: dict[bool, list[bytes]] = {}
        for _ in range(runs + 1):
            for on in (False, True):
                compiled.use(on)
                start = time.process_time()
                op.run(ins, outs, scratch)
                seconds[on].append(time.process_time() - start)
                made[on] = [bytes(out.data) for out in outs]
        compiled.use(False)
        if made[True] != made[False]:
            raise SystemExit(f"{name}: the compiled loop makes other bytes")
        plain, fast = (statistics.median(seconds[on][1:]) for on in (False, True))
        yield Measured(name, 2 * _ROWS * _COLUMNS, plain, fast)


def _ops() -> Iterator[tuple[str, Op, list[Buffer]]]:
    random = np.random.default_rng(0)
    weights = _bf16(0.02 * random.standard_normal((_ROWS, _COLUMNS)))
    bf16 = [_buffer("BF16", weights)]
    grid = _ROWS // 128, _COLUMNS // 128

    made, scale = (np.empty(one, kind) for one, kind in ((weights.shape, "u1"), (grid, "<f4")))
    outs = [_buffer("F8_E4M3", made), _buffer("F32", scale)]
    block = EncodeFp8("fp8", (128, 128))
    block.run(bf16, outs, memoryview(bytearray(block.scratch(bf16[0].type))))
    yield "fp8 block to bf16", DequantFp8((128, 128)), outs
    rows = _buffer("F32", np.full((_ROWS, 1), 0.00123, "<f4"))
    yield "fp8 rows to bf16", DequantFp8((1, _COLUMNS)), [outs[0], rows]
    yield "fp8 block", block, bf16
    yield "fp8 rows", EncodeFp8("compressed-tensors", None), bf16
    yield "amx int4", Amx("int4", 2), bf16
    yield "amx int8", Amx("int8", 2), bf16
    yield "amx int4, steps searched", Amx("int4", 2, "search"), bf16
    yield "amx int8, steps searched", Amx("int8", 2, "search"), bf16
    for group in (128, 32):
        scheme = IntScheme(bits=4, group=group)
        yield f"w4a16 g{group}", encoder(scheme, PackQuantized(scheme)), bf16
        op = encoder(scheme, PackQuantized(scheme), "search")
        yield f"w4a16 g{group}, scales searched", op, bf16
    asymmetric = IntScheme(bits=4, group=128, symmetric=False)
    yield "w4a16 asymmetric", encoder(asymmetric, PackQuantized(asymmetric)), bf16
    gptq = IntScheme(bits=4, group=128, scale_dtype="F16")
    yield "w4a16 gptq", encoder(gptq, PackGptq(gptq)), bf16
    yield "int8", encoder(IntScheme(bits=8, group=None), KeepInt8()), bf16
    own = _buffer("F32", np.array([0.1 / 2688], "<f4"))
    yield "nvfp4", PackNvfp4(None, "modelopt"), [*bf16, own]
    yield "nvfp4, scales searched", PackNvfp4(None, "modelopt", "search"), [*bf16, own]
    yield "mxfp4", EncodeMx("mxfp4"), bf16
    yield "mxfp8", EncodeMx("mxfp8"), bf16

    packed = random.integers(0, 256, (_ROWS, _COLUMNS // 2), np.uint8)
    e4m3 = random.integers(40, 120, (_ROWS, _COLUMNS // 16), np.uint8)
    e8m0 = random.integers(100, 130, (_ROWS, _COLUMNS // 32), np.uint8)
    each = _bf16(0.01 * random.random((_ROWS, _COLUMNS // 128)))
    words = _buffer("I32", packed.view("<i4"))
    yield "nvfp4 to bf16", DequantNvfp4("modelopt"), [
        _buffer("U8", packed), _buffer("F8_E4M3", e4m3), own,
    ]  # fmt: skip
    yield "mxfp4 to bf16", DequantMxfp4(), [_buffer("U8", packed), _buffer("U8", e8m0)]
    yield "int4 g128 to bf16", DequantInts(4, 128), [words, _buffer("BF16", each)]


def _bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def _buffer(dtype: str, values: np.ndarray) -> Buffer:
    return Buffer(TensorType(dtype, values.shape), memoryview(bytearray(values.tobytes())))
