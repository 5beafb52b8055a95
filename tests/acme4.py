"""A format of another package: four bits a code, 64 columns under a scale and an offset of their own.
`FORMAT` is what conversions read and write, `SPEC` what validators know, from the definition alone.

A byte has the codes of columns j (low) and j + 32 of a block. A number is the block's offset (BF16) plus
its scale (F16) times the code, 0 to 15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer, Source
from qconvert.formats.base import Format, Read, stored
from qconvert.ops.base import array
from qconvert.ops.cast import check_finite, float_tiles, round_to_bf16
from qconvert.ops.rowwise import EachRow
from qconvert.plan.plan import Plan
from qconvert.validation.findings import Finding
from qconvert.validation.workers import Reads
from qconvert.validators.reading.forms import Encoding, Form, Grid, Spec, Unread, Weights
from qconvert.validators.reading.matrices import Matrix
from qconvert.validators.reading.rows import scales

BLOCK = 64
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class DequantAcme4(EachRow):
    """codes U8 [N, K / 2], scale F16 and offset BF16 [N, K / 64] -> BF16 [N, K]."""

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        codes, *beside = args
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        wanted = [TensorType(dtype, (rows, columns // BLOCK)) for dtype in ("F16", "BF16")]
        if codes.dtype != "U8" or columns % BLOCK or beside != wanted:
            raise PlanError(f"expected codes U8 and {', '.join(map(str, wanted))}, found {args}")
        return (TensorType("BF16", (rows, columns)),)

    def scratch(self, *args: TensorType) -> int:
        return 0

    def loss(self, *args: TensorType) -> str | None:
        return "rounds ACME4 codes x scale + offset to bf16"

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Floats]]:
        codes = array(ins[0].data, np.uint8, ins[0].type.shape)
        scale = array(ins[1].data, np.float16, ins[1].type.shape).astype(np.float32)
        bits = array(ins[2].data, np.uint16, ins[2].type.shape).astype(np.uint32) << 16
        offset = bits.view(np.float32)
        check_finite(scale, 0)
        for start, stop in float_tiles(codes.shape[0], 2 * codes.shape[1]):
            pairs = codes[start:stop].reshape(stop - start, -1, BLOCK // 2)
            blocks = np.concatenate([pairs & 15, pairs >> 4], axis=2)
            columns = blocks.reshape(stop - start, -1).astype(np.float32)
            each = np.repeat(scale[start:stop], BLOCK, axis=1)
            yield start, np.repeat(offset[start:stop], BLOCK, axis=1) + each * columns

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        target = array(outs[0].data, np.uint16, outs[0].type.shape)
        for start, values in self.floats(ins, scratch):
            bits = values.view(np.int32)
            round_to_bf16(bits, np.empty_like(bits))
            target[start : start + values.shape[0]] = bits
        return {}


@dataclass(frozen=True, slots=True)
class EncodeAcme4(EachRow):
    """BF16 [N, K] -> codes U8 [N, K / 2], scale F16 and offset BF16 [N, K / 64]. The offset is the least
    number of a block, rounded down; 15 scales reach the largest."""

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = args
        if weight.dtype != "BF16" or len(weight.shape) != 2 or weight.shape[1] % BLOCK:
            raise PlanError(f"expected a BF16 matrix of whole blocks of {BLOCK}, found {weight}")
        rows, columns = weight.shape
        beside = rows, columns // BLOCK
        return (
            TensorType("U8", (rows, columns // 2)),
            TensorType("F16", beside),
            TensorType("BF16", beside),
        )

    def scratch(self, *args: TensorType) -> int:
        return 0

    def loss(self, *args: TensorType) -> str | None:
        return f"rounds to ACME4 in blocks of {BLOCK}"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        rows, columns = ins[0].type.shape
        bits = array(ins[0].data, np.uint16, (rows, columns)).astype(np.uint32) << 16
        blocks = bits.view(np.float32).reshape(rows, -1, BLOCK)
        check_finite(blocks.reshape(rows, columns), 0)
        offset = blocks.min(axis=2)
        scale = np.maximum((blocks.max(axis=2) - offset) / 15, 2.0**-14).astype(np.float16)
        each = (blocks - offset[..., None]) / scale.astype(np.float32)[..., None]
        codes = np.rint(each).clip(0, 15).astype(np.uint8)
        packed = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        np.copyto(array(outs[0].data, np.uint8, (rows, columns // 2)), packed.reshape(rows, -1))
        np.copyto(array(outs[1].data, np.float16, scale.shape), scale)
        np.copyto(
            array(outs[2].data, np.uint16, offset.shape), offset.view(np.uint32) >> 16, "unsafe"
        )
        return {}


_PARAMETERS = ("weight_acme", "weight_scale", "weight_offset")


def read(plan: Plan, module: str) -> Read | None:
    names = tuple(f"{module}.{parameter}" for parameter in _PARAMETERS)
    return (stored(plan, names, DequantAcme4()), names) if names[0] in plan.tensors else None


def config_group(targets: Iterable[str]) -> dict[str, Any]:
    """An entry of the config's `config_groups`."""
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group"}
    return {
        "targets": list(targets), "format": "acme4", "weights": {**weights, "group_size": BLOCK},
        "input_activations": None, "output_activations": None,
    }  # fmt: skip


FORMAT = Format(
    name="acme4", title="ACME4", parameters=_PARAMETERS, codes=("U8",), cut=(1, BLOCK),
    equals="tests/test_extensions.py", read=read, encode=EncodeAcme4, config_group=config_group,
    notes=("loaded by Acme's runtime",),
)  # fmt: skip


# --- For validators --------------------------------------------------------------------------------


def stored_floats(data: np.ndarray[Any, np.dtype[np.uint8]], dtype: str) -> Floats:
    """Codes as numbers, in the order of the columns."""
    blocks = data.reshape(-1, 32)
    return np.concatenate([blocks % 16, blocks // 16], axis=1).astype(np.float32).reshape(-1)


def nearest(
    reader: Reads, matrix: Matrix, start: int, stop: int, expected: Floats, found: Floats
) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], str]:
    """Half a step, and what the rounding of results to BF16 adds."""
    step = np.repeat(scales(reader, matrix, start, stop), 64, axis=1)
    return np.abs(expected - found) <= 0.51 * step + 2.0**-8 * np.abs(expected), ""


def _beside(checkpoint: Checkpoint, name: str) -> Iterator[tuple[str, Source | None]]:
    """The dtype of a part and the part, scales first."""
    stem = name.removesuffix("acme")
    for dtype, part in (("F16", "scale"), ("BF16", "offset")):
        yield dtype, checkpoint.get(stem + part)


def faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    rows, half = checkpoint[name].type.shape
    for dtype, part in _beside(checkpoint, name):
        if part is None or part.type != TensorType(dtype, (rows, half // 32)):
            found = "none" if part is None else part.type
            message = f"expected a {dtype} for 64 columns, found {found}"
            yield Finding("QC027", "error", name, message)


def form(checkpoint: Checkpoint, name: str) -> Form:
    for fault in faults(checkpoint, name):
        raise Unread(fault.message)
    weight = checkpoint[name]
    rows, half = weight.type.shape
    grids = [Grid(p, 0, rows, half // 32, (1, 64)) for _, p in _beside(checkpoint, name) if p]
    return Form("acme4", weight, 0, rows, 2 * half, grids[0], offset=grids[1])


def states(weights: Weights) -> bool:
    """Tell whether a config group states it, in compressed-tensors' words."""
    wanted = {"num_bits": 4, "type": "int", "symmetric": False, "group_size": 64}
    return all(weights.get(key) == value for key, value in wanted.items())


SPEC = Spec(
    name="Acme4", dtypes=("U8",), stored=lambda checkpoint, name: name.endswith(".weight_acme"),
    read=form, faults=faults, parts=("scale", "offset"),
    shape=lambda checkpoint, name, shape: (*shape[:-1], shape[-1] // 2),
    states=states, formats=("acme4",), methods=("acme",),
    encodings=(
        Encoding(
            name="acme4", bits=4, floats=stored_floats, largest=15.0, nearest=nearest,
            passes=("quantize",),
        ),
    ),
)  # fmt: skip
