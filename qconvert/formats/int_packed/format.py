"""Integers: compressed-tensors' packed form and INT8, GPTQ's own form and AutoAWQ's, which are packed
along the inputs or the outputs, transposed: how they are read, and their config blocks as runtimes
parse them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from qconvert.checkpoint.auto_round import METHOD as AUTO_ROUND
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.integer_config import awq_form, gptq_form, packed_scheme
from qconvert.core.errors import PlanError
from qconvert.core.int_scheme import WORD_BITS, IntScheme, words
from qconvert.core.names import with_fused_names
from qconvert.core.parameter_names import AWQ, GPTQ, INT8, PACKED
from qconvert.core.versions import COMPRESSED_TENSORS, LLM_COMPRESSOR, SGLANG, VLLM
from qconvert.formats.base import FolderTensors, Format, Read, activations_note, stored
from qconvert.ops.rowwise import RowOp
from qconvert.plan.plan import Plan


def read_packed(plan: Plan, module: str) -> Read | None:
    """A module with a `weight_packed` that is no FP4. `weight_shape` repeats the shape; where there is a
    scale a row, nothing else says how many codes the last word of a row holds."""
    codes, scale, zero, order, shape = (f"{module}.{part}" for part in PACKED)
    if codes not in plan.tensors or plan.tensors[codes].type.dtype == "U8":
        return None
    from qconvert.formats.int_packed.decode import DequantInts

    scheme = packed_scheme(plan.checkpoint, module)
    names = [codes, scale]
    names += _zero_points(plan, zero, scheme)
    ordered = scheme.actorder == "group"
    if ordered:
        names.append(order)
    elif order in plan.tensors:
        raise PlanError(
            f"{order!r} exists, and the config states no actorder group: one of them is wrong"
        )
    wide = _stated_columns(plan, (codes, scale, shape), scheme)
    decoder = DequantInts(scheme.bits, scheme.group, scheme.symmetric, ordered, wide)
    taken = (*names, shape) if shape in plan.tensors else tuple(names)
    return stored(plan, names, decoder), taken


def _stated_columns(plan: Plan, names: tuple[str, str, str], scheme: IntScheme) -> int | None:
    """Columns by a matrix's `weight_shape`, where words and scales do not say them alone; None: they do.
    It is not asked of a source in a store, which would take a request for each matrix. `names` are those
    of codes, scales and shape."""
    packed, scale = (plan.tensors[n].type if n in plan.tensors else None for n in names[:2])
    source = plan.checkpoint.get(names[2])
    if packed is None or scale is None or len(packed.shape) != 2 or len(scale.shape) != 2:
        return None
    full, group = packed.shape[1] * WORD_BITS // scheme.bits, scheme.group
    if group is not None:
        fits = words(group * scale.shape[1], scheme.bits) == packed.shape[1]
        if not fits or full % group or full == group * scale.shape[1]:
            return None
    stated = None
    if source is not None and names[2] in plan.tensors:
        stated = plan.checkpoint.read_shape(source)
    if stated is None:
        return None
    rows, columns = stated
    if (rows, words(columns, scheme.bits)) != packed.shape:
        raise PlanError(
            f"{names[0]!r}: expected [{rows}, {words(columns, scheme.bits)}] for {scheme.bits} bits of "
            f"the shape that {names[2]!r} states, {list(stated)}, found {packed}"
        )
    return None if group is None and columns == full else columns


def _zero_points(plan: Plan, name: str, scheme: IntScheme) -> list[str]:
    """The zero points of a matrix, where the config says that it has some."""
    if scheme.symmetric and name in plan.tensors:
        raise PlanError(f"{name!r} exists, and the config says symmetric: one of them is wrong")
    return [] if scheme.symmetric else [name]


def read_awq(plan: Plan, module: str) -> Read | None:
    """A module with a `qweight`, where the config states AutoAWQ's form."""
    names = [f"{module}.{part}" for part in AWQ]
    form = awq_form(plan.checkpoint, module) if names[0] in plan.tensors else None
    if form is None:
        return None
    from qconvert.formats.int_packed.awq import WORD, DequantAwq

    zeros = form.zero_point or names[-1] in plan.tensors
    if zeros and not form.zero_point and not form.kept:
        raise PlanError(
            f"{names[-1]!r} exists, and the config says zero_point false: one of them is wrong"
        )
    if not zeros:
        del names[-1]
    shape = plan.tensors[names[0]].type.shape
    rows = WORD * shape[1] if len(shape) == 2 else 1
    return stored(plan, names, DequantAwq(form.group, zeros, 0, rows)), tuple(names)


def read_gptq(plan: Plan, module: str) -> Read | None:
    """A module with a `qweight`. Draft layers have no g_idx where the config says no desc_act."""
    names = [f"{module}.{part}" for part in GPTQ]
    if names[0] not in plan.tensors:
        return None
    from qconvert.formats.int_packed.gptq import DequantGptq

    form = gptq_form(plan.checkpoint, module)
    if form.scheme.actorder is None and names[-1] not in plan.tensors:
        del names[-1]
    scheme, shape = form.scheme, plan.tensors[names[0]].type.shape
    rows = shape[1] if len(shape) == 2 else 1
    decoder = DequantGptq(scheme.bits, scheme.group, form.version, 0, rows)
    return stored(plan, names, decoder), tuple(names)


def read_int8(plan: Plan, module: str) -> Read | None:
    """A module with an I8 `weight` and a `weight_scale` in floats."""
    codes, scale, zero = (f"{module}.{part}" for part in INT8)
    weight, factor = plan.tensors.get(codes), plan.tensors.get(scale)
    if weight is None or weight.type.dtype != "I8" or factor is None:
        return None
    from qconvert.formats.int_packed.decode import DequantInt8

    scheme = packed_scheme(plan.checkpoint, module, "int-quantized")
    if scheme.bits != 8 or scheme.actorder == "group":
        raise PlanError(
            f"weight {codes!r} is I8, and the config states {scheme.bits} bits, actorder "
            f"{scheme.actorder}: integers that are not packed are read with 8 bits and groups side by "
            "side"
        )
    names = [codes, scale, *_zero_points(plan, zero, scheme)]
    found = stored(plan, names, DequantInt8(scheme.symmetric))
    groups = factor.type.shape[1]
    expected = 1 if scheme.group is None else found.columns // scheme.group
    if groups != expected:
        raise PlanError(
            f"{scale!r}: expected {expected} scales a row by the config, found {groups}"
        )
    return found, tuple(names)


def _int8_encoder() -> RowOp:
    from qconvert.formats.int_packed.encode import RoundToNearest
    from qconvert.formats.int_packed.packers import INT8_ROWS, KeepInt8

    return RoundToNearest(INT8_ROWS, KeepInt8())


def group_config(scheme: IntScheme, targets: Iterable[str]) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py`)."""
    return {
        "targets": list(targets),
        "weights": {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": "channel" if scheme.group is None else "group",
            "group_size": scheme.group,
            "actorder": scheme.actorder,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }


def int8_group_config(targets: Iterable[str]) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py` INT8_W8A8):
    a scale a row, and activations scaled by token."""
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "targets": list(targets),
        "format": "int-quantized",
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }


def gptq_config(scheme: IntScheme, version: int, dynamic: Iterable[str]) -> dict[str, Any]:
    """The block of GPTQ's own form, as AutoGPTQ and GPTQModel write it (sglang and vLLM read
    it). `dynamic` are patterns of modules that stay unquantized: GPTQModel's `-:`."""
    return {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": -1 if scheme.group is None else scheme.group,
        "desc_act": scheme.actorder == "group",
        "sym": scheme.symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "pack_dtype": "int32",
        "dynamic": {f"-:{pattern}": {} for pattern in dynamic},
    }


def awq_config(scheme: IntScheme, left: Iterable[str]) -> dict[str, Any]:
    """The block of AutoAWQ's own form (0.2, `models/_config.py`). `left` are parts of names of modules
    that stay unquantized, which sglang, vLLM and transformers look for anywhere in a name."""
    return {
        "quant_method": "awq",
        "bits": scheme.bits,
        "group_size": -1 if scheme.group is None else scheme.group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(left),
    }


def left_parts(
    modules: Iterable[str], experts: Iterable[str], quantized: Iterable[str]
) -> list[str]:
    """Names for AutoAWQ's list: these modules but for quantized ones, under the names that runtimes fuse
    them to as well, and paths of experts that stay, instead of each one's name. Raises PlanError where
    one is part of the name of a quantized module."""
    taken, paths = set(quantized), [path.strip(".") for path in experts]
    names = (m for m in modules if m not in taken and not any(f".{path}." in m for path in paths))
    found = [*with_fused_names(names), *paths]
    whole = "\n".join(with_fused_names(taken))
    for name in found:
        if name in whole:
            line = next(one for one in whole.split("\n") if name in one)
            raise PlanError(
                f"{name!r} stays unquantized and {line!r} does not, and AutoAWQ's list names parts of "
                "names: it would leave both; take packing compressed-tensors or gptq-v2"
            )
    return found


def left_pattern(modules: Iterable[str]) -> str:
    """A pattern of just these modules, under the names that runtimes fuse them to as well. It spells no
    `mtp`: at the sight of it vLLM (`models/qwen3_5_mtp.py`) builds the whole draft unquantized."""
    names = (re.escape(name).replace("mtp", "mt[p]") for name in with_fused_names(modules))
    return f"^(?:{'|'.join(names)})$"


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    """One label for all matrices if the config has one scheme; else names decide."""
    if parameter == "weight_zero_point":
        return _ZEROS
    if parameter != "weight_packed":
        return None
    scheme = folder.once(_one_scheme)
    return _spelled("", lambda: scheme or packed_scheme(folder.checkpoint, module))


def _one_scheme(checkpoint: Checkpoint) -> IntScheme | None:
    try:
        return packed_scheme(checkpoint, "")
    except PlanError:
        return None


def _awq_label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    blocks = folder.checkpoint.quantization_configs
    block = next((found.block for found in blocks if found.method in ("awq", AUTO_ROUND)), None)
    if parameter != "qweight" or block is None:
        return None
    try:
        if awq_form(folder.checkpoint, module) is None:
            return None
    except PlanError:
        pass  # of another version, or bits
    size = block.get("group_size", block.get("q_group_size", "?"))
    group = "per channel" if size == -1 else f"g{size}"
    return f"AWQ INT{block.get('bits', block.get('w_bit', '?'))} {group}"


def _gptq_label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    if parameter == "qzeros":
        return _ZEROS
    if parameter != "qweight":
        return None
    return _spelled("GPTQ ", lambda: gptq_form(folder.checkpoint, module).scheme)


def _spelled(kind: str, read: Callable[[], IntScheme]) -> str:
    """Bits and groups of a scheme; `packed integers` if the config does not say them."""
    try:
        scheme = read()
    except PlanError:
        return f"{kind}packed integers"
    group = "per channel" if scheme.group is None else f"g{scheme.group}"
    zeros = "" if scheme.symmetric else ", zero points"
    return f"{kind}INT{scheme.bits} {group}{zeros}{'' if kind else ' (packed)'}"


_ZEROS = "zero points (packed)"
_PTQ = f"{LLM_COMPRESSOR} model_free_ptq"
FORMATS = (
    Format(
        name="int-packed", title="packed integers", parameters=PACKED, codes=("I32",), cut=(1,
        "group"), order=30,
        equals=f"{_PTQ} W4A16, W8A16", read=read_packed, label=_label,
    ),
    Format(
        name="awq", title="AWQ", parameters=AWQ, codes=("I32",), cut=("word", "group"), order=50,
        equals=f"{COMPRESSED_TENSORS} AutoAWQConverter", read=read_awq, label=_awq_label,
    ),
    Format(
        name="gptq", title="GPTQ", parameters=GPTQ, codes=("I32",), cut=("word", "group"), order=60,
        equals="AutoGPTQ 0.7, GPTQModel", read=read_gptq, label=_gptq_label,
    ),
    Format(
        name="int8", title="INT8", parameters=INT8[:2], codes=("I8",), cut=(1, 0), order=70,
        equals=f"{_PTQ} INT8", read=read_int8, encode=_int8_encoder, config_group=int8_group_config,
        notes=(activations_note("INT8"),),
        expert_notes=(
            f"routed experts in INT8: {VLLM} loads them on GPUs, {SGLANG} on NPUs alone",
        ),
    ),
)  # fmt: skip
