"""Integers of AMD Quark: how they are read. Its MXFP4, NVFP4 and FP8 are stored as others store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.checkpoint.quantization_config import weights_of
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, inferred
from qconvert.core.parameter_names import INT8
from qconvert.formats.base import FolderTensors, Format, Read, Stored
from qconvert.ops.rowwise import Decoder
from qconvert.plan.plan import Plan

QUARK = "amd-quark 0.13 torch/export/nn/modules/realquantizer.py"


def read(plan: Plan, module: str) -> Read | None:
    """A module with a `weight` in I32 or I8 for which Quark's config states integers. Symmetric ones may
    have zero points, of 0, too."""
    codes, scale, zero = (f"{module}.{part}" for part in INT8)
    weight = plan.tensors.get(codes)
    if weight is None or weight.type.dtype not in ("I32", "I8"):
        return None
    said = _stated(weights_of(plan.checkpoint, module), weight.type)
    if said is None:
        return None
    names = [codes, scale]
    if zero in plan.tensors or not said["symmetric"]:
        names.append(zero)
    missing = next((name for name in names if name not in plan.tensors), None)
    if missing is not None:
        raise PlanError(f"{missing!r} is missing, and {codes!r} is Quark's {weight.type}")
    args = [plan.tensors[name] for name in names]
    decoder = _decoder(said, args)
    if weight.type.dtype == "I8":
        args = [_as_column(one) if n else one for n, one in enumerate(args)]
    try:
        _, (kind,) = inferred(decoder, tuple(one.type for one in args))
    except PlanError as error:
        raise PlanError(f"weight {codes!r} with {scale!r}: {error}") from error
    return Stored(decoder, tuple(args), *kind.shape), tuple(names)


def _stated(
    found: tuple[Mapping[str, Any], str] | None, kind: TensorType
) -> Mapping[str, Any] | None:
    """Quark's integers that are stored in a dtype: 4 bits in groups, or 8 by row; None for others."""
    if found is None or "signed" not in found[0]:
        return None
    wanted = ("I32", 4, "group") if kind.dtype == "I32" else ("I8", 8, "channel")
    fits = (kind.dtype, found[0]["num_bits"], found[0]["strategy"]) == wanted
    return found[0] if fits else None


def _decoder(said: Mapping[str, Any], args: list[Output]) -> Decoder:
    zeros = len(args) > 2
    if said["num_bits"] == 8:
        from qconvert.formats.int_packed.decode import DequantInt8

        return DequantInt8(not zeros)
    from qconvert.formats.int_packed.awq import WORD, DequantQuark

    shape = args[0].type.shape
    rows = WORD * shape[1] if len(shape) == 2 else 1
    return DequantQuark(said["group_size"], zeros, 0, rows, said["signed"], said["reorder"])


def _as_column(one: Output) -> Output:
    """A number a row as [N, 1]."""
    return one.reshape((one.type.numel, 1)) if len(one.type.shape) == 1 else one


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    kind = folder.tensors.get(f"{module}.weight")
    if parameter != "weight" or kind is None:
        return None
    said = _stated(weights_of(folder.checkpoint, module), kind)
    if said is None:
        return None
    group = f"g{said['group_size']}" if said["strategy"] == "group" else "per channel"
    return f"Quark INT{said['num_bits']} {group}"


FORMATS = (
    Format(
        name="quark-int4", title="Quark INT4", parameters=INT8, codes=("I32",), cut=("word", "group"),
        order=25, equals=QUARK, read=read, label=_label,
    ),
    Format(
        name="quark-int8", title="Quark INT8", parameters=INT8, codes=("I8",), cut=(1, 0), order=25,
        equals=QUARK, read=read, label=_label,
    ),
)  # fmt: skip
