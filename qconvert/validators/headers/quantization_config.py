"""Every quantization block against the actual tensors, under the names runtimes look for.

QC034 a quantized module is listed as left out, or no target names it, or runtimes never build it
      quantized; or an entry cannot be read.
QC035 an unquantized linear layer is not listed as left out, under a name that its runtime looks up.
QC036 unquantized draft layers are listed by patterns that do not match the draft model's names.
QC037 quantization blocks contradict each other.
QC039 one block has two different lists of modules left out.

A list must contain the module's own name (or a run of its dotted segments, or a
pattern, as the method has it). Qwen3.5's linear attention is fused by some runtimes on loading and not
by others, so its sets need the names of all parts and of the fused whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.roles import Kind
from qconvert.core.versions import SGLANG
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, NotChecked, validator
from qconvert.validators.headers.stated_numbers import missing_numbers
from qconvert.validators.reading.forms import coded_weights
from qconvert.validators.reading.model import readable_quantization
from qconvert.validators.reading.quantization import (
    HF_QUANT_CONFIG,
    LISTS,
    Listed,
    ignored,
    named_targets,
    scheme,
    taken_block,
    targets,
)
from qconvert.validators.reading.stated_schemes import AUTO_ROUND, Targets, layer_table

# Sets that some runtimes fuse and others do not.
_SETS = (
    ("in_proj_b", "in_proj_a", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
)
# Classes of these families have no packed_modules_mapping in sglang (`models/glm4_moe.py`,
# `models/deepseek_v2.py`), so that the fused name must be listed too.
_WITHOUT_MAPPING = ("deepseek_v3", "glm4_moe", "kimi_k2")
_FUSED_BY_SGLANG = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip
# Read as floats by every runtime, whatever the config says.
_NEVER_QUANTIZED = ("router", "shared_expert_gate")
_DRAFT = "model.decoder"
# Methods whose lists are read here.
_LISTED = (*LISTS, "gptq", "awq", AUTO_ROUND)
# Whose config classes take text_config's block to the root: sglang (`configs/`). vLLM reads
# it for all classes (`transformers_utils/model_arch_config_convertor.py`).
_TAKE_FROM_TEXT = ("kimi_k25", "kimi_k3", "glm5_next")
# Ends of names of classes that have a head, tied or not.
_WITH_HEADS = ("ForCausalLM", "ForConditionalGeneration")

_LANGUAGE = "language_model."


@validator("quantization blocks agree with one another and with what is quantized", "model")
def quantization_config(folder: Folder) -> Iterator[Finding]:
    checkpoint = folder.checkpoint
    configs = checkpoint.quantization_configs
    quantized = _quantized(checkpoint)
    if quantized and (where := nested_alone(checkpoint.config)) is not None:
        message = "is the only block, and sglang and transformers read the root's alone"
        yield Finding("QC037", "error", where, message)
    readable_quantization(checkpoint)
    if not quantized:
        return  # QC012: a block without quantized tensors
    yield from missing_numbers(checkpoint)
    contradictions = list(_contradictions(checkpoint))
    yield from contradictions
    for config in configs:
        yield from _two_lists(config)
    taken = taken_block(configs)
    if taken is not None and taken.method == "mxfp4":
        return  # gpt-oss's stacks of experts alone, whatever is listed
    if any(found.severity == "error" for found in contradictions):
        return  # unknown which block is meant
    if configs and (taken is None or taken.method not in _LISTED):
        where, method = configs[0].where, configs[0].method
        raise NotChecked(f"{where}: lists of quant_method {method!r} are not supported")
    if taken is None:
        return  # QC012
    listed = ignored(taken)
    yield from _broken(taken, listed)
    yield from _left_out(taken, listed, quantized)
    if checkpoint.role_index.family.name == "generic":
        return  # unknown which of its modules are linear layers
    yield from _never_quantized(checkpoint, quantized)
    named = None if _all_linear(taken) else targets(taken)
    # vLLM (kimi_k25.py) quantizes no tower by a block of the language model's config, which
    # may name modules as that model alone has them (Kimi-K2.5's `lm_head`).
    towers = "text_config" not in taken.where
    plain = [m for m in _plain_linears(checkpoint, towers=towers) if m not in quantized]
    plain += [m for m in _linears_of_classes(checkpoint, taken) if m not in quantized]
    if not towers:
        plain = [m for m in plain if not listed.names(m.partition(_LANGUAGE)[2])]
    yield from _uncovered(checkpoint, listed, named, plain)
    if taken.method == "compressed-tensors":
        yield from _draft_names(checkpoint, listed, named, plain)
        if not _all_linear(taken):
            yield from _fused_names(checkpoint, listed, plain)


def nested_alone(config: Mapping[str, Any]) -> str | None:
    """Place of the only quantization block, if that is in text_config, and no class takes it from
    there to the root."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    keys = ("quantization_config", "compression_config")
    if not isinstance(inner, Mapping) or any(config.get(key) is not None for key in keys):
        return None
    taken = config.get("model_type") in _TAKE_FROM_TEXT
    return None if taken else "config.json: text_config: quantization_config"


def _quantized(checkpoint: Checkpoint) -> dict[str, str]:
    """Every module that is stored quantized, and its weight. A stack of experts is a module. Of
    DeepSeek-V4's FP4 experts its block says nothing."""
    found: dict[str, str] = {}
    for name, spec in coded_weights(checkpoint).items():
        module, _, parameter = name.rpartition(".")
        if spec.name == "MXFP4" and parameter != "weight_packed":
            continue
        found[module if "weight" in parameter else name] = name
    return found


def _plain_linears(checkpoint: Checkpoint, *, towers: bool) -> Iterator[str]:
    """Modules with a matrix that runtimes build as a linear layer. Codes, of DeepSeek-V4's FP4 experts
    (I8) for one, are quantized whether or not their form is read here."""
    for name, place in checkpoint.role_index.places.items():
        if (
            place.parameter == "weight"
            and len(checkpoint[name].type.shape) == 2
            and checkpoint[name].type.dtype not in ("I8", "U8")
            and place.role.kind.linear
            and (towers or place.role.kind is not Kind.VISION)
        ):
            yield name.removesuffix(".weight")


def _linears_of_classes(checkpoint: Checkpoint, config: QuantConfig) -> Iterator[str]:
    """The model's other modules that a block without a word about them has quantized: the head, also one
    that is tied and not stored, and the gate of a shared expert. transformers builds both as
    torch.nn.Linear, which compressed-tensors' `Linear` names; quant_method fp8 takes all of these but
    those of modules_to_not_convert, with which it no longer leaves the head out by itself
    (`quantizers/base.py`, `get_modules_to_not_convert`). modelopt's heads are those of vLLM and
    sglang (`ParallelLMHead` in `modelopt.py`, `modelopt_quant.py`)."""
    kinds: tuple[Kind, ...] = (Kind.HEAD, Kind.SHARED_WEIGHT)
    if config.method == "modelopt":
        kinds = () if config.block.get("quant_algo") == "MIXED_PRECISION" else (Kind.HEAD,)
    elif config.method in ("awq", AUTO_ROUND):
        kinds = ()
    elif config.method != "compressed-tensors":
        kinds = kinds if isinstance(config.block.get("modules_to_not_convert"), list) else ()
    index = checkpoint.role_index
    for name, place in index.places.items():
        if (
            place.role.kind in kinds
            and place.parameter == "weight"
            and not index.family.is_mtp(name, index.dims)
        ):
            yield name.removesuffix(".weight")
    classes = checkpoint.config.get("architectures")
    heads = (
        any(str(c).endswith(_WITH_HEADS) for c in classes) if isinstance(classes, list) else False
    )
    if Kind.HEAD in kinds and heads and index.dims.tied and index.named("lm_head") is None:
        yield "lm_head"


def _all_linear(config: QuantConfig) -> bool:
    """linear_fp8_config holds for all linear layers, without looking at targets."""
    return isinstance(config.block.get("linear_fp8_config"), dict)


def _broken(config: QuantConfig, listed: Listed) -> Iterator[Finding]:
    for entry, why in (listed.broken | named_targets(config).broken).items():
        message = f"expected a regular expression after `re:`, found {entry!r}: {why}"
        yield Finding("QC034", "error", config.where, message)


def _left_out(config: QuantConfig, listed: Listed, quantized: dict[str, str]) -> Iterator[Finding]:
    named = targets(config)
    linear = _all_linear(config)
    table = None if layer_table(config) is None else Targets.of(config)
    for module, weight in quantized.items():
        if listed.names(module):
            message = f"is quantized, but {config.where} lists {module!r} as left out"
            yield Finding("QC034", "error", weight, message)
        elif (
            named is not None
            and not (linear and weight.endswith(".weight"))
            and not named.names(module)
            and (table is None or table.find(module) is None)
        ):
            message = f"is quantized, but no target of {config.where} names {module!r}"
            yield Finding("QC034", "error", weight, message)


def _never_quantized(checkpoint: Checkpoint, quantized: dict[str, str]) -> Iterator[Finding]:
    for weight in quantized.values():
        place = checkpoint.role_index.places.get(weight)
        if place is not None and place.role.name.rpartition(".")[2] in _NEVER_QUANTIZED:
            message = "is quantized, but runtimes build it unquantized, whatever the config says"
            yield Finding("QC034", "error", weight, message)


def _uncovered(
    checkpoint: Checkpoint, listed: Listed, named: Listed | None, plain: list[str]
) -> Iterator[Finding]:
    """`named` are the modules that targets name, None for all linear layers."""
    every_name = checkpoint.role_index.family.name == "qwen3_5"
    for module in plain:
        stem, _, last = module.rpartition(".")
        asked = [module]
        members = next((names for names in _SETS if last in names), ()) if every_name else ()
        asked += [name for member in members if (name := f"{stem}.{member}") != module]
        lacking = [
            name
            for name in asked
            if not listed.names(name) and (named is None or named.names(name))
        ]
        if not lacking:
            continue
        # Runtimes that look up the parts do not find them in a fused name. Some runtimes also look up
        # the fused name, so it must be listed with its parts.
        whole = members[-1:] == (lacking[0].rpartition(".")[2],) and module not in lacking
        message = "is not quantized, but the config does not list " + ", ".join(lacking)
        if f"{module}.weight" not in checkpoint:
            message = f"shares the embeddings, and {message.removeprefix('is not quantized, but ')}"
        yield Finding("QC035", "warning" if whole else "error", f"{module}.weight", message)


def _fused_names(checkpoint: Checkpoint, listed: Listed, plain: list[str]) -> Iterator[Finding]:
    """Parts that are listed, of modules that sglang looks up under the fused name alone."""
    role_index = checkpoint.role_index
    if role_index.family.name not in _WITHOUT_MAPPING:
        return
    seen: set[str] = set()
    for module in plain:
        stem, _, last = module.rpartition(".")
        whole = f"{stem}.{_FUSED_BY_SGLANG.get(last)}"
        if last not in _FUSED_BY_SGLANG or whole in seen or not listed.names(module):
            continue
        if listed.names(whole) or role_index.family.is_mtp(f"{module}.weight", role_index.dims):
            continue
        seen.add(whole)
        message = f"is listed as left out, but not {whole!r}, the only name that {SGLANG} looks up"
        yield Finding("QC035", "warning", f"{module}.weight", message)


def _draft_names(
    checkpoint: Checkpoint, listed: Listed, named: Listed | None, plain: list[str]
) -> Iterator[Finding]:
    """Draft layers that are numbered on from the model's own (DeepSeek, GLM)."""
    role_index = checkpoint.role_index
    for module in plain:
        _, layers, rest = module.partition(".layers.")
        if not layers or module.startswith(role_index.family.mtp or ("mtp.",)):
            continue
        if not role_index.family.is_mtp(f"{module}.weight", role_index.dims):
            continue
        draft = f"{_DRAFT}.{rest.partition('.')[2]}"
        if named is not None and not named.names(draft):
            continue
        # QC035 covers those that no entry names.
        if listed.names(module) and not (listed.literal(module) or listed.names(draft)):
            message = f"of a draft layer, listed by a pattern that does not match {draft!r}"
            yield Finding("QC036", "warning", f"{module}.weight", message)


def _contradictions(checkpoint: Checkpoint) -> Iterator[Finding]:
    configs = checkpoint.quantization_configs
    for config in configs[1:]:
        first = configs[0]
        if (scheme(config), set(ignored(config).entries)) == (
            scheme(first),
            set(ignored(first).entries),
        ):
            continue
        # Runtimes read modelopt's file if config.json has no block.
        stale = config.where == HF_QUANT_CONFIG
        message = f"contradicts {first.where}: {_brief(config)}, there {_brief(first)}"
        yield Finding("QC037", "warning" if stale else "error", config.where, message)


def _brief(config: QuantConfig) -> str:
    method, *rest = scheme(config)
    said = ", ".join(str(one) for one in rest if one is not None)
    return f"{method} ({said or 'no more'}; {len(ignored(config).entries)} modules left out)"


def _two_lists(config: QuantConfig) -> Iterator[Finding]:
    block = config.block
    keys = LISTS["fp8"] if config.method in ("fp8", "fbgemm_fp8") else ()
    lists = {key: block[key] for key in keys if isinstance(block.get(key), list)}
    if len({frozenset(map(str, names)) for names in lists.values()}) > 1:
        message = " and ".join(f"{key} ({len(names)} names)" for key, names in lists.items())
        yield Finding("QC039", "error", config.where, f"{message} differ; runtimes read one")
