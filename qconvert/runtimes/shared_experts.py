"""When sglang makes shared experts one more routed expert, and what becomes of their weights.

A fused shared expert is read with the routed experts' scheme. Where a folder stores it in another form,
sglang leaves it unread without a word, or fails. `--disable-shared-experts-fusion` turns fusion off.

Read in sglang: `model_loader/loader.py` (`_initialize_model`), `layers/moe/utils.py`
(`resolve_shared_experts_config`), and per class `shared_experts_fusion_disable_reason`
(`models/deepseek_v2.py`, `glm4_moe.py`, `glm4_moe_lite.py`, `glm4v_moe.py`, `kimi_k25.py`) or
`can_fuse_shared_expert` (`models/qwen2_moe.py`, asked by `models/qwen3_next.py`). DeepSeek's is for the
architectures that name themselves so: not V2 and V3.2. Qwen3.5's classes fuse on ROCm alone. MoE runners
of trtllm and cutedsl fuse nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from qconvert.core.family import text_config
from qconvert.core.patterns import compiled
from qconvert.core.roles import ALL_EXPERTS
from qconvert.runtimes.classes import record
from qconvert.runtimes.loading.building import spelled
from qconvert.runtimes.loading.setting import Setting

NO_FUSION = "--disable-shared-experts-fusion"

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Class:
    """A class that fuses: what it calls shared experts, and the config key of its first sparse layer."""

    shared: str
    first: str | None = None


_DEEPSEEK, _GLM, _QWEN = "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Qwen3NextForCausalLM"
_KIMI = "KimiK25ForConditionalGeneration"
_CLASSES = {
    _DEEPSEEK: _Class("shared_experts", "first_k_dense_replace"),
    _GLM: _Class("shared_experts", "first_k_dense_replace"),
    _QWEN: _Class("shared_expert"),
}
# For configs without `architectures`.
_BY_TYPE = {"deepseek_v3": _DEEPSEEK, "glm4_moe": _GLM, "qwen3_next": _QWEN}


def architecture_of(config: Config) -> str:
    """The class that a config names, by its model_type where it names none."""
    return record.architecture_of(config) or _BY_TYPE.get(str(config.get("model_type")), "")


def fuses(architecture: str, config: Config, block: Config | None) -> bool:
    """Tell whether sglang's class, started without options, fuses the shared experts of a model with
    this config and quantization block."""
    return fused(architecture, config, block, Setting()) > 0


def fused(architecture: str, config: Config, block: Config | None, setting: Setting) -> int:
    """The number of shared experts that sglang's class loads as routed ones."""
    rule = _RULES.get(architecture)
    runners = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl")
    if rule is None or setting.disable_shared_experts_fusion or setting.moe_runner in runners:
        return 0
    return rule(spelled(text_config(config)), block, setting)


def has_rule(architecture: str) -> bool:
    """Tell whether it is known when a class of sglang that may fuse shared experts does."""
    return architecture in _RULES or architecture in _NEVER


def _of_deepseek(text: Config, block: Config | None, setting: Setting) -> int:
    """256 routed experts and one shared. 384 (Kimi) fuse in Quark's form alone."""
    experts = _count(text, ALL_EXPERTS if ALL_EXPERTS in text else "n_routed_experts")
    method = (block or {}).get("quant_method")
    known = experts == 256 or (experts == 384 and method == "quark")
    off = (
        _vetoes(block) or _packs_linears(block) or setting.a2a in _DEEPEP_CLASS or _is_divided(setting)
        or (_is_nvfp4(block) and setting.capability[0] == 9 and setting.moe_runner == "marlin")
    )  # fmt: skip
    return int(known and _count(text, "n_shared_experts") == 1 and not off)


def _of_kimi(text: Config, block: Config | None, setting: Setting) -> int:
    """DeepSeek's rule, asked of the text model, which names that class."""
    return _of_deepseek(text, block, setting) if architecture_of(text) == _DEEPSEEK else 0


def _of_glm(text: Config, block: Config | None, setting: Setting) -> int:
    off = _is_divided(setting) or setting.a2a in ("deepep", "mori")
    return 0 if off else _count(text, "n_shared_experts")


def _of_glm_lite(text: Config, block: Config | None, setting: Setting) -> int:
    return int(_count(text, "n_shared_experts") == 1 and not _is_divided(setting))


def _of_qwen(text: Config, block: Config | None, setting: Setting) -> int:
    size = _count(text, "shared_expert_intermediate_size")
    same = size > 0 and size == _count(text, "moe_intermediate_size") and not _vetoes(block)
    per_rank = setting.a2a in (*_DEEPEP_CLASS, "megamoe") and setting.ep > 1
    return int(same and not per_rank and setting.a2a not in ("deepep", "deepep_v2", "mori"))


def _is_divided(setting: Setting) -> bool:
    """Tell whether ranks divide experts, or the GPU is older than these classes take."""
    return setting.ep > 1 or setting.capability < (8, 0)


# Backends of communication whose combine happens inside the dispatcher (layers/moe/utils.py,
# is_deepep_class_backend).
_DEEPEP_CLASS = ("deepep", "deepep_v2", "mooncake", "mori", "pplx")
# Classes that would fuse, of architectures that are not among those that they do it for; DeepSeek-V4's
# does where it is told to alone (--enforce-shared-experts-fusion).
_NEVER = frozenset((
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM",
    "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
))  # fmt: skip
_RULES: Mapping[str, Callable[[Config, Config | None, Setting], int]] = {
    _DEEPSEEK: _of_deepseek, "GlmMoeDsaForCausalLM": _of_deepseek, _GLM: _of_glm, _KIMI: _of_kimi,
    "Glm4vMoeForConditionalGeneration": _of_glm, "Glm4MoeLiteForCausalLM": _of_glm_lite,
    _QWEN: _of_qwen,
}  # fmt: skip


def _count(text: Config, key: str) -> int:
    value = text.get(key)
    return value if type(value) is int else 0


def _vetoes(block: Config | None) -> bool:
    """modelopt's NVFP4 without FP8: an entry of its list that names shared experts
    (`ModelOptFp4Config.can_fuse_shared_expert`)."""
    return _is_nvfp4(block) and any(
        "shared_expert" in entry and "shared_expert_gate" not in entry
        for entry in _left_out(block or {})
    )


def _is_nvfp4(block: Config | None) -> bool:
    modelopt = block is not None and block.get("quant_method") == "modelopt"
    return modelopt and "NVFP4" in str((block or {}).get("quant_algo"))


def _packs_linears(block: Config | None) -> bool:
    """Tell whether the class of all linears is 4-bit integers (`is_wint4afp8_or_wint4a16_config`)."""
    for targets, group in _groups(block):
        weights = group.get("weights")
        if "Linear" in targets and isinstance(weights, Mapping):
            kind = weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)
            if kind == ("int", 4, True):
                return True
    return False


def kept_apart(architecture: str, config: Config, block: Config | None) -> bool:
    """Tell whether a block stores shared experts of some layer in another form than its routed ones, for
    a class that can fuse."""
    kind = _CLASSES.get(architecture)
    if kind is None or block is None:
        return False
    text = spelled(text_config(config))
    first = _count(text, kind.first) if kind.first else 0
    for layer in range(first, _count(text, "num_hidden_layers")):
        at = f"model.layers.{layer}.mlp"
        routed, shared = f"{at}.experts.0.down_proj", f"{at}.{kind.shared}.down_proj"
        if _form(block, routed, routed=True) != _form(block, shared, routed=False):
            return True
    return False


def loses_shared(config: Config, block: Config | None) -> bool:
    """Tell whether sglang, started without options, fuses shared experts that are stored in another form
    than the routed ones: it would not read them, or fail."""
    architecture = architecture_of(config)
    return fuses(architecture, config, block) and kept_apart(architecture, config, block)


def would_fuse(config: Config, block: Config | None) -> bool:
    """`fuses` for the class that the config names."""
    return fuses(architecture_of(config), config, block)


def needs_plain_linears(config: Config) -> bool:
    """Tell whether the class fails with packed shared experts that it does not fuse: GLM's looks at the
    dtype of a `weight`, which packed linears have not (`models/glm4_moe.py`,
    `Glm4MoeSparseMoeBlock`)."""
    return architecture_of(config) == _GLM


def _form(block: Config, module: str, *, routed: bool) -> str:
    """Form in which a block stores a module, comparable with another's; "" for unquantized."""
    method = block.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_form(block, module, routed=routed)
    if method == "gptq":
        dynamic = block.get("dynamic")
        left = [str(name).removeprefix("-:") for name in dynamic or () if str(name)[:2] == "-:"]
        return "" if any(_fits(f"re:{pattern}", module) for pattern in left) else "gptq"
    layers = block.get("quantized_layers")
    if isinstance(layers, Mapping):
        return _layer_form(layers, module)
    if any(_names(entry, module) for entry in _left_out(block)):
        return ""
    if "moe_quant_algo" in block:
        return "routed" if routed else "linear"
    return "all"


def _compressed_form(block: Config, module: str, *, routed: bool) -> str:
    if isinstance(block.get("linear_fp8_config"), Mapping) and not routed:
        return "linear_fp8_config"
    if any(_fits(entry, module) for entry in _left_out(block)):
        return ""
    fitting = []
    for number, (targets, _) in enumerate(_groups(block)):
        for target in targets:
            if _fits(target, module):
                fitting.append((0, number))
            elif target == "Linear":
                fitting.append((1, number))
    return f"group {min(fitting)[1]}" if fitting else ""


def _layer_form(layers: Config, module: str) -> str:
    """modelopt's MIXED_PRECISION: the entry of the module or of what it is in."""
    while module:
        entry = layers.get(module)
        if isinstance(entry, Mapping):
            return str(entry.get("quant_algo"))
        module = module.rpartition(".")[0]
    return ""


def _groups(block: Config | None) -> list[tuple[list[str], Config]]:
    groups = (block or {}).get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if isinstance(targets, list):
            found.append(([one for one in targets if isinstance(one, str)], group))
    return found


def _left_out(block: Config) -> list[str]:
    for key in ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert"):
        value = block.get(key)
        if isinstance(value, list):
            return [entry for entry in value if isinstance(entry, str)]
    return []


def _fits(entry: str, module: str) -> bool:
    """compressed-tensors' matching, as sglang does it: `re:` from the beginning, or a name's end."""
    if not entry.startswith("re:"):
        return entry == module or module.endswith(f".{entry}")
    try:
        return compiled(entry[3:]).match(module) is not None
    except re.error:  # QC034 reports it; a loader fails
        return False


def _names(entry: str, module: str) -> bool:
    """modelopt's and FP8's matching: a glob of the whole name or of one part of it."""
    return fnmatchcase(module, entry) or any(fnmatchcase(p, entry) for p in module.split("."))
