"""The runner of experts that sglang chooses for a class on a B200, and for gpt-oss in BF16. Read in
sglang: `arg_groups/overrides.py` and `arg_groups/model_overrides/`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.runtimes.loading.config_groups import block_of
from qconvert.runtimes.loading.setting import BLACKWELL, HOPPER, NotSimulated, Setting

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
