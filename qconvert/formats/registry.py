"""Formats by name, and which of them a module's weight is stored in: each is asked, those of other
packages first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

from qconvert.checkpoint.quantization_config import described, weights_of
from qconvert.core.discovery import FORMATS, discover, formats_of, modules_within
from qconvert.core.errors import PlanError, QConvertError
from qconvert.core.graph import Output, Value, apply
from qconvert.core.names import ACTIVATIONS, NOTED, split_parameter
from qconvert.formats.base import FolderTensors, Format, Read, Stored
from qconvert.formats.floats.format import DTYPES, plain
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.fp8.format import fp8_matrix, fp8_scale_name, fp8_scheme_of
from qconvert.ops.transpose import Columns
from qconvert.plan.plan import Plan

# Dtypes that do not say what is stored.
OF_CODES = ("I8", "U8", "I32", "U32")
Reader = Callable[[Plan, str], Read | None]


@cache
def formats() -> Mapping[str, Format]:
    """Every format by name: those of other packages, then ours, in the order in which they are asked.
    Raises QConvertError for two of one name, and for a package that cannot be imported.

    >>> api.formats()["mxfp4"].parameters
    ('weight_packed', 'weight_scale')
    """
    ours, added = _known()
    every = [*added, *sorted(ours, key=lambda one: one.order)]
    found = {one.name: one for one in every}
    if len(found) < len(every):
        twice = next(one.name for one in every if found[one.name] is not one)
        raise QConvertError(f"format {twice!r} is defined twice; rename or uninstall one")
    return found


@cache
def _known() -> tuple[list[Format], list[Format]]:
    """Our formats, and those of other packages."""
    ours = modules_within("qconvert.formats", "format")
    return formats_of(ours), formats_of(discover(group=FORMATS))


@cache
def _readers() -> tuple[Reader, ...]:
    """Each way in which an encoded weight is read, in order."""
    return tuple({one.read: None for one in formats().values() if one.read is not None})


@cache
def _added() -> tuple[Format, ...]:
    """Formats of other packages that are read."""
    return tuple(one for one in _known()[1] if one.read is not None)


@cache
def code_parameters() -> frozenset[str]:
    """Parameters that hold the codes of a module's weight, or the weight itself."""
    return frozenset(one.parameters[0] for one in formats().values() if one.read is not None)


@cache
def _labelled() -> Mapping[str, Sequence[Format]]:
    """Formats by the last parts of names of their tensors, and under "" those of stacks."""
    found = defaultdict[str, list[Format]](list)
    for one in formats().values():
        for parameter in one.parameters:
            found["" if parameter.startswith("_") else parameter].append(one)
    return found


def label(folder: FolderTensors, name: str, dtype: str) -> str:
    """`INT4 g128 (packed)`, `NVFP4`, `AMXINT4`; the dtype of every tensor that its dtype fully
    describes."""
    if dtype not in OF_CODES:
        return dtype
    module, _, parameter = name.rpartition(".")
    for form in folder.kept((parameter, dtype), partial(_candidates, folder, parameter, dtype)):
        found = form.labelled(folder, module, parameter)
        if found is not None:
            return found
    return dtype


def _candidates(folder: FolderTensors, parameter: str, dtype: str) -> Sequence[Format]:
    """Formats that a tensor may be in by its name, its dtype, and what other tensors the folder has: a
    plan of Kimi-K2 asks 276,000 times."""
    known = _labelled()
    ends = folder.kept("ends", lambda: {name.rpartition(".")[2] for name in folder.tensors})

    def has_second(form: Format) -> bool:
        second = form.parameters[1] if len(form.parameters) > 1 else "_"
        return second.startswith("_") or second.rpartition(".")[2] in ends

    forms = known.get(parameter) or known[""]
    return [form for form in forms if dtype in form.codes and has_second(form)]


def read_matrix(plan: Plan, module: str) -> Read:
    """A module's weight, and the names of all tensors it takes. Raises PlanError where it is in no form
    that is read here."""
    if (found := _read(plan, module)) is not None:
        return found
    name = f"{module}.weight"
    if name not in plan.tensors:
        raise PlanError(f"{name!r} is missing")
    weight = plan.tensors[name]
    if len(weight.type.shape) != 2:
        raise PlanError(f"{name!r}: expected a matrix, found {weight.type}")
    return plain(name, weight), (name,)


def _read(plan: Plan, module: str) -> Read | None:
    for read in _readers():
        if (found := read(plan, module)) is not None:
            return found
    return None


def encoded(plan: Plan) -> Iterator[tuple[str, Read]]:
    """Every module whose weight is encoded, FP8 aside, and how it is read. Raises PlanError for integers
    or bytes under a weight's name that are read in no way."""
    added, codes = _added(), code_parameters()
    marks = {one.mark for one in formats().values() if one.mark}
    seen = set()
    for name, output in plan.tensors.items():
        for form in added:
            module = name.removesuffix(f".{form.parameters[0]}")
            if module == name or module in seen or form.read is None:
                continue
            if (own := form.read(plan, module)) is not None:
                seen.add(module)
                yield module, own
        module, parameter = split_parameter(name)
        if module in seen:
            continue
        is_plain = parameter not in codes or output.type.dtype in (*DTYPES, *WEIGHT_DTYPES)
        if is_plain and parameter not in marks:  # whose codes may be missing
            continue
        found = _read(plan, module)
        if found is None and is_plain:
            continue  # a parameter of the model's own
        seen.add(module)
        if found is None:
            raise PlanError(_why_unread(plan, module, name))
        yield module, found


def check_from_source(plan: Plan) -> None:
    """Raise PlanError for codes that an earlier pass made: what is read here is what the source's config
    states."""
    codes = code_parameters()
    for name, output in plan.tensors.items():
        kind = output.type.dtype
        if split_parameter(name)[1] not in codes or (kind in DTYPES and kind not in WEIGHT_DTYPES):
            continue
        if any(isinstance(piece.origin, Value) for piece in output.pieces):
            raise PlanError(
                f"{name!r} was made by an earlier pass; weights are quantized once: leave out one of "
                "the two"
            )


def unmixed(plan: Plan) -> Iterator[tuple[str, Read]]:
    """Tensors of a plan, by name, whose format no config states beside another: see `Format.unmixed`.
    Raises PlanError for one that does not fit."""
    for form in formats().values():
        if form.unmixed is not None:
            yield from form.unmixed(plan)


def decoded_beside(plan: Plan, others: Mapping[str, Output]) -> tuple[dict[str, Output], list[str]]:
    """Tensors that stay where others are encoded, the unmixed ones in BF16; and what was noted beside
    such weights, which leaves. Raises PlanError as their formats do."""
    found, noted = dict(others), list[str]()
    for name, (stored, names) in unmixed(plan):
        if name not in others or stored.decoder is None:
            continue
        module, _ = split_parameter(name)
        beside = (f"{module}.{part}" for part in (*NOTED, *ACTIVATIONS))
        used = names[: len(stored.args)]
        extra = {*names, *(one for one in beside if one in others)}.difference(used)
        for part in (*used, *extra):
            found.pop(part, None)
        (made,) = apply(stored.decoder, *stored.args)
        found[name] = stored.as_stored(made, others[name].type.shape)
        noted += sorted(extra)
    return found, noted


def _why_unread(plan: Plan, module: str, name: str) -> str:
    weight = plan.tensors[name]
    said = weights_of(plan.checkpoint, module)
    if said is not None:
        weights, where = said
        return (
            f"weight {name!r} is {weight.type}, and {where} states {described(weights)} for it, which "
            "is not read here in that form: start from the BF16 release"
        )
    return (
        f"weight {name!r} is {weight.type}, and neither its scales nor the config say how it is "
        "encoded; qconvert does not guess: state it (--as SCHEME)"
    )


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
