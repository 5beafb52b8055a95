"""bitsandbytes' checkpoints, as transformers saves them: how they are read. A 4-bit matrix is a column
of bytes; its shape and blocks are in a JSON beside it, which is read when a conversion is planned."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.errors import CheckpointError, PlanError
from qconvert.core.graph import Output
from qconvert.core.json_text import parse_object
from qconvert.core.parameter_names import BNB4, BNB8
from qconvert.formats.base import FolderTensors, Format, Read, stored, weights_of_method
from qconvert.plan.plan import Plan

if TYPE_CHECKING:
    from qconvert.formats.bitsandbytes.decode import DequantBnb4

_METHOD = "bitsandbytes"
_FLAGS = {4: "load_in_4bit", 8: "load_in_8bit"}
_BY_ROW = 0  # of `weight_format`: others are orders of kernels that bitsandbytes no longer has


def read_4bit(plan: Plan, module: str) -> Read | None:
    """A module whose weight has a `quant_state`, or an `absmax` alone."""
    codes, absmax, table, nested, nested_table, *states = (f"{module}.{part}" for part in BNB4)
    state = next((name for name in states if name in plan.tensors), None)
    if state is None and absmax not in plan.tensors:
        return None
    config = _config(plan.checkpoint, module, 4)
    if state is None or codes not in plan.tensors:
        lacking = repr(codes) if state else " or ".join(map(repr, states))
        raise PlanError(f"{lacking} is missing, and {module!r} has parts of bitsandbytes' codes")
    weight = plan.tensors[codes].type
    if weight.dtype != "U8":
        raise PlanError(
            f"{codes!r}: expected bitsandbytes' codes in U8, found {weight}: bnb_4bit_quant_storage "
            "uint8 is read"
        )
    kind = state.rpartition("__")[2]
    if (said := config.block.get("bnb_4bit_quant_type", kind)) != kind:
        raise PlanError(
            f"{config.where} states bnb_4bit_quant_type {said!r}, and {module!r} is {kind}"
        )
    found = _decoder(plan.checkpoint, state, kind)
    names = [codes, absmax, table]
    if found.decoder.nested is not None:
        names += [nested, nested_table]
    read = stored(plan, names, found.decoder, _flat)
    if read.rows != found.rows:
        raise PlanError(
            f"{codes!r}: {state!r} states {found.rows} rows of {found.decoder.columns}, and its "
            f"{weight.numel} bytes hold {read.rows}"
        )
    return read, (*names, state)


def _flat(output: Output) -> Output:
    return output.reshape((output.type.numel,))


class _Stated(NamedTuple):
    """A matrix by its quant_state."""

    rows: int
    decoder: DequantBnb4


@lru_cache(maxsize=4096)
def _decoder(checkpoint: Checkpoint, name: str, kind: str) -> _Stated:
    """The decoder of a matrix by the JSON under this name. Raises PlanError for one that bitsandbytes
    does not write."""
    from qconvert.formats.bitsandbytes.decode import DequantBnb4, Nested

    try:
        state = parse_object(checkpoint.read_small(checkpoint[name]), checkpoint.root / name)
    except CheckpointError as error:
        raise PlanError(f"{name!r}: expected a JSON of bitsandbytes': {error}") from error
    sizes: list[Any] = [state.get("blocksize"), *(state.get("shape") or [])]
    nested = state.get("nested_blocksize")
    offset = state.get("nested_offset")
    sizes += [] if nested is None else [nested]
    whole = len(sizes) == 3 + (nested is not None)
    even = whole and type(sizes[0]) is int and sizes[0] % 2 == 0
    whole = even and all(type(one) is int and one > 0 for one in sizes)
    if not whole or state.get("quant_type") != kind:
        raise PlanError(
            f"{name!r}: expected quant_type {kind}, an even blocksize and a shape of two sizes, found "
            f"{state!r}"
        )
    if nested is not None and not isinstance(offset, float | int):
        raise PlanError(f"{name!r}: expected a nested_offset, found {offset!r}")
    beside = None if nested is None else Nested(nested, float(offset or 0))
    return _Stated(sizes[1], DequantBnb4(sizes[2], sizes[0], beside))


def read_int8(plan: Plan, module: str) -> Read | None:
    """A module with an `SCB`. Raises PlanError for another order of its codes than by row."""
    codes, scale, order = (f"{module}.{part}" for part in BNB8)
    if scale not in plan.tensors:
        return None
    from qconvert.formats.bitsandbytes.decode import DequantBnb8

    _config(plan.checkpoint, module, 8)
    names = [codes, scale]
    if order in plan.tensors:
        names.append(order)
        kind = plan.tensors[order].type
        value = plan.checkpoint.read_small(plan.checkpoint[order])[0] if kind.numel == 1 else None
        if value != _BY_ROW:
            raise PlanError(
                f"{order!r}: expected one number, 0 (by row), found {kind}, {value}: weights in the "
                "order of a kernel of bitsandbytes before 0.45 are not read; save them with a later one"
            )
    read = stored(plan, names[:2], DequantBnb8(), _as_column)
    return read, tuple(names)


def _as_column(output: Output) -> Output:
    shape = output.type.shape
    return output.reshape((*shape, 1)) if len(shape) == 1 else output


def _config(checkpoint: Checkpoint, module: str, bits: int) -> QuantConfig:
    """bitsandbytes' block. Raises PlanError where there is none of these bits."""
    for config in checkpoint.quantization_configs:
        if config.method == _METHOD and config.block.get(_FLAGS[bits]):
            return config
    raise PlanError(
        f"{module!r} has bitsandbytes' {bits}-bit codes, and the config does not state quant_method "
        f"{_METHOD} with {_FLAGS[bits]}: one of them is wrong"
    )


def _label_4bit(folder: FolderTensors, module: str, parameter: str) -> str | None:
    name = f"{module}.{parameter}"
    kinds = (one.rpartition("__")[2] for one in BNB4[5:] if f"{module}.{one}" in folder.tensors)
    found = next(kinds, None)
    return f"bitsandbytes {found.upper()}" if name == f"{module}.{BNB4[0]}" and found else None


_EQUALS = "bitsandbytes 0.50"
FORMATS = (
    Format(
        name="bitsandbytes-4bit", title="bitsandbytes 4-bit", parameters=BNB4, mark=BNB4[1],
        unmixed=weights_of_method(_METHOD, read_4bit), codes=("U8",), cut=(0, 0), order=16,
        equals=f"{_EQUALS} dequantize_4bit", read=read_4bit, label=_label_4bit,
    ),
    Format(
        name="bitsandbytes-int8", title="bitsandbytes INT8", parameters=BNB8, mark=BNB8[1],
        unmixed=weights_of_method(_METHOD, read_int8), codes=("I8",), cut=(1, 0), order=17,
        equals=f"{_EQUALS} int8_vectorwise_dequant", read=read_int8,
    ),
)  # fmt: skip
