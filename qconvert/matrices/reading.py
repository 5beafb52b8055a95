"""Reading of any module's weight as BF16: each encoding is asked, those of other packages first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qconvert.core.encodings import CODES, NVFP4
from qconvert.core.errors import PlanError
from qconvert.core.names import split_parameter
from qconvert.matrices.encodings import awq, fp8, gptq, int8, mxfp4, nvfp4, packed
from qconvert.matrices.encodings.fp8 import fp8_matrix, fp8_scale_name, fp8_scheme_of
from qconvert.matrices.encodings.plain import DTYPES, plain
from qconvert.matrices.stored import Format, Stored, added_formats
from qconvert.ops.fp8 import WEIGHT_DTYPES
from qconvert.ops.transpose import Columns
from qconvert.plan.plan import Plan

_GLOBAL_SCALES = tuple(names.global_scale for names in NVFP4.values())

Read = tuple[Stored, tuple[str, ...]]


def read_matrix(plan: Plan, module: str, formats: Sequence[Format] | None = None) -> Read:
    """A module's weight, and the names of all tensors it takes; `formats` are `added_formats`, for who
    reads many. Raises PlanError where it is in no form that is read here."""
    if formats is None:
        formats = added_formats()
    if formats and (added := _added(plan, module, formats)) is not None:
        return added
    if (found := _encoded(plan, module)) is not None:
        return found
    name = f"{module}.weight"
    if name not in plan.tensors:
        raise PlanError(f"{name!r} is missing")
    weight = plan.tensors[name]
    if len(weight.type.shape) != 2:
        raise PlanError(f"{name!r}: expected a matrix, found {weight.type}")
    return plain(name, weight), (name,)


def _added(plan: Plan, module: str, formats: Sequence[Format]) -> Read | None:
    for one in formats:
        if (found := one.read(plan, module)) is not None:
            return found
    return None


def _encoded(plan: Plan, module: str) -> Read | None:
    """NVFP4 before what has no global scale; AWQ, which its config states, before GPTQ."""
    return (
        fp8.read(plan, module)
        or nvfp4.read(plan, module)
        or packed.read(plan, module)
        or mxfp4.read(plan, module)
        or awq.read(plan, module)
        or gptq.read(plan, module)
        or int8.read(plan, module)
    )


def encoded(plan: Plan) -> Iterator[tuple[str, Read]]:
    """Every module whose weight is encoded, FP8 aside, and how it is read. Raises PlanError for integers
    or bytes under a weight's name that are read in no way."""
    formats = added_formats()
    seen = set()
    for name, output in plan.tensors.items():
        module, parameter = split_parameter(name)
        if module in seen:
            continue
        if (added := _added(plan, module, formats)) is not None:
            seen.add(module)
            yield module, added
            continue
        plain_one = parameter not in CODES or output.type.dtype in (*DTYPES, *WEIGHT_DTYPES)
        if plain_one and parameter not in _GLOBAL_SCALES:  # whose codes may be missing
            continue
        seen.add(module)
        found = _encoded(plan, module)
        if found is None:
            raise PlanError(
                f"weight {name!r} is {output.type}, and neither its scales nor the config say how it is "
                "encoded; qconvert does not guess"
            )
        yield module, found


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
        return plain(name, matrix), (name,)
    scale_name = fp8_scale_name(plan, name)
    scale, scheme = plan.tensors[scale_name], fp8_scheme_of(plan, scale_name)
    if scale.type.shape[:1] == plan.tensors[name].type.shape[:1]:
        scale = scale.index(expert)
    return fp8_matrix(name, matrix, scale, scheme), (name, scale_name)
