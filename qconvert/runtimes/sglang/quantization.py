"""A config's quantization as sglang reads it: which scheme each module gets.

Read in sglang: `configs/model_config.py` (_parse_quant_hf_config, _parse_modelopt_quant_config),
`layers/quantization/fp8.py`, `gptq/`, `compressed_tensors/compressed_tensors.py` (get_scheme_dict,
get_linear_scheme, get_moe_scheme, get_lm_head_scheme), `modelopt_quant.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qconvert.core.patterns import compiled
from qconvert.core.versions import comes_before
from qconvert.runtimes.loading.config_groups import Group, block_of, is_group, names_of, pair_of
from qconvert.runtimes.loading.mxfp4 import Matrices, Mxfp4, Mxfp4Experts, Unquantized16
from qconvert.runtimes.loading.parameters import (
    ExpertRole,
    Layout,
    Parameter,
    Role,
    Sharded,
    Whole,
    Wrapped,
)
from qconvert.runtimes.loading.schemes import (
    BlockFp8,
    CompressedFp8,
    ModeloptFp4,
    Moe,
    Named,
    NoQuantization,
    PackedFp4,
    PackedIntegers,
    PerRow,
    Quantization,
    Scheme,
    Unquantized,
    linear_parameter,
)
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated, Setting
from qconvert.runtimes.sglang.ignore_matching import (
    Compressed,
    Fused,
    SkipList,
    is_layer_excluded,
    is_layer_skipped,
)

# Formats of compressed-tensors whose activations may be quantized too.
_ACTIVATIONS = (
    "naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip


# Whose config classes in sglang (`configs/`) take text_config's block for the root's.
_TAKE_FROM_TEXT = ("kimi_k25", "kimi_k3", "glm5_next")


def root_block(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The block by which sglang knows that a model is quantized (`configs/model_config.py`): the root's,
    its `compression_config`; text_config's of a few classes."""
    if config.get("model_type") in _TAKE_FROM_TEXT:
        return block_of(config)
    return block_of({key: value for key, value in config.items() if key != "text_config"})


@dataclass(frozen=True, slots=True)
class MarlinGptq:
    """GPTQ's packing of symmetric codes: codes [K / 8, N], scales [groups, N]; zero points and
    the order of columns are read and not used."""

    bits: int
    group: int
    dtype: str = "BF16"
    linear_name: str = "GPTQMarlinLinearMethod[GPTQMarlinLinearScheme]"
    experts_name: str = "GPTQMarlinMoEMethod[GPTQMarlinMoEScheme]"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        word, row = 32 // self.bits, layout.kind == "row"
        grouped = self.group if self.group != -1 else layout.inputs
        repeated = self.group == -1 and row and layout.tp > 1
        if not repeated and layout.columns % grouped:
            raise NotSimulated(f"groups of {grouped} that a rank's {layout.columns} columns cut")
        groups = (layout.inputs if repeated else layout.columns) // grouped
        role: Role = "rows" if repeated else "matrix"
        codes, zeros = (layout.columns // word, layout.rows), (groups, layout.rows // word)
        yield "qweight", linear_parameter(layout, "matrix", "I32", codes, transposed=True)
        order = Sharded(layout.rank, layout.tp) if row else Whole()
        yield "g_idx", Parameter("I32", (layout.columns,), order, needed=False)
        yield (
            "scales",
            linear_parameter(layout, role, self.dtype, (groups, layout.rows), transposed=True),
        )
        yield (
            "qzeros",
            linear_parameter(
                layout, role, "I32", zeros, packed=word, transposed=True, needed=False
            ),
        )

    def experts(self, moe: Moe) -> Named:
        slots, hidden, size, word = moe.slots, moe.hidden, moe.columns, 32 // self.bits
        # Scales of w2 are made for all ranks' columns, of which each fills its own.
        up, down = (
            (1, 1) if self.group == -1 else (hidden // self.group, size * moe.tp // self.group)
        )
        kind: ExpertRole = "channel" if self.group == -1 else "group"
        for which, rows, columns, groups in (
            ("w13", moe.rows, hidden, up),
            ("w2", hidden, size, down),
        ):
            for name, dtype, shape, role, needed in (
                ("qweight", "I32", (slots, columns // word, rows), "weight", True),
                ("scales", "F16", (slots, groups, rows), kind, True),
                ("qzeros", self.dtype, (slots, groups, rows // word), kind, False),
                ("g_idx", "I32", (slots, columns), "single" if which == "w13" else "weight", False),
                ("g_idx_sort_indices", "I32", (slots, columns), "weight", False),
            ):
                made = moe.parameter(dtype, shape, role, transposed=True, zeros=True, needed=needed)  # type: ignore[arg-type]
                yield f"{which}_{name}", made


@dataclass(frozen=True, slots=True)
class MxInt4:
    """Experts of compressed-tensors' W4A16 in groups of 32 for the trtllm runner: matrices as they are
    stored, and no orders of columns."""

    dtype: str = "BF16"
    linear_name: str = ""
    experts_name: str = "CompressedTensorsFusedMoEMethod[CompressedTensorsMxInt4MoE]"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        raise NotSimulated("a linear under the trtllm runner's MxInt4")

    def experts(self, moe: Moe) -> Named:
        for which, rows, columns in moe.matrices:
            codes = moe.slots, rows, columns // 8
            yield f"{which}_weight_packed", moe.parameter("I32", codes, "weight")
            scales = moe.slots, rows, columns // 32
            yield f"{which}_weight_scale", moe.parameter(self.dtype, scales, "group")
            shape = moe.parameter(self.dtype, (moe.slots, 2), "single", needed=False)
            yield f"{which}_weight_shape", shape


@dataclass(frozen=True, slots=True)
class Fp4InBlocks:
    """DeepSeek-V4's MXFP4 experts beside FP8 in blocks, whose sizes are asked of theirs, too (fp8.py,
    create_fp8_moe_weight_)."""

    blocks: BlockFp8
    linear_name: str = ""
    experts_name: str = "Mxfp4FlashinferCutlassMoEMethod"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        return self.blocks.linear(layout, wrapped)

    def experts(self, moe: Moe) -> Named:
        dict(self.blocks.experts(moe))  # refuses what it refuses of FP8
        for which, rows, columns in moe.matrices:
            codes = moe.slots, rows, columns // 2
            yield f"{which}_weight", moe.parameter("I8", codes, "weight")
            scales = moe.slots, rows, columns // 32
            yield f"{which}_weight_scale_inv", moe.parameter("F8_E8M0", scales, "group")


class Fp8:
    """FP8 in blocks; with `packed` DeepSeek-V4's experts are MXFP4."""

    name = "fp8"
    cache = True

    def __init__(
        self,
        block: Mapping[str, Any],
        fused: Fused,
        plain: Unquantized,
        renames: Renames,
        *,
        packed: bool = False,
    ) -> None:
        if block.get("moe_quant_algo"):
            raise NotSimulated("moe_quant_algo beside FP8")
        size = pair_of(block.get("weight_block_size"))
        if size is None:
            raise NotSimulated("FP8 without weight_block_size")
        if block.get("activation_scheme") != "dynamic":
            raise NotSimulated(f"activation_scheme {block.get('activation_scheme')!r}")
        self.size, self._scheme = size, BlockFp8(*size)
        self._experts: Scheme = Fp4InBlocks(self._scheme) if packed else self._scheme
        self._plain, self._fused = plain, fused
        listed = block.get("ignored_layers")
        if listed is None:
            listed = block.get("modules_to_not_convert")
        bases = [entry.removeprefix("model.") for entry in names_of(listed)]
        both = [name for base in bases for name in (base, f"model.{base}")]
        self._skips = SkipList([renames.of(name) for name in both])

    def linear(self, module: str, kind: str) -> Scheme:
        skipped = is_layer_skipped(module, self._skips, self._fused)
        return self._plain if skipped else self._scheme

    def experts(self, module: str) -> Scheme:
        return self._experts if self.linear(module, "") is self._scheme else self._plain

    def head(self, module: str) -> Scheme | None:
        return None


class CompressedTensors:
    """quant_method compressed-tensors: packed integers and NVFP4, with `linear_fp8_config` for FP8
    linears beside them."""

    name = "compressed_tensors"

    def __init__(
        self, block: Mapping[str, Any], fused: Fused, plain: Unquantized, setting: Setting
    ) -> None:
        self._format = block.get("format")
        self._groups: dict[str, Group] = {}
        groups = block.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            if not isinstance(group, Mapping) or not is_group(group):
                raise NotSimulated("a config group that is none")
            own = group.get("format")
            inputs = group.get("input_activations") if _activations(own or self._format) else None
            for target in names_of(group.get("targets")):
                self._groups[target] = Group(group.get("weights") or {}, inputs or None, own)
        self._plain, self._setting = plain, setting
        self._names = Compressed(names_of(block.get("ignore")), self._groups, fused)
        linears = block.get("linear_fp8_config")
        self._linears: BlockFp8 | None = None
        if isinstance(linears, Mapping):
            size = pair_of(linears.get("weight_block_size"))
            if linears.get("quant_method") != "fp8" or size is None:
                raise NotSimulated("linear_fp8_config without FP8 blocks")
            self._linears = BlockFp8(*size)
        cache = block.get("kv_cache_scheme")
        self.cache = isinstance(cache, Mapping) and cache.get("num_bits") == 8
        if any(block.get(key) for key in ("sparsity_config",)):
            raise NotSimulated("sparsity_config")

    def linear(self, module: str, kind: str) -> Scheme:
        if self._linears is not None:
            return self._linears
        group = self._group(module, kind)
        return self._plain if group is None else self._linear_of(module, group)

    def experts(self, module: str) -> Scheme:
        if "Linear" in self._groups and "FusedMoE" not in self._groups:
            # What the runtime adds when it meets the first experts.
            for name in ("FusedMoE", "DeepEPMoE"):
                self._groups[name] = self._groups["Linear"]
                self._names.targets.append(name)
        both = [self._groups.get(name) for name in ("FusedMoE", "Linear")]
        if "mxfp4" in str(self._format) or any(one is not None and one.mx == 4 for one in both):
            return Matrices("weight_bias")  # whose codes no tensor has the name of
        projections = [f"{module}.0.{part}_proj" for part in ("gate", "up", "down")]
        found = [self._group(projection, "FusedMoE") for projection in projections]
        if any(group != found[0] for group in found):
            raise LoadRefused(
                "ValueError", "All MoE projections need to have same", module,
                "gate_proj, up_proj and down_proj of the experts have different schemes",
            )  # fmt: skip
        return self._plain if found[0] is None else self._experts_of(module, found[0])

    def head(self, module: str) -> Scheme | None:
        if not self._groups or self._names.ignored(module):
            return None
        for target, group in self._groups.items():
            if Compressed([target], (), {}).ignored(module):
                return self._linear_of(module, group)
        return None

    def _group(self, module: str, kind: str) -> Group | None:
        if self._names.ignored(module) or not self._groups:
            return None
        return self._groups[self._names.target(module, kind)]

    def _linear_of(self, module: str, group: Group) -> Scheme:
        form = group.format or self._format
        if group.is_integers:
            if form != "pack-quantized" or group.bits not in (4, 8):
                raise LoadRefused(
                    "ImportError", "is not supported now", module,
                    f"the loader takes packed 4- and 8-bit codes, not {group.bits} bits in {form}",
                )  # fmt: skip
            return self._integers(group, triton=False)
        if _activations(form) and group.is_nvfp4:
            return self._fp4(group)
        block = group.block
        if _activations(form) and block is not None and self._setting.capability >= (8, 9):
            return self._fp8(block)
        if _activations(form) and group.rows is not None and self._setting.capability >= (8, 9):
            return self._rows(group.rows)
        if group.mx is not None and not _activations(form):
            raise LoadRefused(
                "NotImplementedError", "No compressed-tensors compatible scheme was found", module,
                f"the loader has no linear for MXFP{group.mx} in {form}",
            )  # fmt: skip
        raise NotSimulated(f"a linear with {group.strategy} scales in {form}")

    def _experts_of(self, module: str, group: Group) -> Scheme:
        if group.is_integers:
            if self._format != "pack-quantized" or group.bits not in (4, 8):
                raise LoadRefused(
                    "ValueError", "For Fused MoE layers, only ", module,
                    f"the loader takes packed 4- and 8-bit codes, not {group.bits} bits",
                )  # fmt: skip
            fits = (
                group.bits == 4 and group.strategy == "group" and group.group in (32, 128)
                and group.symmetric and not group.actorder
            )  # fmt: skip
            runner, capability = self._setting.moe_runner, self._setting.capability
            if runner == "triton" and not fits:
                raise LoadRefused(
                    "ValueError", "The Triton WNA16 MoE backend only supports", module,
                    "this runner takes symmetric 4-bit codes in groups of 32 or 128",
                )  # fmt: skip
            if runner == "flashinfer_trtllm" and fits and group.group == 32:
                return MxInt4(self._plain.dtype)
            blackwell = runner == "auto" and capability[0] == 10 and fits
            return self._integers(group, triton=runner == "triton" or blackwell)
        if group.is_nvfp4:
            return self._fp4(group)
        if group.block is not None:
            return self._fp8(group.block)
        if group.rows == "I8":
            raise LoadRefused(
                "NotImplementedError", "The W8A8Int8 Fused MoE scheme is implemented only for NPU",
                module, "the loader takes experts in INT8 with quantized activations only on NPUs",
            )  # fmt: skip
        if group.rows is not None:
            return self._rows(group.rows)
        if group.mx is not None and group.inputs is None:
            raise LoadRefused(
                "AttributeError", "'NoneType' object has no attribute 'num_bits'", module,
                f"the loader has no experts for MXFP{group.mx} in {group.format or self._format}",
            )  # fmt: skip
        raise NotSimulated(f"experts with {group.strategy} scales")

    def _integers(self, group: Group, *, triton: bool) -> PackedIntegers:
        size = group.group if group.strategy == "group" and group.group else -1
        return PackedIntegers(
            group.bits, size, group.symmetric, group.actorder, triton, self._plain.dtype
        )

    def _fp8(self, block: tuple[int, int]) -> CompressedFp8:
        linear = self._groups.get("Linear")
        return CompressedFp8(*block, known=linear is not None and linear.block is not None)

    def _rows(self, codes: str) -> PerRow:
        kind = "Int8" if codes == "I8" else "Fp8"
        return PerRow(
            codes, f"CompressedTensorsLinearMethod[CompressedTensorsW8A8{kind}]",
            f"CompressedTensorsFusedMoEMethod[CompressedTensorsW8A8{kind}MoE]",
        )  # fmt: skip

    def _fp4(self, group: Group) -> PackedFp4:
        native = group.inputs is not None and self._setting.capability >= (10, 0)
        return PackedFp4(group.inputs is not None, native, self._plain.dtype)


class Modelopt:
    """modelopt's NVFP4, for all modules that its list does not name."""

    name = "modelopt_fp4"

    def __init__(
        self,
        block: Mapping[str, Any],
        fused: Fused,
        plain: Unquantized,
        setting: Setting,
        version: str,
    ) -> None:
        algorithm = block.get("quant_algo")
        if algorithm not in ("NVFP4", "W4A16_NVFP4"):
            raise NotSimulated(f"quant_algo {algorithm!r}")
        size = block.get("group_size")
        if size is None:
            groups = block.get("config_groups")
            first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
            size = 16
            if isinstance(first, Mapping) and is_group(first):
                size = first["weights"].get("group_size") or 16
        if type(size) is not int or size < 1:
            raise NotSimulated(f"group_size {size!r}")
        excluded = block.get("ignore")
        for key in () if comes_before(version, _ALL_LISTS) else _LISTS:
            excluded = block.get(key) if excluded is None else excluded
        self._excluded = names_of(excluded)
        self._skips = SkipList(self._excluded)
        is_layer_excluded("", self._excluded)  # an invalid pattern is found here
        self._plain, self._fused = plain, fused
        trtllm = setting.moe_runner in ("flashinfer_trtllm", "flashinfer_trtllm_routed")
        self._scheme = ModeloptFp4(
            algorithm == "W4A16_NVFP4", size, not trtllm, 64 if trtllm else 1
        )
        self.cache = True
        self._setting = setting

    def linear(self, module: str, kind: str) -> Scheme:
        skipped = is_layer_skipped(module, self._skips, self._fused)
        if skipped or is_layer_excluded(module, self._excluded):
            return self._plain
        return self._scheme

    def experts(self, module: str) -> Scheme:
        if is_layer_excluded(module, self._excluded):
            return self._plain
        check_fp4_experts(module, self._setting)
        return self._scheme

    def head(self, module: str) -> Scheme | None:
        return self.linear(module, "ParallelLMHead")


class Gptq:
    """quant_method gptq with symmetric codes: every linear that no rule of `dynamic` excludes, and all
    experts, which it does not ask about."""

    name = "gptq_marlin"
    cache = False

    def __init__(self, block: Mapping[str, Any], plain: Unquantized) -> None:
        bits, size = block.get("bits"), block.get("group_size")
        fits = block.get("sym") is True and bits in (4, 8) and size in (-1, 32, 64, 128)
        if not fits or block.get("desc_act") not in (False, size == -1):
            raise NotSimulated("GPTQ other than symmetric codes of 4 or 8 bits in their order")
        if block.get("lm_head"):
            raise NotSimulated("GPTQ of lm_head")
        dynamic = block.get("dynamic") or {}
        if not isinstance(dynamic, Mapping) or not all(str(r).startswith("-:") for r in dynamic):
            raise NotSimulated("rules of `dynamic` that state another form")
        self._excluded = [compiled(str(rule)[2:]) for rule in dynamic]
        self._plain = plain
        self._scheme = MarlinGptq(_int(bits), _int(size), plain.dtype)

    def linear(self, module: str, kind: str) -> Scheme:
        excluded = any(pattern.match(module) for pattern in self._excluded)
        return self._plain if excluded else self._scheme

    def experts(self, module: str) -> Scheme:
        return self._scheme

    def head(self, module: str) -> Scheme | None:
        return None


_BLOCK_FP8 = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
_NVFP4 = ("NVFP4", "W4A16_NVFP4")


class Mixed:
    """modelopt's MIXED_PRECISION: an entry of `quantized_layers` for each module that is quantized, by
    the checkpoint's names or the runtime's."""

    name = "modelopt_mixed"

    def __init__(
        self, block: Mapping[str, Any], fused: Fused, plain: Unquantized, setting: Setting
    ) -> None:
        layers = block.get("quantized_layers")
        self._layers: dict[str, str] = {}
        sizes: dict[str, list[object]] = {"nvfp4": [], "fp8": []}
        for key, entry in layers.items() if isinstance(layers, Mapping) else ():
            algorithm = entry.get("quant_algo") if isinstance(entry, Mapping) else None
            if not isinstance(algorithm, str) or algorithm.upper() not in (*_BLOCK_FP8, *_NVFP4):
                raise NotSimulated(f"quant_algo {algorithm!r} of a module in quantized_layers")
            self._layers[str(key)] = algorithm.upper()
            which = "nvfp4" if algorithm.upper() in _NVFP4 else "fp8"
            sizes[which].append(entry.get("group_size", 16 if which == "nvfp4" else 128))
        if not sizes["nvfp4"]:
            raise NotSimulated("MIXED_PRECISION whose quantized_layers name no NVFP4")
        if not {"kv_cache_quant_algo", "kv_cache_scheme"} & set(block):
            raise NotSimulated("MIXED_PRECISION without kv_cache_quant_algo: another file is read")
        numbers = [*sizes["nvfp4"], *sizes["fp8"]]
        if any(type(size) is not int or size < 1 for size in numbers):
            raise NotSimulated(f"a group_size of {numbers!r}")
        if len(set(sizes["fp8"])) > 1:
            raise LoadRefused(
                "ValueError", "requires all block-FP8 layers to use one group_size", "config.json",
                f"quantized_layers state FP8 blocks of {sorted(set(map(str, sizes['fp8'])))}",
            )  # fmt: skip
        size = _int(next(iter(sizes["fp8"]), 128))
        group = _int(sizes["nvfp4"][0])
        self._schemes: dict[str, Scheme] = dict.fromkeys(_BLOCK_FP8, BlockFp8(size, size))
        trtllm = setting.moe_runner in ("flashinfer_trtllm", "flashinfer_trtllm_routed")
        for name in _NVFP4:
            made = ModeloptFp4(name == "W4A16_NVFP4", group, not trtllm, 64 if trtllm else 1)
            self._schemes[name] = made
        listed = block.get("ignore", block.get("exclude_modules"))
        self._excluded = names_of(listed)
        self._skips = SkipList(self._excluded)
        is_layer_excluded("", self._excluded)  # an invalid pattern is found here
        self._fused, self._plain, self._setting = fused, plain, setting
        scheme = block.get("kv_cache_scheme")
        self.cache = isinstance(scheme, Mapping) or bool(block.get("kv_cache_quant_algo"))

    def names(self, prefix: str) -> bool:
        """Tell whether an entry's name begins so."""
        return any(key.startswith(prefix) for key in self._layers)

    def linear(self, module: str, kind: str) -> Scheme:
        skipped = is_layer_skipped(module, self._skips, self._fused)
        if skipped or is_layer_excluded(module, self._excluded):
            return self._plain
        return self._scheme(module)

    def experts(self, module: str) -> Scheme:
        if is_layer_excluded(module, self._excluded):
            return self._plain
        scheme = self._scheme(module)
        if isinstance(scheme, ModeloptFp4):
            check_fp4_experts(module, self._setting)
        return scheme

    def head(self, module: str) -> Scheme | None:
        return self.linear(module, "ParallelLMHead")

    def _scheme(self, module: str) -> Scheme:
        found = self._algorithm(module)
        return self._plain if found is None else self._schemes[found]

    def _algorithm(self, module: str) -> str | None:
        """_resolve_quant_algo: the module's own entry, its parts', or one below it. Raises LoadRefused
        where parts differ."""
        tries = _spellings(module)
        own = next((self._layers[name] for name in tries if name in self._layers), None)
        if own is not None:
            return own
        base, _, last = module.rpartition(".")
        parts = {
            self._layers[name]
            for at in _spellings(base or module)
            for part in self._fused.get(last, ())
            if (name := f"{at}.{part}") in self._layers
        }
        if len(parts) > 1:
            raise LoadRefused(
                "ValueError", "Mixed quant_algo within fused layer", module,
                f"quantized_layers give its parts {sorted(parts)}, which are loaded as one module",
            )  # fmt: skip
        if parts:
            return parts.pop()
        for name in tries:
            below = f"{name}."
            found = next((a for key, a in self._layers.items() if key.startswith(below)), None)
            if found is not None:
                return found
        return None


def _spellings(module: str) -> list[str]:
    """The names under which an entry is looked for."""
    found = [module]
    if module.endswith(".lm_head"):
        found.append("lm_head")
    outer, inner = "language_model.model.", "model.language_model."
    if module.startswith(outer):
        found.append(inner + module.removeprefix(outer))
    elif module.startswith(inner):
        rest = module.removeprefix(inner)
        found += [outer + rest, f"model.{rest}"]
    elif module.startswith("model."):
        found.append(inner + module.removeprefix("model."))
    return found


def check_fp4_experts(module: str, setting: Setting) -> None:
    """Raise LoadRefused where no kernel of this GPU takes modelopt's NVFP4 experts."""
    runner, capability = setting.moe_runner, setting.capability
    marlin = (8, 0) <= capability < (10, 0) if runner == "auto" else runner == "marlin"
    if capability < (10, 0) and not marlin:
        raise LoadRefused(
            "ValueError", "Current platform does not support NVFP4", module,
            f"a GPU of capability {capability[0]}.{capability[1]} takes NVFP4 experts only with "
            "--moe-runner-backend marlin",
        )  # fmt: skip


_LISTS = ("ignore", "modules_to_not_convert", "exclude_modules")
# The release that came to read all of them in a block of NVFP4 that has one; those before read the
# first alone (ModelOptFp4Config.from_config).
_ALL_LISTS = "0.5.23"


@dataclass(frozen=True, slots=True)
class Renames:
    """Replacement by a class in the names that its quantization config lists: the first of `parts` that
    is in one, then the first of `starts` that it begins with (models/utils.py, WeightsMapper)."""

    parts: tuple[tuple[str, str], ...] = ()
    starts: tuple[tuple[str, str], ...] = ()

    def of(self, name: str) -> str:
        for old, new in self.parts:
            if old in name:
                name = name.replace(old, new, 1)
                break
        for old, new in self.starts:
            if name.startswith(old):
                return name.replace(old, new, 1)
        return name


def _renamed(block: Mapping[str, Any], renames: Renames) -> Mapping[str, Any]:
    """A block of compressed-tensors or modelopt with other names in its lists. modelopt's list keeps
    names that begin with `language_model.` without that, too."""
    listed = {key: [renames.of(name) for name in names_of(block.get(key))] for key in _LISTS}
    if block.get("quant_method") != "compressed-tensors":
        outer = "language_model."
        for names in listed.values():
            names += [name.removeprefix(outer) for name in names if name.startswith(outer)]
    lists: dict[str, Any] = {key: names for key, names in listed.items() if names}
    layers = block.get("quantized_layers")
    if isinstance(layers, Mapping):
        lists["quantized_layers"] = {renames.of(str(key)): one for key, one in layers.items()}
    groups = block.get("config_groups")
    if isinstance(groups, Mapping):
        lists["config_groups"] = {
            key: {**group, "targets": [renames.of(name) for name in names_of(group.get("targets"))]}
            if isinstance(group, Mapping)
            else group
            for key, group in groups.items()
        }
    return {**block, **lists}


def quantization_of(
    config: Mapping[str, Any],
    fused: Fused,
    setting: Setting,
    dtype: str,
    version: str,
    renames: Renames | None = None,
    *,
    packed: bool = False,
) -> Quantization:
    """Quantization that a config states, as a version of sglang reads it, for a class that maps fused
    names as in `fused`; `packed`: its experts beside FP8 are MXFP4. Raises NotSimulated."""
    plain = Unquantized(dtype)
    block = root_block(config)
    if block is None:
        transposed = setting.moe_runner == "triton_kernel"
        return NoQuantization(plain, routed=Unquantized16(plain) if transposed else None)
    renames = renames or Renames()
    try:
        if block.get("quant_method") == "fp8":
            return Fp8(block, fused, plain, renames, packed=packed)
        return _stated(block, fused, plain, setting, version, renames)
    except re.error as error:
        raise NotSimulated(f"a pattern of the quantization config: {error}") from None


def _stated(
    block: Mapping[str, Any],
    fused: Fused,
    plain: Unquantized,
    setting: Setting,
    version: str,
    renames: Renames,
) -> Quantization:
    method = block.get("quant_method")
    if renames != Renames():
        block = _renamed(block, renames)
    if method == "compressed-tensors":
        return CompressedTensors(block, fused, plain, setting)
    if method == "modelopt" or (method is None and "quant_algo" in block):
        if block.get("quant_algo") == "MIXED_PRECISION":
            return Mixed(block, fused, plain, setting)
        return Modelopt(block, fused, plain, setting, version)
    if method == "gptq":
        return Gptq(block, plain)
    if method == "mxfp4":
        return Mxfp4Experts(Mxfp4("Mxfp4MoEMethod", "weight_bias", once=True), plain)
    raise NotSimulated(f"quant_method {method!r}")


def _int(value: object) -> int:
    """A value that was found to be a number."""
    assert isinstance(value, int)
    return value


def _activations(form: object) -> bool:
    return form in _ACTIVATIONS
