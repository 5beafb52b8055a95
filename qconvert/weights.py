"""How a stored matrix is read as BF16: as it is, cast, or decoded from FP8 or packed INT4; rows of it
without reading the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

from qconvert.errors import PlanError
from qconvert.graph import Output, Value, concat
from qconvert.names import scale_candidates
from qconvert.ops.cast import ToBf16
from qconvert.ops.fp8 import WEIGHT_DTYPES, DequantFp8
from qconvert.ops.int4 import DequantInt4
from qconvert.ops.rowwise import RowOp
from qconvert.ops.transpose import Columns
from qconvert.plan import Plan
from qconvert.quantization import Fp8Scheme, fp8_scheme, int4_group


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix [rows, columns]: the op that reads it as BF16 (None: it is BF16), and its arguments,
    the first of which has its rows."""

    decoder: RowOp | None
    args: tuple[Output, ...]
    rows: int
    columns: int

    def cut(self, start: int, stop: int) -> Stored:
        """Rows [start, stop)."""
        if (start, stop) == (0, self.rows):
            return self
        height = stop - start
        if isinstance(self.decoder, Columns):
            turned = replace(self.decoder, first=self.decoder.first + start, count=height)
            return replace(self, decoder=turned, rows=height)
        first = self.args[0].rows(start, stop)
        if isinstance(self.decoder, DequantFp8):
            block, scale = _regrid(self.decoder.block, self.args[1], start, stop, self.rows)
            return replace(self, decoder=DequantFp8(block), args=(first, scale), rows=height)
        rest = [arg.rows(start, stop) for arg in self.args[1:]]
        return replace(self, args=(first, *rest), rows=height)


def _regrid(
    block: tuple[int, int], scale: Output, start: int, stop: int, rows: int
) -> tuple[tuple[int, int], Output]:
    """Block and scales of rows [start, stop). A cut inside a block makes blocks of fewer rows, whose
    scales stand there as often as needed."""
    if block[0] >= rows:
        return block, scale
    height = gcd(block[0], start)
    if height == block[0]:
        return block, scale.rows(start // height, -(-stop // height))
    lines = [scale.rows(row // block[0], row // block[0] + 1) for row in range(start, stop, height)]
    return (height, block[1]), concat(lines)


def fp8_scheme_of(plan: Plan, scale: str) -> Fp8Scheme:
    """How the config says weights are scaled. Raises PlanError for U8 scales it does not call
    exponents."""
    scheme = fp8_scheme(plan.checkpoint)
    if plan.tensors[scale].type.dtype == "U8" and not scheme.u8_exponents:
        raise PlanError(
            f"scale {scale!r} is U8, which is an exponent only where {scheme.where} says "
            "scale_fmt: ue8m0; qconvert does not guess"
        )
    return scheme


def fp8_scale_name(plan: Plan, weight: str) -> str:
    """The scale beside an FP8 weight. Raises PlanError for none or several."""
    tried = scale_candidates(weight)
    found = [name for name in tried if name in plan.tensors]
    if len(found) != 1:
        what = "has no scale" if not found else f"has {len(found)} scales"
        raise PlanError(f"FP8 weight {weight!r} {what} ({' or '.join(tried)})")
    return found[0]


def fp8_reading(
    weight: Output, scale: Output, scheme: Fp8Scheme
) -> tuple[DequantFp8, Output, Output]:
    """The op that reads an FP8 matrix or stack of them, and its arguments.

    Without a block size the scale is [] or [1] for the whole tensor; [..., N] or [..., N, 1] a row;
    [E] or [E, 1, 1] for each expert of a stack. Raises PlanError for anything else.
    """
    if scheme.block is not None:
        return DequantFp8(scheme.block), weight, scale
    *lead, rows, columns = weight.type.shape
    shape = scale.type.shape
    if scale.type.numel == 1:
        flat = weight.reshape((prod(lead) * rows, columns))
        return DequantFp8((prod(lead) * rows, columns)), flat, scale.reshape((1, 1))
    if shape in ((*lead, rows), (*lead, rows, 1)):
        return DequantFp8((1, columns)), weight, scale.reshape((*lead, rows, 1))
    if lead and shape in (tuple(lead), (*lead, 1, 1)):
        return DequantFp8((rows, columns)), weight, scale.reshape((*lead, 1, 1))
    raise PlanError(
        f"the config states no block size, so the scale must be per tensor ([] or [1]) or per "
        f"channel ({[*lead, rows]} or {[*lead, rows, 1]}), found {list(shape)}"
    )


def read_matrix(plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]]:
    """A module's weight, and the names of all tensors it takes. Raises PlanError where it is in no
    form that is read here."""
    packed = f"{module}.weight_packed"
    if packed in plan.tensors:
        return _read_int4(plan, module)
    name = f"{module}.weight"
    if name not in plan.tensors:
        raise PlanError(f"{name!r} is missing")
    weight = plan.tensors[name]
    if len(weight.type.shape) != 2:
        raise PlanError(f"{name!r}: expected a matrix, found {weight.type}")
    if weight.type.dtype not in WEIGHT_DTYPES:
        return _plain(name, weight), (name,)
    scale = fp8_scale_name(plan, name)
    stored = _fp8_matrix(name, weight, plan.tensors[scale], fp8_scheme_of(plan, scale))
    return stored, (name, scale)


def read_of_stack(
    plan: Plan, name: str, expert: int, *, transposed: bool
) -> tuple[Stored, tuple[str, ...]]:
    """The matrix of one expert in a stack [E, rows, columns], or [E, columns, rows] where
    `transposed`, and the names of all tensors it takes. A transposed matrix is read whole for every
    cut of its rows, which are columns there."""
    matrix = plan.tensors[name].index(expert)
    rows, columns = matrix.type.shape
    if transposed:
        if matrix.type.dtype != "BF16":
            raise PlanError(f"{name!r}: stacks [E, inputs, outputs] are read in BF16 only")
        return Stored(Columns(0, columns), (matrix,), columns, rows), (name,)
    if matrix.type.dtype not in WEIGHT_DTYPES:
        return _plain(name, matrix), (name,)
    scale_name = fp8_scale_name(plan, name)
    scale, scheme = plan.tensors[scale_name], fp8_scheme_of(plan, scale_name)
    if scale.type.shape[:1] == plan.tensors[name].type.shape[:1]:
        scale = scale.index(expert)
    return _fp8_matrix(name, matrix, scale, scheme), (name, scale_name)


def _plain(name: str, weight: Output) -> Stored:
    rows, columns = weight.type.shape
    if weight.type.dtype == "BF16":
        return Stored(None, (weight,), rows, columns)
    if weight.type.dtype in ("F16", "F32"):
        return Stored(ToBf16(), (weight,), rows, columns)
    raise PlanError(
        f"{name!r}: {weight.type.dtype} weights are not read here; BF16, F16, F32, FP8 and "
        "compressed-tensors INT4 are"
    )


def _fp8_matrix(name: str, weight: Output, scale: Output, scheme: Fp8Scheme) -> Stored:
    try:
        decoder, matrix, grid = fp8_reading(weight, scale, scheme)
        decoder.infer(matrix.type, grid.type)
    except PlanError as error:
        raise PlanError(f"weight {name!r}: {error}") from error
    rows, columns = matrix.type.shape
    return Stored(decoder, (matrix, grid), rows, columns)


def _read_int4(plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]]:
    """compressed-tensors' packed form. `weight_shape` repeats the shape and is not read."""
    names = [f"{module}.{p}" for p in ("weight_packed", "weight_scale", "weight_shape")]
    for name in names[:2]:
        if name not in plan.tensors:
            raise PlanError(f"{name!r} is missing")
    if f"{module}.weight_zero_point" in plan.tensors:
        raise PlanError(f"{module}: asymmetric INT4 (weight_zero_point) is not read here")
    packed, scale = plan.tensors[names[0]], plan.tensors[names[1]]
    if any(isinstance(piece.origin, Value) for piece in packed.pieces):
        raise PlanError(f"{names[0]!r} was made by an earlier pass; experts are quantized once")
    decoder = DequantInt4(int4_group(plan.checkpoint))
    try:
        (kind,) = decoder.infer(packed.type, scale.type)
    except PlanError as error:
        raise PlanError(f"weight {names[0]!r} with {names[1]!r}: {error}") from error
    taken = tuple(name for name in names if name in plan.tensors)
    return Stored(decoder, (packed, scale), *kind.shape), taken
