"""A config's quantization as vLLM reads it: which scheme each module gets.

Read in vLLM, `layers/quantization/`: `fp8.py`, `compressed_tensors/compressed_tensors.py`,
`compressed_tensors/compressed_tensors_moe/compressed_tensors_moe.py`, `auto_gptq.py`, `modelopt.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.patterns import compiled
from qconvert.core.versions import comes_before
from qconvert.runtimes.loading.config_groups import Group, block_of, is_group, names_of, pair_of
from qconvert.runtimes.loading.mxfp4 import Matrices, Mxfp4, Mxfp4Experts
from qconvert.runtimes.loading.schemes import (
    CompressedFp8,
    NoQuantization,
    PerRow,
    Quantization,
    Scheme,
    Unquantized,
)
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated
from qconvert.runtimes.vllm.ignore_matching import (
    Fused,
    Renames,
    check_patterns,
    excluded,
    holds_codes,
    ignored,
    overridden,
    renamed,
    skipped,
    target,
)
from qconvert.runtimes.vllm.schemes import (
    Fp4,
    Fp8,
    Gptq,
    Integers,
    ModelFp4,
    ModelFp8,
    Mx,
    SharedFp8,
    WithExponents,
)

# Formats of compressed-tensors whose activations may be quantized too.
_ACTIVATIONS = (
    "naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class ModelFacts:
    """Facts that a class gives its quantization: names that it fuses and that it rewrites, the
    plain scheme, the folder's tensors (GPTQ reads which modules have codes), and vLLM's version."""

    fused: Fused
    renames: Renames
    plain: Unquantized
    tensors: Mapping[str, TensorType]
    version: str


class _Base:
    cache = True
    name = ""

    def head(self, module: str) -> Scheme | None:
        return None


class Fp8Blocks(_Base):
    name = "fp8"

    def __init__(self, block: Mapping[str, Any], stated: ModelFacts) -> None:
        size = pair_of(block.get("weight_block_size"))
        if size is None:
            raise NotSimulated("FP8 without weight_block_size")
        if block.get("activation_scheme") != "dynamic":
            raise NotSimulated(f"activation_scheme {block.get('activation_scheme')!r}")
        if block.get("store_dtype") is not None:
            raise NotSimulated("store_dtype")
        listed = names_of(block.get("ignored_layers")) or names_of(
            block.get("modules_to_not_convert")
        )
        self._ignored = renamed(listed, stated.renames)
        self._scheme, self._stated = Fp8(*size), stated

    def linear(self, module: str, kind: str) -> Scheme:
        at = self._stated
        return at.plain if skipped(module, self._ignored, at.fused) else self._scheme

    def experts(self, module: str) -> Scheme:
        return self.linear(module, "")


class DeepseekV4Fp8(Fp8Blocks):
    """DeepSeek-V4's method (models/deepseek_v4/quant_config.py): FP8 beside `experts` in MXFP4, or by
    `moe_quant_algo` in NVFP4, or in FP8. Scales of linears beside FP4 are exponents."""

    def __init__(self, block: Mapping[str, Any], stated: ModelFacts, experts: object) -> None:
        Fp8Blocks.__init__(self, block, stated)
        plain, four = stated.plain.dtype, experts == "fp4"
        size = pair_of(block.get("weight_block_size"))
        assert size is not None  # as Fp8Blocks found
        scale = "F8_E8M0" if four else "F32"
        self._scheme, self._shared = Fp8(*size, scale=scale), SharedFp8(*size, scale=scale)
        made: Scheme = self._scheme
        if four and str(block.get("moe_quant_algo") or "").upper() == "NVFP4":
            made = ModelFp4(False, 16, False, dtype=plain)
        elif four:
            made = Matrices(tiles=(128, 256))
        self._experts = WithExponents(made)

    def linear(self, module: str, kind: str) -> Scheme:
        found = Fp8Blocks.linear(self, module, kind)
        shared = found is self._scheme and ".shared_experts." in module
        return self._shared if shared else found

    def experts(self, module: str) -> Scheme:
        return self._experts if self.linear(module, "") is self._scheme else self._stated.plain


class CompressedTensors(_Base):
    """quant_method compressed-tensors: packed integers and NVFP4. `linear_fp8_config` is sglang's alone:
    what it describes is built unquantized."""

    name = "compressed-tensors"

    def __init__(self, block: Mapping[str, Any], stated: ModelFacts) -> None:
        if block.get("sparsity_config") or block.get("transform_config"):
            raise NotSimulated("sparsity_config or transform_config")
        cache = block.get("kv_cache_scheme")
        if cache is not None and not (
            isinstance(cache, Mapping)
            and cache.get("strategy") == "tensor"
            and cache.get("type") == "float"
            and cache.get("num_bits") == 8
        ):
            raise NotSimulated("a kv_cache_scheme other than FP8 with one scale")
        self._format, self._stated = block.get("format"), stated
        self._groups: dict[str, Group] = {}
        groups = block.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            if not isinstance(group, Mapping) or not is_group(group):
                raise NotSimulated("a config group that is none")
            if group.get("output_activations"):
                raise NotSimulated("output_activations")
            inputs = group.get("input_activations") or None
            made = Group(group.get("weights") or {}, inputs, group.get("format"))
            for name in names_of(group.get("targets")):
                path = "." in name and not name.startswith("re:")
                self._groups[renamed([name], stated.renames)[0] if path else name] = made
        listed = names_of(block.get("ignore"))
        check_patterns([*listed, *self._groups])
        self._ignore = [
            entry
            if entry.startswith("re:") or "." not in entry
            else renamed([entry], stated.renames)[0]
            for entry in listed
        ]

    def linear(self, module: str, kind: str) -> Scheme:
        group = self._group(module, kind)
        if group is None:
            return self._stated.plain
        form = group.format or self._format
        if group.is_nvfp4:
            return self._fp4(group)
        if group.is_integers and form == "pack-quantized" and group.bits in (4, 8):
            return self._integers(group)
        if form in _ACTIVATIONS and group.block is not None:
            return CompressedFp8(*group.block, known=True)
        if group.mx is not None and (group.mx == 8 or group.inputs is None):
            return Mx(group.mx)
        if form in _ACTIVATIONS and group.rows is not None:
            return _rows(group.rows)
        if not has_scheme(replace(group, format=form)):
            raise no_scheme(module, replace(group, format=form))
        raise NotSimulated(f"a linear with {group.strategy} scales in {form}")

    def experts(self, module: str) -> Scheme:
        if "Linear" in self._groups and "RoutedExperts" not in self._groups:
            self._groups["RoutedExperts"] = self._groups["Linear"]
        projections = [f"{module}.0.{part}_proj" for part in ("gate", "up", "down")]
        found = [self._group(name, "RoutedExperts") for name in projections]
        if any(group != found[0] for group in found):
            raise LoadRefused(
                "ValueError", "All MoE projections need to have same", module,
                "gate_proj, up_proj and down_proj of the experts have different schemes",
            )  # fmt: skip
        group = found[0]
        if group is None:
            return self._stated.plain
        if group.is_integers:
            form = group.format or self._format
            if form != "pack-quantized" or group.bits not in (4, 8):
                raise LoadRefused(
                    "ValueError", "For Fused MoE layers, only format", module,
                    f"the loader takes packed 4- and 8-bit codes, not {group.bits} bits in {form}",
                )  # fmt: skip
            return self._integers(group)
        if group.is_nvfp4:
            return self._fp4(group)
        if group.mx is not None and (group.mx == 8 or group.inputs is None):
            return Mx(group.mx)
        if group.rows is not None:
            return _rows(group.rows)
        if group.block is not None:
            name = "CompressedTensorsW8A8Fp8MoEMethod"
            return CompressedFp8(*group.block, known=True, experts_name=name)
        raise NotSimulated(f"experts with {group.strategy} scales")

    def head(self, module: str) -> Scheme | None:
        return None if self._group(module, "ParallelLMHead") is None else self.linear(module, "")

    def _group(self, module: str, kind: str) -> Group | None:
        fused = self._stated.fused
        if ignored(module, self._ignore, fused) or not self._groups:
            return None
        found = target(module, kind, self._groups, fused)
        return None if found is None else self._groups[found]

    def _integers(self, group: Group) -> Integers:
        size = group.group if group.strategy == "group" and group.group else -1
        return Integers(group.bits, size, group.symmetric, None, False, self._stated.plain.dtype)

    def _fp4(self, group: Group) -> Fp4:
        return Fp4(group.inputs is not None, group.inputs is not None)


def _rows(codes: str) -> PerRow:
    kind = "Int8" if codes == "I8" else "Fp8"
    return PerRow(
        codes, f"CompressedTensorsLinearMethod[CompressedTensorsW8A8{kind}]",
        f"CompressedTensorsW8A8{kind}MoEMethod",
    )  # fmt: skip


class Modelopt(_Base):
    """modelopt's NVFP4 for all modules that its list does not name, or, in MIXED_PRECISION, one
    algorithm for each module that `quantized_layers` names."""

    def __init__(self, block: Mapping[str, Any], stated: ModelFacts) -> None:
        algorithm = str(block.get("quant_algo")).upper()
        layers = block.get("quantized_layers")
        self._layers: dict[str, str] | None = None
        if algorithm == "MIXED_PRECISION":
            if not isinstance(layers, Mapping) or not layers:
                raise NotSimulated("MIXED_PRECISION without quantized_layers")
            self._layers = {
                renamed([str(name)], stated.renames)[0]: str(entry.get("quant_algo", "")).upper()
                for name, entry in layers.items()
                if isinstance(entry, Mapping)
            }
        elif algorithm not in ("NVFP4", "W4A16_NVFP4"):
            raise NotSimulated(f"quant_algo {algorithm!r}")
        size = block.get("group_size")
        size = 16 if size is None else size
        if type(size) is not int or size < 1:
            raise NotSimulated(f"group_size {size!r}")
        self._algorithm, self._group, self._stated = algorithm, size, stated
        self.name = "modelopt_mixed" if self._layers is not None else "modelopt_fp4"
        scheme = block.get("kv_cache_scheme")
        self.cache = self._layers is None or isinstance(scheme, Mapping)
        entries: list[str] = []
        both = not comes_before(stated.version, _BOTH_LISTS)
        for entry in names_of(block.get("ignore", block.get("exclude_modules") if both else None)):
            tree = len(entry) >= 2 and entry[-1] == "*" and entry[-2] != "."
            entries += [entry[:-1], f"{entry[:-1]}.*"] if tree else [entry]
        self._excluded = renamed(entries, stated.renames)
        excluded("", self._excluded, {})  # an invalid pattern is found here

    def linear(self, module: str, kind: str) -> Scheme:
        return self._scheme(module)

    def experts(self, module: str) -> Scheme:
        return self._scheme(module)

    def head(self, module: str) -> Scheme | None:
        return self._scheme(module)

    def _scheme(self, module: str) -> Scheme:
        if excluded(module, self._excluded, self._stated.fused):
            return self._stated.plain
        algorithm: str | None = self._algorithm
        if self._layers is not None:
            algorithm = self._of_layer(module, self._layers)
        if algorithm is None:
            return self._stated.plain
        if algorithm == "FP8_PB_WO":
            return ModelFp8()
        if algorithm in ("NVFP4", "W4A16_NVFP4"):
            weights = algorithm == "W4A16_NVFP4"
            return ModelFp4(weights, self._group, False, dtype=self._stated.plain.dtype)
        raise NotSimulated(f"quant_algo {algorithm!r}")

    def _of_layer(self, module: str, layers: Mapping[str, str]) -> str | None:
        """_resolve_quant_algo: the module's own entry, its parts', one below it, one beside it."""
        if module in layers:
            return layers[module]
        base, _, last = module.rpartition(".")
        for fused in (self._stated.fused, _ALWAYS_FUSED):
            found = {layers[name] for p in fused.get(last, ()) if (name := f"{base}.{p}") in layers}
            if len(found) > 1:
                raise LoadRefused(
                    "ValueError", "Mixed quant_algo within fused layer", module,
                    f"quantized_layers give its parts {sorted(found)}, which are loaded as one module",
                )  # fmt: skip
            if found:
                return found.pop()
            if fused is self._stated.fused:
                places = [f"{module}."] + [f"{base}."] * module.endswith(".experts")
                for place in places:
                    below = next((a for name, a in layers.items() if name.startswith(place)), None)
                    if below is not None:
                        return below
        return None


# The release that came to read modelopt's other list (ModelOptQuantConfigBase.from_config).
_BOTH_LISTS = "0.33"
_ALWAYS_FUSED: Fused = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
}  # fmt: skip


class GptqCodes(_Base):
    """quant_method gptq: every module with codes in the folder, unless `dynamic` excludes it."""

    name = "auto_gptq"
    cache = False

    def __init__(self, block: Mapping[str, Any], stated: ModelFacts) -> None:
        self._bits, self._group = block.get("bits"), block.get("group_size")
        if type(self._bits) is not int or type(self._group) is not int or not self._group:
            raise NotSimulated("bits and group_size that are no numbers")
        if block.get("lm_head") or block.get("modules_in_block_to_quantize"):
            raise NotSimulated("lm_head or modules_in_block_to_quantize")
        dynamic = block.get("dynamic") or {}
        if not isinstance(dynamic, Mapping) or any(
            not str(rule).startswith("-:") and stated for rule, stated in dynamic.items()
        ):
            raise NotSimulated("rules of `dynamic` that state another form")
        for rule in dynamic:
            compiled(str(rule)[2:] if str(rule)[:2] in ("-:", "+:") else str(rule))
        self._dynamic, self._stated = {str(rule): value for rule, value in dynamic.items()}, stated
        self._scheme = Gptq(self._bits, self._group, stated.plain.dtype)
        found = {n.rpartition(".")[0] for n, t in stated.tensors.items() if t.dtype not in _FLOATS}
        self._quantized = renamed(_modules(found), stated.renames)

    def linear(self, module: str, kind: str) -> Scheme:
        plain = self._stated.plain
        if not holds_codes(module, self._quantized, self._stated.fused):
            return plain
        return plain if overridden(module, self._dynamic) is None else self._scheme

    def experts(self, module: str) -> Scheme:
        excluded = overridden(module, self._dynamic) is None
        return self._stated.plain if excluded else self._scheme


_NUMBER = re.compile(r"\.experts\.[0-9]+\..*")


def _modules(names: Iterable[str]) -> list[str]:
    """The names without those of experts, of which there are thousands and which no linear holds."""
    return sorted(name for name in names if not _NUMBER.search(name)) or ["\0"] * bool(names)


def refuse_forms(config: Mapping[str, Any], tensors: Mapping[str, TensorType]) -> None:
    """Raise LoadRefused for a quantization config that vLLM refuses whatever the class, on any GPU: as
    it reads it, or as it builds a linear that has codes in `tensors`."""
    block = block_of(config) or {}
    method = str(block.get("quant_method"))
    if method == "compressed-tensors":
        _refuse_groups(block, tensors)
    elif _is_deepseek_v4(config) and _experts_of(config) not in ("fp4", "fp8"):
        raise LoadRefused(
            "ValueError", "Unsupported DeepSeek V4 expert_dtype", "config.json",
            f"expert_dtype is {_experts_of(config)!r}, and vLLM knows fp4 and fp8",
        )  # fmt: skip
    elif method in _BITS:
        _refuse_bits(block, _BITS[method])
        if method == "gptq":
            _refuse_gptq(block, tensors)


def _is_deepseek_v4(config: Mapping[str, Any]) -> bool:
    """Tell whether a config's FP8 is read by DeepSeek-V4's own method."""
    block = block_of(config) or {}
    return config.get("model_type") == "deepseek_v4" and block.get("quant_method") == "fp8"


def _experts_of(config: Mapping[str, Any]) -> object:
    return config.get("expert_dtype", "fp4")


# Bits of codes that each method's class has a type for (TYPE_MAP of auto_gptq.py and auto_awq.py).
_BITS: Mapping[str, tuple[int, ...]] = {"gptq": (4, 8), "awq": (4,)}
# Groups that AutoGPTQLinearMethod takes (marlin_utils.py, MARLIN_SUPPORTED_GROUP_SIZES); -1 is a whole
# row. Its experts have other kernels.
_GPTQ_GROUPS = (-1, 32, 64, 128)
_ORDERED = ("group", "dynamic")
# The class that pydantic makes of an error as the config is read.
_READING = "ValidationError"


def _refuse_groups(block: Mapping[str, Any], tensors: Mapping[str, TensorType]) -> None:
    """compressed_tensors.py: `_quantization_scheme_map_from_config` takes no columns grouped by
    importance and no integers in a format of activations without them; `_get_scheme_from_parts` has no
    case for some of what is left."""
    stated = block.get("config_groups")
    for group in stated.values() if isinstance(stated, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        inputs = group.get("input_activations") or None
        made = Group(weights, inputs, group.get("format") or block.get("format"))
        if made.actorder in _ORDERED:
            raise LoadRefused(
                _READING, "is no longer supported", "config.json",
                "columns grouped by importance (actorder group) are not taken any more",
            )  # fmt: skip
        if made.integers and made.format in _ACTIVATIONS and not inputs:
            raise LoadRefused(
                _READING, "Assertion failed", "config.json",
                f"no input_activations are stated, and integers in the format {made.format} need them",
            )  # fmt: skip
        if group.get("output_activations") or not is_group(group) or has_scheme(made):
            continue
        module = _governed(block, group, tensors)
        if module is not None:
            raise no_scheme(module, made)


def _governed(
    block: Mapping[str, Any], group: Mapping[str, Any], tensors: Mapping[str, TensorType]
) -> str | None:
    """A linear with scales that a group of compressed-tensors' quantizes, None if there is none."""
    ignore, targets = names_of(block.get("ignore")), names_of(group.get("targets"))
    try:
        for name in tensors:
            module, _, leaf = name.rpartition(".")
            if leaf != "weight_scale" or ".experts." in name or ignored(module, ignore, {}):
                continue
            if target(module, "Linear", targets, {}) is not None:
                return module
    except re.error:
        return None  # quantization_of says so
    return None


def has_scheme(group: Group) -> bool:
    """Tell whether `_get_scheme_from_parts` has a case for a linear's group, on a GPU of capability 9.0;
    INT4 beside FP8 activations has one there alone. Where a default decides, as if it had."""
    stated = group.inputs
    if stated is None:
        inputs, by, dynamic = None, "", False
    else:
        inputs, dynamic = Group(stated, None, None), bool(stated.get("dynamic"))
        by = str(stated.get("strategy") or ("token" if dynamic else "tensor"))
    rows, whole = group.strategy in ("channel", "group"), group.strategy in ("channel", "tensor")
    static = not group.weights.get("dynamic")
    if group.is_nvfp4:
        return inputs is None or inputs.is_nvfp4
    if group.mx is not None:
        return True
    if group.format == "pack-quantized" and rows and static:
        tokens = dynamic and by in ("token", "group")
        if inputs is None or (group.integers and inputs.integers and inputs.symmetric and tokens):
            return True
    if group.integers and inputs is not None and not inputs.integers:
        tokens = dynamic and by == "token" and group.strategy == "group"
        return group.bits == 4 and tokens and group.symmetric and inputs.symmetric
    if group.format not in _ACTIVATIONS or not group.symmetric or not static:
        return False
    if not group.integers:
        return group.strategy in ("tensor", "channel", "block")
    if inputs is None or inputs.bits != 8:
        return False
    if group.bits == 8:
        return whole and by == ("token" if dynamic else "tensor")
    return group.bits == 4 and rows and dynamic and by == "token"


def no_scheme(module: str, group: Group) -> LoadRefused:
    """The error for a linear without a case."""
    kind = "integers" if group.integers else "floats"
    found = (
        f"{kind} of {group.bits} bits, a scale per {group.strategy}, in the format {group.format}"
    )
    beside = "with these input_activations" if group.inputs else "without input_activations"
    error = "NotImplementedError", "No compressed-tensors compatible scheme was found"
    if group.is_nvfp4:
        error = "ValueError", "input quantization must also be NVFP4"
    elif group.format in _ACTIVATIONS and not group.inputs:
        error = "AttributeError", "num_bits"
    return LoadRefused(*error, module, f"there is no class for {found}, {beside}")


def _refuse_bits(block: Mapping[str, Any], taken: Sequence[int]) -> None:
    """Codes of other than some numbers of bits, and GPTQ's with zero points."""
    bits = block.get("bits", block.get("w_bit"))
    if (type(bits) is int and bits not in taken) or block.get("sym") is False:
        raise LoadRefused(
            _READING, "Unsupported", "config.json",
            f"expected {' or '.join(map(str, taken))} bits"
            + (f" and symmetric codes, found {bits} bits, sym {block.get('sym')}"
               if "sym" in block else f", found {bits}"),
        )  # fmt: skip


def _refuse_gptq(block: Mapping[str, Any], tensors: Mapping[str, TensorType]) -> None:
    """gptq_utils.py, normalize_and_validate_gptq_desc_act: columns grouped by importance; auto_gptq.py,
    AutoGPTQLinearMethod: sizes of groups."""
    ordered, size, dynamic = block.get("desc_act"), block.get("group_size"), block.get("dynamic")
    rules = [(ordered, size)]
    for rule, own in dynamic.items() if isinstance(dynamic, Mapping) else ():
        if not str(rule).startswith("-:") and isinstance(own, Mapping):
            rules.append((own.get("desc_act", ordered), own.get("group_size", size)))
    if any(order and group != -1 for order, group in rules):
        raise LoadRefused(
            _READING, "is no longer", "config.json",
            "columns grouped by importance (desc_act) are not taken any more",
        )  # fmt: skip
    linear = next((n for n in tensors if n.endswith(".qweight") and ".experts." not in n), None)
    if linear is not None and all(type(g) is int and g not in _GPTQ_GROUPS for _, g in rules):
        raise LoadRefused(
            "ValueError", "Marlin does not support group_size", linear.rpartition(".")[0],
            f"groups of {size} columns have no kernel for linears on any GPU; it takes 32, 64, 128 or "
            "whole rows",
        )  # fmt: skip


def quantization_of(config: Mapping[str, Any], stated: ModelFacts) -> Quantization:
    """Quantization that a config states, for a class that maps names as stated. Raises NotSimulated, and
    LoadRefused for what the runtime refuses to read."""
    block = block_of(config)
    if block is None:
        return NoQuantization(stated.plain)
    try:
        return _quantization(config, block, stated)
    except re.error as error:
        raise NotSimulated(f"a pattern of the quantization config: {error}") from None


def _quantization(
    config: Mapping[str, Any], block: Mapping[str, Any], stated: ModelFacts
) -> Quantization:
    method = block.get("quant_method")
    if _is_deepseek_v4(config):
        return DeepseekV4Fp8(block, stated, _experts_of(config))
    if method == "fp8":
        return Fp8Blocks(block, stated)
    if method == "compressed-tensors":
        return CompressedTensors(block, stated)
    if method == "modelopt":
        return Modelopt(block, stated)
    if method == "gptq":
        return GptqCodes(block, stated)
    if method == "mxfp4":
        return Mxfp4Experts(Mxfp4("GptOssMxfp4MoEMethod", "bias"), stated.plain)
    raise NotSimulated(f"quant_method {method!r}")
