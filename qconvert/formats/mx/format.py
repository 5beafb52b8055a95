"""MXFP4, of compressed-tensors, of Quark or beside FP8 as DeepSeek-V4 has it, and gpt-oss's stacks;
MXFP8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

from qconvert.checkpoint.quantization_config import described, is_mxfp4, states_mxfp4, weights_of
from qconvert.core.errors import PlanError
from qconvert.core.parameter_names import MX, MXFP4, MXFP4_BESIDE, MXFP4_PLAIN, MXFP4_STACKED
from qconvert.core.versions import LLM_COMPRESSOR, SGLANG, TRANSFORMERS, VLLM
from qconvert.formats.base import FolderTensors, Format, Read, stored
from qconvert.formats.fp8.format import read as read_fp8
from qconvert.formats.mx.decode import BLOCK, EXPONENTS, DequantMxfp4
from qconvert.ops.rowwise import RowOp
from qconvert.plan.plan import Plan

Form = Literal["mxfp4", "mxfp8"]
_CONFIG_FORMATS: Mapping[Form, str] = {"mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


def read(plan: Plan, module: str) -> Read | None:
    """A module with a `weight_packed`, or a `weight`, in U8 where the config states MXFP4, or an I8
    `weight` with F8_E8M0 scales: DeepSeek-V4's config states nothing about their block."""
    codes, scale = (f"{module}.{part}" for part in MXFP4)
    found = plan.tensors.get(codes)
    if found is not None and found.type.dtype == "U8":
        said = weights_of(plan.checkpoint, module)
        known = any(states_mxfp4(c.block) for c in plan.checkpoint.quantization_configs)
        if not known and said is not None and "algorithm" in said[0]:
            raise PlanError(
                f"weight {codes!r}: {said[1]} states {described(said[0])}, which is not read here"
            )
        if not known and (said is None or not is_mxfp4(said[0])):
            raise PlanError(
                f"weight {codes!r} is U8 without a global scale, so no NVFP4, and the config states no "
                "MXFP4: qconvert does not guess"
            )
        return _stored(plan, codes, scale)
    codes, scale = (f"{module}.{part}" for part in MXFP4_BESIDE)
    found, exponents = plan.tensors.get(codes), plan.tensors.get(scale)
    if found is None or found.type.dtype not in ("I8", "U8"):
        return None
    if exponents is not None and exponents.type.dtype == "F8_E8M0":
        return _stored(plan, codes, scale)
    said = weights_of(plan.checkpoint, module) if found.type.dtype == "U8" else None
    if said is None or not is_mxfp4(said[0]):
        return None
    return _stored(plan, *(f"{module}.{part}" for part in MXFP4_PLAIN))


def _stored(plan: Plan, codes: str, scale: str) -> Read:
    return stored(plan, (codes, scale), DequantMxfp4()), (codes, scale)


def stacks(plan: Plan) -> dict[str, tuple[str, str]]:
    """gpt-oss's stacks: the names of codes U8 [E, N, K/32, 16] and of exponents U8 [E, N, K/32], by the
    name of the stack in numbers. Raises PlanError where a part is missing or does not fit."""
    codes, scales = MXFP4_STACKED
    found = {}
    for name, output in plan.tensors.items():
        if not name.endswith(codes) or output.type.dtype != "U8":
            continue
        stem = name.removesuffix(codes)
        scale = plan.tensors.get(f"{stem}{scales}")
        if scale is None:
            raise PlanError(f"{stem + scales!r} is missing, and {name!r} is there")
        shape = output.type.shape
        if len(shape) != 4 or shape[3] != 16 or scale.type.shape != shape[:3]:
            raise PlanError(
                f"{name!r}: expected [experts, rows, blocks, 16] and exponents [experts, rows, blocks], "
                f"found {output.type} and {scale.type}"
            )
        if scale.type.dtype not in EXPONENTS:
            raise PlanError(f"{stem + scales!r}: expected exponents in U8, found {scale.type}")
        found[stem] = (name, f"{stem}{scales}")
    return found


def _encoder(form: Form) -> RowOp:
    from qconvert.formats.mx.encode import EncodeMx

    return EncodeMx(form)


def mx_group_config(form: Form, targets: Iterable[str]) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py`: MXFP4A16
    and MXFP8). Runtimes decide for themselves how they compute with MXFP4 weights; with MXFP8 ones vLLM
    (`schemes/compressed_tensors_w8a8_mxfp8.py`) scales activations alike."""
    common = {
        "num_bits": 4 if form == "mxfp4" else 8, "type": "float", "symmetric": True,
        "strategy": "group", "group_size": BLOCK, "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }  # fmt: skip
    return {
        "targets": list(targets),
        "format": _CONFIG_FORMATS[form],
        "weights": {**common, "dynamic": False},
        "input_activations": None if form == "mxfp4" else {**common, "dynamic": True},
        "output_activations": None,
    }


def quark_config(left: Iterable[str]) -> dict[str, Any]:
    """Quark's block of MXFP4 weights and inputs (amd-quark 0.13, `torch/quantization/config/config.py`,
    its `to_dict`), for all linear layers but those of the names and `re:` patterns `left`. sglang
    (`quark/quark.py`, `_is_mx_fp4`) has no class for weights alone."""
    number = {
        "dtype": "fp4", "qscheme": "per_group", "group_size": BLOCK, "ch_axis": -1, "symmetric": None,
        "scale_type": "float", "scale_format": "e8m0", "round_method": "half_even",
        "scale_calculation_mode": "even", "zero_point_type": "int32", "block_size": None,
        "mx_element_dtype": None, "is_scale_quant": False, "observer_cls": "PerBlockMXObserver",
        "enable_buffer_reuse": False, "max_input_numel": 4194304,
    }  # fmt: skip
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": {
            "weight": {**number, "is_dynamic": False},
            "input_tensors": {**number, "is_dynamic": True},
            "output_tensors": None,
            "bias": None,
            "target_device": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "exclude": list(left),
        "algo_config": None,
        "softmax_quant_spec": None,
        "export": {
            "kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
            "weight_format": "real_quantized", "weight_merge_groups": None,
        },
        "version": "0.13",
    }  # fmt: skip


def mxfp4_modules(plan: Plan) -> list[str]:
    """Modules whose weights are MXFP4 in compressed-tensors' form or Quark's, [] where the config states
    none."""
    found = []
    packed = any(states_mxfp4(config.block) for config in plan.checkpoint.quantization_configs)
    for name, output in plan.tensors.items():
        module, _, parameter = name.rpartition(".")
        if output.type.dtype != "U8" or parameter not in (MXFP4[0], MXFP4_PLAIN[0]):
            continue
        said = None if parameter == MXFP4[0] else weights_of(plan.checkpoint, module)
        if (said is not None and is_mxfp4(said[0])) or (packed and parameter == MXFP4[0]):
            found.append(module)
    return found


def _check_source(plan: Plan) -> None:
    if mxfp4_modules(plan):
        raise PlanError("the source is MXFP4: rounding its codes again would only lose")


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    """A matrix with exponents beside it."""
    if parameter not in ("weight", "weight_packed"):
        return None
    for one in (MXFP4[1], MXFP4_BESIDE[1]):
        scale = folder.tensors.get(f"{module}.{one}")
        if scale is not None and scale.dtype in EXPONENTS:
            return "MXFP4"
    return None


def _stack_label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    codes, scales = MXFP4_STACKED
    stem = f"{module}.{parameter}".removesuffix(codes)
    beside = parameter.endswith(codes) and f"{stem}{scales}" in folder.tensors
    return "MXFP4" if beside else None


_EQUALS = f"{LLM_COMPRESSOR} model_free_ptq"
FORMATS = (
    Format(
        name="mxfp4", title="MXFP4", parameters=MX["mxfp4"], codes=("U8",), cut=(1, 32), order=40,
        equals=f"{_EQUALS} MXFP4A16", read=read, label=_label,
        encode=partial(_encoder, "mxfp4"),
        config_group=lambda targets: mx_group_config("mxfp4", targets),
        check=_check_source,
        notes=(f"loaded by {VLLM}; {SGLANG} reads it in Kimi-K3 and DeepSeek-V4 alone",),
    ),
    Format(
        name="mxfp8", title="MXFP8", parameters=MX["mxfp8"], codes=("F8_E4M3",), cut=(1, 32), order=10,
        equals=f"{_EQUALS} MXFP8", read=read_fp8,
        encode=partial(_encoder, "mxfp8"),
        config_group=lambda targets: mx_group_config("mxfp8", targets),
        check=_check_source,
        notes=(f"loaded by {VLLM}; {SGLANG} has no class for it",),
    ),
    Format(
        name="mxfp4-deepseek-v4", title="MXFP4", parameters=MXFP4_BESIDE, codes=("I8", "U8"),
        cut=(1, 32), order=40,
        equals="DeepSeek-V4 inference/convert.py", read=read, label=_label,
    ),
    Format(
        name="mxfp4-quark", title="MXFP4", parameters=MXFP4_PLAIN, codes=("U8",), cut=(1, 32), order=40,
        equals="amd-quark 0.13 torch/utils/pack.py", read=read, label=_label,
    ),
    Format(
        name="mxfp4-gpt-oss", title="MXFP4", parameters=MXFP4_STACKED, codes=("U8",), cut=(1, 32),
        order=40,
        equals=f"{TRANSFORMERS} integrations/mxfp4.py", label=_stack_label,
    ),
)  # fmt: skip
