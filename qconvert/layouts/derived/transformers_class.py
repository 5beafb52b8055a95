"""Read what a model's tensors are from its class in transformers, on the meta device.

    python -m qconvert.layouts.derived.transformers_class BYTES SECONDS < REQUEST > ANSWER

A process of its own, of at most BYTES of address space and SECONDS of CPU: it imports torch and
transformers, which nothing else here does. It builds the class that a config names, without weights and
without remote code, asks transformers' own conversion (`get_model_conversion_mapping`,
`rename_source_key`; transformers, core_model_loading.py) which parameter a published name becomes,
and describes each published name by the module that owns it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qconvert.core.extras import failed_import
from qconvert.core.names import experts_module, parse, split_parameter
from qconvert.core.roles import EXPERT_COUNTS, Kind
from qconvert.core.versions import SGLANG, VLLM
from qconvert.layouts.derived.kinds import Parameter, kind_of
from qconvert.layouts.derived.running import is_marked, why_not_run

# Keys of configs that say how wide an expert is, the usual ones first.
_WIDTH_KEYS = (
    "moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size",
    "intermediate_size", "ffn_hidden_size", "expert_dim",
)  # fmt: skip
_NOT_THREE = "its experts are not stored as gate, up and down projections"
UNGATED = "its experts have no gate projection"
# gpt-oss. Loaders were run over FP8 of it (tests/loaders/test_gpt_oss.py): under compressed-tensors
# sglang drops the biases without a word, and vLLM ends with a KeyError; quant_method fp8 leaves scales
# unread.
_BIASES = (
    f"its experts interleave the rows of gate and up, and have biases, which {SGLANG} and {VLLM} "
    "do not load beside FP8 experts"
)
_INTERLEAVED = "its experts interleave the rows of gate and up"
_UNNAMED = "its experts are stored under another name than `experts`"
_GATE_FIRST = re.compile(r"gate, up = .*\.chunk\(2, dim=-1\)")
_SILU = ("SiLU", "SiLUActivation", "silu")


# What says nothing of a class or a config, but of this machine at this moment.
_OF_THE_MACHINE = (MemoryError, ImportError, OSError)
_NO_MEMORY = re.compile("(allocate|out of|not enough) memory", re.IGNORECASE)  # as torch says it


class CannotBuild(Exception):
    """transformers has no class for the config, or cannot build it."""


def build(values: Mapping[str, Any]) -> Any:
    """The class that a config's `architectures` names, else the widest automatic one that takes it, on
    the meta device. Raises CannotBuild."""
    import torch
    import transformers

    hf: Any = transformers
    given = {
        k: untagged(v) for k, v in values.items() if k not in ("transformers_version", "auto_map")
    }
    given.pop("quantization_config", None)
    try:
        config = hf.AutoConfig.for_model(**given)
        with torch.device("meta"):
            return class_of(hf, config)._from_config(config, dtype=torch.bfloat16)
    except CannotBuild:
        raise
    except Exception as error:
        # Whatever a class raises for a config that it was not made for: the caller says it.
        raise CannotBuild(failed_import(error) or f"{type(error).__name__}: {error}") from error


def untagged(value: Any) -> Any:
    """A setting as it was: transformers writes infinity, which JSON has not, as an object with a
    `__float__` (configuration_utils.py)."""
    if isinstance(value, Mapping):
        tag = value.get("__float__")
        if len(value) == 1 and tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {key: untagged(inner) for key, inner in value.items()}
    return [untagged(inner) for inner in value] if isinstance(value, list) else value


def class_of(hf: Any, config: Any) -> Any:
    for name in config.architectures or ():
        known = getattr(hf, name, None)
        if known is not None and known.config_class is type(config):
            return known
    autos = [hf.MODEL_FOR_CAUSAL_LM_MAPPING, hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    if hasattr(config, "vision_config"):
        autos.reverse()
    autos.append(hf.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    for mapping in autos:
        if type(config) in mapping:
            return mapping[type(config)]
    raise CannotBuild(f"no class generates text from {type(config).__name__}")


@dataclass(frozen=True)
class Class:
    """A built class: its parameters, and how transformers loads published tensors into them."""

    model: Any
    parameters: Mapping[str, Parameter]
    state: Mapping[str, Any]
    renamings: Sequence[Any]
    converters: Sequence[Any]
    sizes: Mapping[str, int]
    experts: Any | None

    def read(self, name: str) -> tuple[str, Any | None, int]:
        """The parameter that a published tensor becomes, the converter that makes it, and which of the
        converter's sources it is; a name that the class has no place for becomes itself."""
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        found, pattern = rename_source_key(
            name, list(self.renamings), list(self.converters), prefix, dict(self.state)
        )
        if pattern is None:
            return found, None, 0
        for converter in self.converters:
            if pattern in converter.source_patterns:
                return found, converter, converter.source_patterns.index(pattern)
        raise AssertionError(f"no converter has {pattern!r}")

    def published(self) -> list[str]:
        """The names that transformers saves, and those of the class itself."""
        from transformers.core_model_loading import revert_weight_conversion

        return sorted({*revert_weight_conversion(self.model, dict(self.state)), *self.state})


def read_class(model: Any) -> Class:
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    modules = dict(model.named_modules())
    text = model.config.get_text_config()
    experts = next((m for name, m in modules.items() if _holds_experts(name, m)), None)
    sizes = _sizes(text, experts, modules)
    try:
        head, inputs = _head(model, modules), model.get_input_embeddings()
    except NotImplementedError as error:
        raise CannotBuild(f"{type(model).__name__} does not name its embeddings") from error
    decoder = _language(model, modules)
    own = type(text), type(model.config), type(getattr(model.get_decoder(), "config", None))
    inner = _towers_within(modules, decoder, own)
    parameters = {}
    for name, tensor in state.items():
        module_name, _, _ = name.rpartition(".")
        module = modules[module_name]
        chain = [type(m).__name__ for m in _owners(modules, module_name)]
        parameters[name] = Parameter(
            name, tuple(tensor.shape), tuple(chain),
            linear=isinstance(module, torch.nn.Linear) or _is_matrix_of_groups(module),
            convolution=isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)),
            embedding=isinstance(module, torch.nn.Embedding),
            is_input=module is inputs, is_head=head is not None and module is head,
            language=module is head
            or module is inputs
            or (name.startswith(decoder) and not name.startswith(inner)),
            num_experts=sizes.get("num_experts", 0),
        )  # fmt: skip
    conversion = get_model_conversion_mapping(model)
    return Class(
        model, parameters, state,
        [one for one in conversion if isinstance(one, WeightRenaming)],
        [one for one in conversion if isinstance(one, WeightConverter)],
        sizes, experts,
    )  # fmt: skip


def _head(model: Any, modules: Mapping[str, Any]) -> Any | None:
    """The model's head; that of the model inside it, where a class around it has none of its own
    (NemotronH_Omni_Reasoning_V3 holds a NemotronHForCausalLM)."""
    inside = [m for m in modules.values() if m is not model and hasattr(m, "get_output_embeddings")]
    heads = (m.get_output_embeddings() for m in (model, *inside))
    return next((head for head in heads if head is not None), None)


def _is_matrix_of_groups(module: Any) -> bool:
    """DeepSeek-V4's grouped output projection is a linear by another class."""
    return type(module).__name__.endswith("GroupedLinear")


def _holds_experts(name: str, module: Any) -> bool:
    """Stacks of experts: parameters of three dimensions. Most are marked by transformers' decorator
    (`use_experts_implementation`), which states how they are stored."""
    if is_marked(module):
        return True
    down = dict(module.named_parameters(recurse=False)).get("down_proj")
    return name.endswith(".experts") and down is not None and down.ndim == 3


def _owners(modules: Mapping[str, Any], name: str) -> list[Any]:
    """The modules that hold a module, itself last; lists of modules are left out."""
    parts = name.split(".")
    chain = [modules[".".join(parts[:n])] for n in range(1, len(parts) + 1)]
    return [m for m in chain if type(m).__name__ != "ModuleList"] or [modules[""]]


def _language(model: Any, modules: Mapping[str, Any]) -> str:
    """The name of the language model in the class, with a dot; "" if the class is nothing else."""
    decoder = model.get_decoder()
    found = next((name for name, module in modules.items() if module is decoder), "")
    towers = [
        name for name, m in modules.items()
        if name and m is not decoder and hasattr(m, "config") and hasattr(m, "post_init")
        and not name.startswith(f"{found}.") and not f"{found}.".startswith(f"{name}.")
    ]  # fmt: skip
    return f"{found}." if towers and found else ""


def _towers_within(
    modules: Mapping[str, Any], decoder: str, own: tuple[type, ...]
) -> tuple[str, ...]:
    """The names, with a dot, of modules inside the language model that have a config of another class:
    of images (Git, Idefics, Phi-4) and of sound (Phi-4), which `get_decoder` leaves in it."""
    from transformers import PretrainedConfig

    return tuple(
        f"{name}." for name, m in modules.items()
        if name.startswith(decoder) and isinstance(getattr(m, "config", None), PretrainedConfig)
        and not isinstance(m.config, own)
    )  # fmt: skip


def _sizes(text: Any, experts: Any | None, modules: Mapping[str, Any]) -> dict[str, int]:
    """hidden_size, num_layers and, where there are experts, their number and width."""
    width, layers = (getattr(text, key, None) for key in ("hidden_size", "num_hidden_layers"))
    if not isinstance(width, int) or not isinstance(layers, int):
        raise CannotBuild(f"{type(text).__name__} states no hidden_size or no num_hidden_layers")
    found = {"hidden_size": width, "num_layers": layers}
    if experts is not None:
        down = getattr(experts, "down_proj", None)
        if down is not None:
            found["num_experts"] = int(down.shape[0])
            width = down.shape[1 if _is_transposed(experts) else 2]
            found["moe_intermediate_size"] = int(width)
        return found
    counts = [
        len(m) for name, m in modules.items()
        if name.endswith(".experts") and type(m).__name__ == "ModuleList" and len(m)
    ]  # fmt: skip
    if counts:
        found["num_experts"] = max(counts)
    return found


def kind(found: Class, name: str) -> Kind | None:
    """Return what a published tensor is; None for one that the class has no place for."""
    target, converter, source = found.read(name)
    parameter = found.parameters.get(target)
    if parameter is None:
        return None
    if converter is None or not parameter.language:
        return kind_of(parameter)
    names = [type(op).__name__ for op in converter.operations]
    stacked = kind_of(parameter)
    if "MergeModulelist" in names:
        if set(names) - {"MergeModulelist", "Concatenate", "Transpose"}:
            return Kind.EXPERT_UNKNOWN
        sources = len(converter.source_patterns)
        if stacked is Kind.STACKED_GATE_UP and sources == 2:
            return (Kind.EXPERT_GATE, Kind.EXPERT_UP)[source]
        if stacked is Kind.STACKED_DOWN and sources == 1:
            return Kind.EXPERT_DOWN
        if is_ungated(found) and target.endswith(".up_proj") and sources == 1:
            return Kind.EXPERT_UP
        return Kind.EXPERT_UNKNOWN if stacked.routed else Kind.UNKNOWN
    if stacked.routed:
        halves = len(converter.source_patterns) == 2 and stacked is Kind.STACKED_GATE_UP
        if halves and names == ["Concatenate"] and converter.operations[0].dim == 1:
            return (Kind.STACKED_GATE, Kind.STACKED_UP)[source]
        return stacked if names == ["Transpose"] else Kind.EXPERT_UNKNOWN
    if names == ["Concatenate"]:  # several published matrices, one below the other in the class
        module, _ = split_parameter(name)
        return kind_of(replace(parameter, name=module))
    # In equal parts, or (Split) in parts of the targets' own sizes, as of fewer keys than queries.
    if names in (["Chunk"], ["Split"]) and len(converter.target_patterns) > 1:
        both = {"gate_proj", "up_proj"}
        parts = {
            pattern.removesuffix(".weight").split(".")[-1] for pattern in converter.target_patterns
        }
        if parts == both and len(converter.target_patterns) == 2:
            return Kind.GATE_UP
        return Kind.QKV if parts == {"q_proj", "k_proj", "v_proj"} else Kind.LINEAR
    # A head stays one whose padding is cut off (Inkling 2).
    return Kind.LINEAR if parameter.linear and not stacked.never_quantized else stacked


def _is_transposed(experts: Any) -> bool:
    """Return whether stacks hold inputs before outputs: [E, H, 2I] and [E, I, H]. A class without the
    decorator says it by their shapes."""
    if is_marked(experts):
        return bool(experts.is_transposed)
    both, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if both is None or down is None:
        return False
    return tuple(both.shape[1:]) == (down.shape[2], 2 * down.shape[1])


def _says_its_order(experts: Any) -> bool:
    """Return whether a class without the decorator computes gate from the first half of `gate_up_proj`
    and has no other parameters: Llama4TextExperts and LongcatFlashExperts do (transformers)."""
    held = dict(experts.named_parameters(recurse=False))
    return held.keys() == {"gate_up_proj", "down_proj"} and bool(
        _GATE_FIRST.search(inspect.getsource(type(experts)))
    )


def why_not_read(found: Class) -> str:
    """Why routed experts cannot be told apart into gate, up and down, "" if they can."""
    experts = found.experts
    if experts is None:
        return ""
    if not is_marked(experts):
        known = _says_its_order(experts)
        return "" if known else f"{type(experts).__name__} does not say how its stacks are ordered"
    if not experts.has_gate:
        held = dict(experts.named_parameters(recurse=False)).keys()
        return "" if held == {"up_proj", "down_proj"} else "its experts have no gate projection"
    if not experts.is_concatenated:
        return _BIASES if experts.has_bias else _INTERLEAVED
    if experts.has_bias:
        return "its experts have biases"
    return ""


def _beside_matrices(experts: Any) -> list[str]:
    """Names of other parameters that an expert computes with: Muse-Spark has a norm after down."""
    matrices = ("gate_up_proj", "up_proj", "down_proj")
    return [name for name, _ in experts.named_parameters() if name not in matrices]


def is_ungated(found: Class) -> bool:
    """Return whether experts are down(act(up)), as Nemotron-H's: two matrices each, and no stack of
    both."""
    experts = found.experts
    return experts is not None and is_marked(experts) and not experts.has_gate


def why_not_on_cpus(found: Class) -> str:
    """Why kt-kernel's CPU kernels, which compute down(silu(gate) * up), do not compute this model's
    experts, "" if they do."""
    from transformers.integrations import moe

    experts = found.experts
    if experts is None or why_not_read(found):
        return why_not_read(found)
    if is_ungated(found):
        return UNGATED
    if more := _beside_matrices(experts):
        return f"its experts have {', '.join(more)} beside gate, up and down"
    if not is_marked(experts):
        # Llama 4 scales what goes into an expert, LongCat's zero experts give their input back.
        return f"{type(experts).__name__} computes its experts in a way of its own"
    if type(experts)._apply_gate is not moe._default_apply_gate:
        return f"{type(experts).__name__} combines gate and up in a way of its own"
    function = getattr(experts, "act_fn", None)
    act = getattr(function, "__name__", type(function).__name__)
    if act not in _SILU:
        return f"its experts use {act}, not SiLU"
    # A limit on values is a line of `forward` that no attribute tells.
    text = inspect.getsource(type(experts))
    return "its experts clamp values" if "clamp" in text else ""


def described(values: Mapping[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    """The description of a config's class as JSON can hold it: a module template, its kind and its
    layers for what the class publishes, and for each of `names`. Raises CannotBuild."""
    import transformers

    model = build(values)
    found = read_class(model)
    roles: dict[str, tuple[Kind, bool, set[int]]] = {}
    unread: set[str] = set()
    unread_experts = why_not_read(found)
    # Weights first: their kind is their module's, whose bias is not asked.
    asked = sorted({*found.published(), *(names or ())}, key=lambda n: (n.endswith(".bias"), n))
    targets: dict[str, set[int]] = {}
    for name in found.parameters:
        template, layer, _ = parse(name)
        targets.setdefault(template, set()).update(() if layer is None else (layer,))
    for name in asked:
        template, layer, _ = parse(name)
        module, _ = split_parameter(template)
        if module in roles and name.endswith(".bias"):
            continue  # its weight says what it is
        one = kind(found, name)
        if one is None:
            unread.add(module)
            continue
        unnamed = one.routed and experts_module(module) is None and not one.stacked
        if one.routed and (unread_experts or unnamed):
            one, unread_experts = Kind.EXPERT_UNKNOWN, unread_experts or _UNNAMED
        read = found.read(name)[0]
        layers: set[int] = set()
        if layer is not None:
            # The class may have no number where the published name has one (`mlp1.1`: `linear_1`).
            layers = targets.get(parse(read).template) or {layer}
        tower = not found.parameters[read].language
        roles.setdefault(module, (one, tower, set()))[2].update(layers)
    ungated = is_ungated(found) and not unread_experts
    unknown = [name for name, (one, _, _) in roles.items() if one is Kind.EXPERT_UNKNOWN]
    if ungated:  # no command makes or reads a stack of `up_proj`
        unknown = [name for name in unknown if "{E}" in name]
    if not unread_experts and unknown:
        operations = [type(op).__name__ for one in found.converters for op in one.operations]
        unread_experts = _INTERLEAVED if "Interleave" in operations else _NOT_THREE
    sets: list[set[int]] = [set()]
    stated = model.config.get_text_config().to_dict()
    experts = found.experts
    return {
        "class": type(model).__name__,
        "model_type": model.config.model_type,
        "transformers": transformers.__version__,
        "sizes": dict(found.sizes),
        "keys": {
            size: key
            for size, keys in (
                ("num_experts", EXPERT_COUNTS),
                ("moe_intermediate_size", _WIDTH_KEYS),
            )
            for key in [next((k for k in keys if stated.get(k) == found.sizes.get(size)), None)]
            if size in found.sizes and key is not None
        },
        "stacked_transposed": experts is not None and _is_transposed(experts),
        "experts_unread": unread_experts,
        "not_on_cpus": unread_experts or why_not_on_cpus(found),
        "modules": {
            module: f"{'tower ' if tower else ''}{one.name} {_number(layers, sets)}"
            for module, (one, tower, layers) in sorted(roles.items())
        },
        "layers": {
            module: sorted(found) for module, (_, _, found) in sorted(roles.items()) if found
        },
        "unread": sorted(unread - roles.keys()),
        **({"ungated": True} if ungated else {}),
        **_not_run(found, unread_experts),
    }


def _not_run(found: Class, unread_experts: str) -> dict[str, str]:
    """Why its layers cannot be run one by one, where that is all that stands against a calibration."""
    if unread_experts:
        return {}
    if is_ungated(found):
        return {"not_run": UNGATED}
    if found.experts is not None and not is_marked(found.experts):
        return {"not_run": f"{type(found.experts).__name__} does not mark what its experts take"}
    if found.experts is not None and (more := _beside_matrices(found.experts)):
        return {"not_run": f"its experts have {', '.join(more)} beside gate, up and down"}
    why = why_not_run(found.model)
    return {"not_run": why} if why else {}


def _number(layers: set[int], sets: list[set[int]]) -> int:
    """Return which of the sets it is; a new one is added."""
    if layers not in sets:
        sets.append(layers)
    return sets.index(layers)


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The config is anybody's: what it asks for must not take the machine's memory.
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if most < 0 else min(seconds, most), most))
    # transformers prints remarks about classes as it imports them; the answer stands alone.
    out, sys.stdout = sys.stdout, sys.stderr
    import transformers

    hf: Any = transformers
    hf.logging.set_verbosity_error()
    request = json.load(sys.stdin)
    try:
        answer = described(request["config"], request.get("names"))
    except CannotBuild as reason:
        if isinstance(reason.__cause__, _OF_THE_MACHINE) or _NO_MEMORY.search(str(reason)):
            raise reason.__cause__ or reason from None  # no answer about the class
        answer = {"cannot": str(reason)}
    json.dump(answer, out)


if __name__ == "__main__":
    main()
