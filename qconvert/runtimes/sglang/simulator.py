"""Simulator of sglang's loader: `simulate` builds the rank's parameters from the config and the table of
its class, offers every tensor of the headers to them, and says what is written, read, refused or
misread.

The runner of experts that sglang chooses for a class on a B200, and for gpt-oss in BF16. Read in
sglang: `arg_groups/overrides.py` and `arg_groups/model_overrides/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.versions import SGLANG, comes_before
from qconvert.runtimes.classes.build import after_load, built, in_right_groups
from qconvert.runtimes.classes.expressions import Sizes
from qconvert.runtimes.classes.names import RecordedNames, of_draft
from qconvert.runtimes.classes.record import (
    Module,
    Record,
    architecture_of,
    check_form,
    class_record,
)
from qconvert.runtimes.loading.building import RankBuild, check_stages, divided, text_config
from qconvert.runtimes.loading.config_groups import block_of
from qconvert.runtimes.loading.load_weights import SimulatedLoad, offered
from qconvert.runtimes.loading.setting import BLACKWELL, HOPPER, LoadRefused, NotSimulated, Setting
from qconvert.runtimes.sglang.quantization import Fp8, Mixed, Renames, quantization_of, root_block
from qconvert.runtimes.shared_experts import fused, has_rule

_ALL_FORMS = ("", "fp8", "modelopt_fp4", "modelopt_mixed")
_DEEPSEEK = "DeepseekV3ForCausalLM"
# Forms for which a class gets trtllm's runner.
_TRTLLM: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((
        "Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", _DEEPSEEK,
    ), _ALL_FORMS),
    "Qwen3_5ForCausalLM": (), "Qwen3_5MoeForCausalLM": (),
    "Glm4MoeForCausalLM": ("", "modelopt_fp4"),
}  # fmt: skip


def runner_of(architecture: str, config: Mapping[str, Any], setting: Setting) -> str:
    """The runner of experts: what is asked for, or what the class chooses. Raises NotSimulated for
    another GPU than an H200, of a class of which that was not read."""
    if setting.capability != HOPPER and architecture not in _TRTLLM:
        raise NotSimulated("another GPU than an H200")
    asked = setting.moe_runner != "auto" or setting.a2a != "none"
    plain = architecture == "GptOssForCausalLM" and block_of(config) is None
    if not asked and plain and setting.ep == 1:
        return "triton_kernel"
    if asked or setting.capability[0] != BLACKWELL[0]:
        return setting.moe_runner
    block = block_of(config)
    method = "" if block is None else str(block.get("quant_method") or "modelopt")
    name = {"modelopt": "modelopt_fp4"}.get(method, method)
    if block is not None and block.get("quant_algo") == "MIXED_PRECISION":
        return _mixed_runner(architecture, block)
    chosen = name in _TRTLLM[architecture] or (architecture == _DEEPSEEK and _is_kimi(block))
    return "flashinfer_trtllm" if chosen else "auto"


def _mixed_runner(architecture: str, block: Mapping[str, Any]) -> str:
    """The runner for modelopt's MIXED_PRECISION: marlin for experts of weights alone in Qwen's classes
    (model_overrides/qwen3_moe.py), none chosen in GLM's."""
    if "modelopt_mixed" not in _TRTLLM[architecture]:
        return "auto"
    layers = block.get("quantized_layers")
    entries = layers.items() if isinstance(layers, Mapping) else ()
    weights = any(
        ".experts" in str(name) and isinstance(entry, Mapping)
        and str(entry.get("quant_algo", "")).upper() == "W4A16_NVFP4"
        for name, entry in entries
    )  # fmt: skip
    return "marlin" if weights and architecture != _DEEPSEEK else "flashinfer_trtllm"


def _is_kimi(block: Mapping[str, Any] | None) -> bool:
    """INT4 in groups of 32, Kimi K2 Thinking's form (arg_groups/overrides.py,
    _deepseek_moe_quant_resolution)."""
    groups = (block or {}).get("config_groups")
    group = groups.get("group_0") if isinstance(groups, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    wanted = {"num_bits": 4, "group_size": 32, "strategy": "group", "type": "int"}
    return isinstance(weights, Mapping) and all(weights.get(k) == v for k, v in wanted.items())


def simulate(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    setting: Setting | None = None,
    *,
    groups: int | None = None,
    draft: bool = False,
    version: str | None = None,
) -> SimulatedLoad:
    """Load a folder on one rank: its config.json and the headers of its tensors, in the order of its
    files. `groups`: in how many groups the rows of its fused linear-attention projections are, 0 for
    split ones, as its manifest states; headers cannot show it, and without it any order is taken for
    right. `draft`: load the draft model that the folder holds. `version`: of sglang, whose table of the
    class is asked, in forms that were compared with the loader. Raises NotSimulated for what the
    simulator has no rule for."""
    asked = setting or Setting()
    record = class_record("sglang", architecture_of(config), version, draft=draft)
    own = of_draft(record, text_config(config), tensors) if draft else tensors
    check_form(record, config, own, asked)
    return by_table(record, config, tensors, asked, groups)


def _check_layers(layers: object) -> None:
    if layers not in (None, 1):
        raise LoadRefused(
            "AssertionError", "Only 1 nextn layer is supported", "config.json",
            f"num_nextn_predict_layers is {layers}, and the class takes 1",
        )  # fmt: skip


# The release in which classes with DeepSeek's loader ask kv_b_proj for its block; those before ask the
# config, which states none for modelopt's mixtures (models/deepseek_common/deepseek_weight_loader.py).
_BLOCK_OF_LAYER = "0.5.23"


def _check_latent(build: RankBuild, version: str) -> None:
    """Raise LoadRefused for a kv_b_proj in blocks that the class takes for one with a scale."""
    if not isinstance(build.quantization, Mixed) or not comes_before(version, _BLOCK_OF_LAYER):
        return
    for name in build.parameters:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_scale_inv" and module.endswith(".kv_b_proj"):
            raise LoadRefused(
                "AttributeError", "has no attribute 'weight_scale'", module,
                f"the class looks for one scale and there are blocks; use sglang {_BLOCK_OF_LAYER}",
            )  # fmt: skip


_DEEPSEEK_V4 = "DeepseekV4ForCausalLM"


def _has_packed_experts(tensors: Mapping[str, TensorType]) -> bool:
    """Tell whether the first routed expert has packed codes, by which DeepSeek-V4's are known
    (configs/deepseek_v4.py, try_detect_fp4_experts)."""
    experts = (t for n, t in tensors.items() if ".experts." in n and n.endswith(".weight"))
    return next((one.dtype in ("I8", "U8") for one in experts), False)


def _in_fp8(module: Module) -> Module:
    """A module of DeepSeek-V4's class: wo_a is quantized under FP8 alone, and then must be
    (deepseek_v4.py, wo_a_fp8_gemm_enabled)."""
    return replace(module, asked=module.name) if module.name.endswith(".wo_a") else module


def _check_grouped(build: RankBuild) -> None:
    """Raise LoadRefused for a wo_a that a list keeps from FP8."""
    for module in build.schemes:
        if module.endswith(".wo_a") and f"{module}.weight_scale_inv" not in build.parameters:
            raise LoadRefused(
                "AssertionError", "FP8 quant_config must create weight_scale_inv", module,
                "the class computes with it in FP8 where others are, and it is listed as unquantized",
            )  # fmt: skip


def _group_scales(build: RankBuild, sizes: Sizes) -> None:
    """Give scales of wo_a the shape that its class views them in once all is read."""
    for name, parameter in build.parameters.items():
        if name.endswith(".wo_a.weight_scale_inv"):
            groups, (rows, columns) = sizes.of("o_groups") // build.setting.tp, parameter.shape
            parameter.shape = groups, rows // groups, columns


def by_table(
    record: Record,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    asked: Setting,
    groups: int | None = None,
) -> SimulatedLoad:
    """Load a folder on one rank by the table of its class, in whatever form."""
    if asked.tp % asked.ep:
        raise NotSimulated(f"tp {asked.tp} that ep {asked.ep} does not divide")
    apart = asked.disable_shared_experts_fusion or not record.fuses_shared
    if not apart and not has_rule(record.architecture):
        raise NotSimulated("its shared experts, which it may load as routed ones")
    if record.draft and asked.pp > 1:
        raise NotSimulated("a draft in pipeline stages")
    if asked.capability != HOPPER and record.version in SGLANG.earlier:
        raise NotSimulated(f"sglang {record.version} on another GPU than an H200")
    setting = replace(asked, moe_runner=runner_of(record.architecture, config, asked))
    numbers = text_config(config)
    sizes = record.sizes({**config, **numbers.values})
    if len(record.mappers) > 1 or any(one.patterns for one in record.mappers):
        raise NotSimulated("two mappers of names, one after another, or one of patterns")
    renames = next((Renames(one.parts, one.starts) for one in record.mappers), Renames())
    shared = 0
    try:
        if record.draft and not record.layers:
            _check_layers(sizes.flag("num_nextn_predict_layers"))
        check_stages(setting, (sizes.of(n) for n in record.layers.values()), one=record.one_stage)
        packed = record.architecture == _DEEPSEEK_V4 and _has_packed_experts(tensors)
        stated = quantization_of(
            config, record.packed, setting, numbers.dtype, record.version, renames, packed=packed
        )
        if record.architecture == _DEEPSEEK_V4 and isinstance(stated, Fp8):
            if stated.size != (128, 128):
                raise NotSimulated("FP8 of which the class dequantizes a part while it loads")
            record = replace(record, modules=tuple(map(_in_fp8, record.modules)))
        if record.draft and isinstance(stated, Mixed) and stated.names("mtp."):
            # It takes a draft that is not listed for bf16.
            own = tuple(replace(one, unquantized=()) for one in record.modules)
            record = replace(record, modules=own)
        build = RankBuild(setting, stated, numbers.dtype)
        heads = "num_attention_heads"
        if sizes.flag(heads) is not None:  # of linears that ranks share otherwise, too
            divided(sizes.of(heads), setting.tp, heads)
        shared = fused(record.architecture, config, root_block(config), setting)
        made = built(record, build, sizes, tensors, shared)
        if record.architecture == _DEEPSEEK_V4 and isinstance(stated, Fp8):
            _check_grouped(build)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused, shared_fused=shared > 0)

    def after(build: RankBuild, tensors: Mapping[str, TensorType]) -> None:
        after_load(made)
        _check_latent(build, record.version)
        _group_scales(build, sizes)

    done = offered(
        build, RecordedNames(made), tensors, asked, shared_fused=shared > 0, after=after
    )  # fmt: skip
    return in_right_groups(record, sizes, done, groups, tensors)
