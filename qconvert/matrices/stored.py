"""How a stored matrix is read as BF16: as it is, cast, or decoded from FP8 or packed integers; rows of
it without reading the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Protocol

from qconvert.checkpoint.integer_config import gptq_form, packed_scheme
from qconvert.checkpoint.quantization_config import Fp8Scheme, fp8_scheme
from qconvert.core.discovery import FORMATS, discover
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Value, concat
from qconvert.core.names import scale_candidates, split_parameter, weight_candidates
from qconvert.ops.cast import ToBf16
from qconvert.ops.fp8 import WEIGHT_DTYPES, DequantFp8
from qconvert.ops.gptq_packed import DequantGptq
from qconvert.ops.ints import DequantInts
from qconvert.ops.rowwise import RowOp
from qconvert.ops.transpose import Columns
from qconvert.plan.plan import Plan


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
        if isinstance(self.decoder, Columns | DequantGptq):
            part = replace(self.decoder, first=self.decoder.first + start, count=height)
            return replace(self, decoder=part, rows=height)
        first = self.args[0].rows(start, stop)
        if isinstance(self.decoder, DequantFp8):
            block, scale = _regrid(self.decoder.block, self.args[1], start, stop, self.rows)
            decoder = replace(self.decoder, block=block)
            return replace(self, decoder=decoder, args=(first, scale), rows=height)
        if isinstance(self.decoder, DequantInts):
            return self._cut_ints(self.decoder, start, stop)
        rest = [arg.rows(start, stop) for arg in self.args[1:]]
        return replace(self, args=(first, *rest), rows=height)

    def _cut_ints(self, decoder: DequantInts, start: int, stop: int) -> Stored:
        """Zero points are packed along the rows; which group a column is of, all rows share."""
        args = [arg.rows(start, stop) for arg in self.args[:2]]
        if not decoder.symmetric:
            if start % decoder.word:
                raise PlanError(
                    f"rows from {start} on are wanted, and zero points are packed in words of "
                    f"{decoder.word} rows"
                )
            args.append(self.args[2].rows(start // decoder.word, -(-stop // decoder.word)))
        if decoder.g_idx:
            args.append(self.args[-1])
        return replace(self, args=tuple(args), rows=stop - start)


class Format(Protocol):
    """A format of stored weights that another package adds: the `FORMAT` of a module that an entry
    point of the group `qconvert.formats` names.

    `read` is how a module's weight is read as BF16, and the names of all tensors that it takes; None for
    a module that is not stored so. Its op is an op as those of `qconvert.ops`.
    """

    def read(self, plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]] | None: ...


def added_formats() -> list[Format]:
    """The formats of other packages. An import error is fatal and names the package."""
    return [module.FORMAT for module in discover(group=FORMATS)]


def read_added(plan: Plan) -> dict[str, tuple[Stored, tuple[str, ...]]]:
    """Every module that is in a format of another package, and how it is read."""
    formats = added_formats()
    modules = dict.fromkeys(split_parameter(name)[0] for name in plan.tensors) if formats else {}
    return {
        module: found
        for one in formats
        for module in modules
        if (found := one.read(plan, module)) is not None
    }


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
    """How the config says the weight of this scale is scaled. Raises PlanError for U8 scales it does not
    call exponents."""
    weight = next(iter(weight_candidates(scale)), scale)
    scheme = fp8_scheme(plan.checkpoint, split_parameter(weight)[0])
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
    for one in added_formats():
        if (found := one.read(plan, module)) is not None:
            return found
    if f"{module}.weight_packed" in plan.tensors:
        return _read_packed(plan, module)
    if f"{module}.qweight" in plan.tensors:
        return _read_gptq(plan, module)
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
        f"{name!r}: {weight.type.dtype} weights are not read here; BF16, F16, F32, FP8, and INT4 and "
        "INT8 of compressed-tensors or GPTQ are"
    )


def _fp8_matrix(name: str, weight: Output, scale: Output, scheme: Fp8Scheme) -> Stored:
    try:
        decoder, matrix, grid = fp8_reading(weight, scale, scheme)
        decoder.infer(matrix.type, grid.type)
    except PlanError as error:
        raise PlanError(f"weight {name!r}: {error}") from error
    rows, columns = matrix.type.shape
    return Stored(decoder, (matrix, grid), rows, columns)


def _read_packed(plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]]:
    """compressed-tensors' packed form. `weight_shape` repeats the shape and is not read."""
    scheme = packed_scheme(plan.checkpoint, module)
    names = [f"{module}.weight_packed", f"{module}.weight_scale"]
    order, zero = f"{module}.weight_g_idx", f"{module}.weight_zero_point"
    if not scheme.symmetric:
        names.append(zero)
    elif zero in plan.tensors:
        raise PlanError(f"{zero!r} exists, and the config says symmetric: one of them is wrong")
    ordered = scheme.actorder == "group"
    if ordered:
        names.append(order)
    elif order in plan.tensors:
        raise PlanError(
            f"{order!r} exists, and the config states no actorder group: one of them is wrong"
        )
    args = _stored(plan, names)
    decoder = DequantInts(scheme.bits, scheme.group, scheme.symmetric, ordered)
    kind = _decoded(decoder, names, args)
    shape = f"{module}.weight_shape"
    taken = (*names, shape) if shape in plan.tensors else tuple(names)
    return Stored(decoder, args, *kind.shape), taken


def _read_gptq(plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]]:
    """GPTQ's form, transposed. Draft layers have no g_idx where the config says no desc_act."""
    form = gptq_form(plan.checkpoint, module)
    names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]
    if form.scheme.actorder is None and names[-1] not in plan.tensors:
        del names[-1]
    args = _stored(plan, names)
    scheme, shape = form.scheme, args[0].type.shape
    rows = shape[1] if len(shape) == 2 else 1
    decoder = DequantGptq(scheme.bits, scheme.group, form.version, 0, rows)
    kind = _decoded(decoder, names, args)
    return Stored(decoder, args, *kind.shape), tuple(names)


def _stored(plan: Plan, names: list[str]) -> tuple[Output, ...]:
    """Tensors as they lie in the source. Raises PlanError for one that is missing or made here."""
    for name in names:
        if name not in plan.tensors:
            raise PlanError(f"{name!r} is missing")
    first = plan.tensors[names[0]]
    if any(isinstance(piece.origin, Value) for piece in first.pieces):
        raise PlanError(f"{names[0]!r} was made by an earlier pass; weights are quantized once")
    return tuple(plan.tensors[name] for name in names)


def _decoded(decoder: RowOp, names: list[str], args: tuple[Output, ...]) -> TensorType:
    try:
        return decoder.infer(*(arg.type for arg in args))[0]
    except PlanError as error:
        raise PlanError(f"weight {names[0]!r} with {names[1]!r}: {error}") from error
