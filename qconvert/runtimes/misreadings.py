"""Tensors that a class of a runtime is known not to read, or to read wrong, without a word.

These are facts of single classes, each read in the runtime's code and seen in its loader
(tests/loaders/test_misreadings.py). They are asked before a simulator is, also of classes that none
knows: that no fact is found of a folder says nothing.

sglang:
- `models/llama.py` looks for `.weight_scale_inv` as `.weight_scale`, the name of a scale a tensor. Its
  scales of blocks have the first name, so that none is read. compressed-tensors calls its own
  `weight_scale`.
- `models/llama4.py` takes that loader over for the text model alone, which has nothing for experts.
- `models/hunyuan.py` gives experts and the linears of shared ones no path.
- `models/afmoe.py`, `deepseek.py` and `xverse_moe.py` compute with the `weight` of all experts as one
  matrix, which no scale goes with: codes are taken for values, and packed ones have no `weight`.
- `layers/moe/fused_moe_triton/fused_marlin_moe.py` asserts that experts' scales have the model's type.
  GPTQ's are made in FP16: a model in BF16 loads and ends at its first token (seen on an H100).
- `models/mllama4.py` moves rows of q_proj and k_proj for rotary embeddings, of tensors called `weight`.
vLLM: `models/llama4.py` moves those of packed codes and of scales of rows, too, but none of blocks
or zero points. GPTQ's names neither moves.
Drafts that stand alone: sglang reads no config of speculators, which states no model_type. vLLM numbers
a draft's layers on from the model's (`models/llama_eagle3.py`), and looks for GPTQ's codes by their
names in the folder (`layers/quantization/auto_gptq.py`, maybe_update_config), so that it finds none.
Both build q, k and v, gate and up, and the inputs of latent attention as one matrix with one grid of
scales: where a part is no whole blocks, sglang refuses it (`layers/quantization/fp8.py`) and vLLM puts
scales where they do not belong (`layers/linear.py`, adjust_block_scale_shard).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.family import draft_algorithm
from qconvert.runtimes.classes.record import architecture_of
from qconvert.runtimes.loading.config_groups import block_of, pair_of
from qconvert.runtimes.loading.setting import LoadRefused

Config = Mapping[str, Any]
Tensors = Mapping[str, TensorType]

# Classes that load as LlamaForCausalLM does, or hand their text model to one that does.
_AS_LLAMA = frozenset((
    "LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM", "Phi3ForCausalLM",
    "InternLM3ForCausalLM", "IQuestCoderForCausalLM", "TeleFLMForCausalLM", "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration", "LlavaLlamaForCausalLM", "LlavaMistralForCausalLM",
    "VoxtralForConditionalGeneration", "GlmAsrForConditionalGeneration", "Phi4MMForCausalLM",
    "Sarashina2VisionForCausalLM", "MultiModalityCausalLM",
))  # fmt: skip
# Those whose text model is of the class that its config names.
_BY_TEXT = frozenset(("LlavaForConditionalGeneration", "PixtralForConditionalGeneration"))
_LLAMA_TEXTS = ("llama", "mistral", "ministral3", "phi3")
_UNSCALED = ("AfmoeForCausalLM", "DeepseekForCausalLM", "XverseMoeForCausalLM")
_MOVED = ("Llama4ForConditionalGeneration", "Llama4ForCausalLM")
_ROUTED = ".experts"
# What has no rows of a matrix.
_ROWLESS = (
    "weight_shape", "weight_g_idx", "g_idx", "weight_global_scale", "input_global_scale",
    "weight_scale_2", "input_scale", "bias",
)  # fmt: skip
_GPTQ = ("qweight", "scales", "qzeros")


@dataclass(frozen=True, slots=True)
class Misread:
    """Tensors that reach no parameter (`unread`), or wrong ones (`wrong`: why, by name); and what a user
    can do. `refused`: the runtime ends with an error at the wrong ones, in place of reading them."""

    unread: tuple[str, ...] = ()
    wrong: Mapping[str, str] = field(default_factory=dict)
    cure: str = ""
    refused: bool = False

    def __bool__(self) -> bool:
        return bool(self.unread or self.wrong)

    @property
    def first(self) -> str:
        return next(iter((*self.unread, *self.wrong)))


def misread(runtime: str, config: Config, tensors: Tensors) -> Misread:
    """Tensors that the class that a config names is known to misread of these tensors, of the first fact
    that there is; an empty answer where none is known."""
    name = architecture_of(config)
    for fact in _FACTS.get(runtime, ()):
        found = fact(name, config, tensors)
        if found:
            return found
    return Misread()


def misread_of_ranks(
    runtime: str, groups: Mapping[int, Sequence[str]], ranks: int, *, columns: int = 128
) -> Misread:
    """The same where each expert is divided among `ranks`, of what `integer_groups` found
    (`columns` of a group): scales of integer codes of w1 and w3, which are put into the order of
    a single group where a rank has a single group of the columns of w2: the sizes of w2 are handed over
    for those of w1 and w3 (vLLM, `fused_moe/oracle/int_wna16.py`, pull request 50196; sglang,
    `hardware_backend/gpu/quantization/gptq_kernels.py`, `awq_kernels.py`). Seen with vLLM on two H200: a
    KL of 1.0 of the next token."""
    if not (each := groups.get(ranks, ())):
        return Misread()
    why = (
        "a rank has a single group of down_proj's columns, and the scales of gate_proj and up_proj are "
        "put into the order of a single group, too"
    )
    smaller = ", or smaller groups" if columns > 32 else ""
    if columns == 32:
        smaller = ", or groups of 16 (in a recipe `w4a16: {group_size: 16}`)"
    whole = {"sglang": f"--ep-size {ranks}", "vllm": "--enable-expert-parallel"}[runtime]
    cure = (
        f"choose a smaller --tp{smaller}, or start {runtime} with {whole}, which keeps experts "
        f"whole (validate --ep {ranks})"
    )
    return Misread(wrong=dict.fromkeys(each, why), cure=cure)


# GPUs that compute with E4M3.
_FP8_UNITS = (8, 9)


def fp8_experts(config: Config, tensors: Tensors) -> tuple[str, ...]:
    """Weights of routed experts in FP8."""
    return tuple(
        name for name, type in tensors.items() if type.dtype == "F8_E4M3" and f"{_ROUTED}." in name
    )


def refused_by_gpu(
    runtime: str, experts: tuple[str, ...], capability: tuple[int, int]
) -> LoadRefused | None:
    """Return the reason why a GPU cannot serve `fp8_experts`: sglang computes them with Triton, which
    has no E4M3 for GPUs without its units (sglang issue 5871), and keeps Marlin, which needs
    none, for linear layers (`layers/quantization/fp8.py`, Fp8MoEMethod.create_moe_runner)."""
    if runtime != "sglang" or not experts or capability >= _FP8_UNITS:
        return None
    why = (
        "experts in FP8 are computed by kernels that need FP8 units, which a GPU of capability "
        f"{capability[0]}.{capability[1]} has not"
    )
    return LoadRefused("", "", experts[0], why)


def integer_groups(runtime: str, config: Config, tensors: Tensors) -> dict[int, list[str]]:
    """Scales of integer codes of routed w1 and w3 with several groups a row, by the number of groups
    that rows of w2 have in their layer."""
    scales, of_w2 = defaultdict[str, list[str]](list), dict[str, int]()
    for name, type in tensors.items():
        if not name.endswith(_SCALES) or f"{_ROUTED}." not in name or len(type.shape) != 2:
            continue
        module, _, leaf = name.rpartition(".")
        beside = tensors.get(f"{module}.{_CODES[leaf]}")
        if beside is None or beside.dtype != "I32" or (runtime, leaf) == ("sglang", "weight_scale"):
            continue
        groups = type.shape[1 if leaf == "weight_scale" else 0]
        layer = name.partition(f"{_ROUTED}.")[0]
        if module.endswith((".down_proj", ".w2")):
            of_w2[layer] = groups
        elif groups > 1:
            scales[layer].append(name)
    found = defaultdict[int, list[str]](list)
    for layer, groups in of_w2.items():
        found[groups] += scales[layer]
    return dict(found)


def group_columns(tensors: Tensors, scales: str) -> int:
    """Columns of a matrix that share one of these scales, of 4-bit codes, eight in a word."""
    module, _, leaf = scales.rpartition(".")
    codes, each = tensors[f"{module}.{_CODES[leaf]}"].shape, tensors[scales].shape
    at = 1 if leaf == "weight_scale" else 0
    return 8 * codes[at] // each[at]


# Scales of integer codes, and their codes.
_CODES = {"weight_scale": "weight_packed", "scales": "qweight"}
_SCALES = tuple(f".{leaf}" for leaf in _CODES)


def _block_scales(name: str, config: Config, tensors: Tensors) -> Misread:
    """Scales of blocks in classes that load as Llama's."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    if name not in _AS_LLAMA and not (name in _BY_TEXT and kind in _LLAMA_TEXTS):
        return Misread()
    scales = [
        one for one, type in tensors.items()
        if one.endswith(".weight_scale_inv") and len(type.shape) == 2
    ]  # fmt: skip
    cure = (
        "its class reads scales of rows or of matrices (qconvert fp8 --channel, --tensor), and those of "
        "blocks in compressed-tensors' form, where fused parts are whole blocks (--for sglang)"
    )
    return Misread(tuple(scales), cure=cure)


def _experts_of_text(name: str, config: Config, tensors: Tensors) -> Misread:
    found = [one for one in tensors if ".experts." in one] if name == "Llama4ForCausalLM" else []
    cure = "sglang reads Llama 4's experts in the class with a tower alone: keep the whole model"
    return Misread(tuple(found), cure=cure)


def _experts_without_scales(name: str, config: Config, tensors: Tensors) -> Misread:
    """Routed experts in codes in classes that compute with their weights alone."""
    if name not in _UNSCALED:
        return Misread()
    experts = {one: type for one, type in tensors.items() if f"{_ROUTED}." in one}
    packed = tuple(one for one in experts if one.endswith((".weight_packed", ".qweight")))
    why = "codes are taken for values"
    codes = [
        one for one, type in experts.items()
        if one.endswith(".weight") and type.dtype not in ("BF16", "F16", "F32")
    ]  # fmt: skip
    cure = "leave routed experts unquantized, or serve it with vLLM"
    return Misread(packed, dict.fromkeys(codes, why), cure)


def _scales_of_another_type(name: str, config: Config, tensors: Tensors) -> Misread:
    """Scales of routed experts in GPTQ's packing in a model that is not FP16."""
    block = config.get("quantization_config")
    method = block.get("quant_method") if isinstance(block, Mapping) else None
    text = config.get("text_config")
    texts = (text, config) if isinstance(text, Mapping) else (config,)
    types = {str(one.get("dtype") or one.get("torch_dtype")) for one in texts}
    if method != "gptq" or "float16" in types:
        return Misread()
    scales = [one for one in tensors if f"{_ROUTED}." in one and one.endswith(".scales")]
    why = "the kernel of experts asserts that scales have the model's type, and takes these in FP16"
    return Misread(wrong=dict.fromkeys(scales, why), cure="take --packing compressed-tensors")


def _without_paths(name: str, config: Config, tensors: Tensors) -> Misread:
    """Hunyuan's experts in modelopt's form, whose list cannot name what has no path."""
    block = config.get("quantization_config")
    method = block.get("quant_method") if isinstance(block, Mapping) else None
    if name != "HunYuanMoEV1ForCausalLM" or method != "modelopt":
        return Misread()
    codes = [one for one, type in tensors.items() if type.dtype == "U8"]
    why = "the class builds other layers so, too: it asks for them without a path"
    return Misread(wrong=dict.fromkeys(codes, why), cure="take --dialect compressed-tensors")


def _rows_of(moved: Collection[str]) -> Callable[[str, Config, Tensors], Misread]:
    """The fact that a class moves rows of q_proj and k_proj in tensors that end so, and no others."""

    def fact(name: str, config: Config, tensors: Tensors) -> Misread:
        if name not in _MOVED:
            return Misread()
        text = config.get("text_config")
        sizes = text if isinstance(text, Mapping) else config
        wrong: dict[str, str] = {}
        for one, type in tensors.items():
            module, _, leaf = one.rpartition(".")
            which = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(
                module.rpartition(".")[2]
            )
            if which is None or "vision" in module or leaf in _ROWLESS or type.numel <= 1:
                continue
            if not _right(leaf, type, _heads(sizes, which), _head(sizes), moved):
                wrong[one] = (
                    "the class moves rows of q_proj and k_proj for rotary, not this tensor's"
                )
        cure = (
            "leave q_proj and k_proj unquantized (w4a16 --ignore 're:.*(q|k)_proj.*', or experts "
            "alone), or choose fp8 in blocks or with a scale a matrix"
        )
        return Misread(wrong=wrong, cure=cure)

    return fact


def _right(leaf: str, type: TensorType, heads: int, size: int, moved: Collection[str]) -> bool:
    """Tell whether rows of a tensor are as those of its matrix are moved, within heads of `size`
    rows."""
    rows = type.shape[0]
    if leaf in _GPTQ or not heads or not size:
        return leaf not in _GPTQ
    if rows == heads * size:
        return leaf in moved
    block = ceil_div(heads * size, rows)  # rows that share one of the tensor's
    return leaf not in moved and block % size == 0


def _heads(config: Config, key: str) -> int:
    value = config.get(key)
    return value if type(value) is int else 0


def _head(config: Config) -> int:
    own = _heads(config, "head_dim")
    heads = _heads(config, "num_attention_heads")
    return own or (_heads(config, "hidden_size") // heads if heads else 0)


def _cut_parts(*, refused: bool) -> Callable[[str, Config, Tensors], Misread]:
    """The fact that parts of a fused matrix in FP8 are no whole blocks, so that those behind begin
    within a block: the runtime refuses them, or gives them other rows' scales."""
    return lambda name, config, tensors: _parts_that_cut(config, tensors, refused=refused)


def _parts_that_cut(config: Config, tensors: Tensors, *, refused: bool) -> Misread:
    rows = _block_rows(config)
    if not rows:
        return Misread()
    wrong: dict[str, str] = {}
    for one, type in tensors.items():
        module, _, leaf = one.rpartition(".")
        parent, _, last = module.rpartition(".")
        if leaf != "weight" or type.dtype != "F8_E4M3" or _ROUTED in parent or len(type.shape) != 2:
            continue
        for part, size in _parts(last, type.shape[0], config):
            behind = _BEHIND.get(part)
            there = last != part or f"{parent}.{behind}.weight" in tensors
            if behind is not None and there and size % rows:
                what = "" if refused else ": what follows is given other rows' scales"
                wrong[one] = (
                    f"{part} of a fused matrix has {size} rows, which cut blocks of {rows}{what}"
                )
    cure = (
        "choose scales without blocks: fp8 --channel (in a recipe `fp8: {dialect: compressed-tensors, "
        "block: null}`)"
    )
    return Misread(wrong=wrong, cure=cure, refused=refused)


# What follows a part in the matrix that runtimes make of both. Routed experts are apart: vLLM cuts their
# blocks finer.
_BEHIND = {
    "q_proj": "k_proj", "k_proj": "v_proj", "gate_proj": "up_proj",
    "q_a_proj": "kv_a_proj_with_mqa",
}  # fmt: skip


def _parts(name: str, rows: int, config: Config) -> list[tuple[str, int]]:
    """The parts of a matrix, one for what is stored apart."""
    if name == "gate_up_proj":
        return [("gate_proj", rows // 2)]
    if name != "qkv_proj":
        return [(name, rows)]
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    heads, kv = (_heads(sizes, f"num_{which}_heads") for which in ("attention", "key_value"))
    size = rows // (heads + 2 * kv) if heads and kv else 0
    return [("q_proj", heads * size), ("k_proj", kv * size)]


def _block_rows(config: Config) -> int:
    """Rows of the blocks that a config states, 0 for none."""
    block = block_of(config) or {}
    pair = pair_of(block.get("weight_block_size"))
    groups = block.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            pair = pair or pair_of(weights.get("block_structure"))
    return pair[0] if pair else 0


def _of_speculators(name: str, config: Config, tensors: Tensors) -> Misread:
    """A draft in speculators' form."""
    if config.get("speculators_model_type") is None:
        return Misread()
    why = "its config, in speculators' form, has no model_type"
    return Misread(wrong=dict.fromkeys(tensors, why), cure="qconvert relabel --to sglang")


def _numbered_on(name: str, config: Config, tensors: Tensors) -> Misread:
    """GPTQ's codes of a draft's layers."""
    if not draft_algorithm(config):
        return Misread()
    codes = tuple(one for one in tensors if one.endswith(".qweight"))
    return Misread(codes, cure="qconvert relabel --to compressed-tensors")


_FACTS: Mapping[str, tuple[Callable[[str, Config, Tensors], Misread], ...]] = {
    "sglang": (
        _of_speculators,
        _experts_of_text,
        _experts_without_scales,
        _scales_of_another_type,
        _block_scales,
        _without_paths,
        _rows_of(("weight",)),
        _cut_parts(refused=True),
    ),
    "vllm": (
        _numbered_on,
        _rows_of(("weight", "weight_packed", "weight_scale")),
        _cut_parts(refused=False),
    ),
}
