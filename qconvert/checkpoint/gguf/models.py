"""Models of GGUF files as transformers has them: config and names by architecture.

Sources: gguf 0.19 (`constants.py`, names of tensors and keys), llama.cpp's `convert_hf_to_gguf.py` (what
it changes: Llama's rows of q and k, Gemma's norms, experts in stacks), transformers
(`modeling_gguf_pytorch_utils.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qconvert.checkpoint.gguf.header import GgufHeader, GgufTensor, read_floats
from qconvert.checkpoint.gguf.stated import HALVES, KINDS, METHOD, PLUS_ONE, SECOND
from qconvert.core.dtypes import known_type
from qconvert.core.errors import CheckpointError
from qconvert.core.graph import Source
from qconvert.core.shown import count

_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj", "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
_AROUND = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
_KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
}  # fmt: skip
_OPTIONAL = (
    "attention.key_length",
    "attention.head_count_kv",
    "rope.freq_base",
    "feed_forward_length",
)
_TOKENS = {
    "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model of transformers for an architecture of ggml: its model_type and class, names of tensors
    beside the common ones, keys of the config by facts, and what the config states anyway. `halves`:
    rows of q and k have the halves of a head interleaved; `plus_one`: norms are stored as 1 + weight;
    `tokenizer`: transformers makes one of such a file."""

    model_type: str
    class_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    halves: bool = False
    plus_one: bool = False
    tokenizer: bool = True


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_type="llama", class_name="LlamaForCausalLM", states={"hidden_act": "silu"}, halves=True
    ),
    "qwen2": Architecture(
        model_type="qwen2", class_name="Qwen2ForCausalLM", states={"hidden_act": "silu"}
    ),
    "qwen3": Architecture(
        model_type="qwen3", class_name="Qwen3ForCausalLM", names=_NORMS,
        states={"hidden_act": "silu", "attention_bias": False},
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM", names={**_NORMS, **_EXPERTS},
        keys={
            "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        states={"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True},
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", class_name="Gemma3ForCausalLM",
        names={
            **_NORMS, "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        keys={"attention.sliding_window": "sliding_window"},
        states={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        plus_one=True,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss", class_name="GptOssForCausalLM",
        names={
            "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router", "ffn_gate_exps": "mlp.experts.gate_up_proj",
            "ffn_up_exps": f"mlp.experts.gate_up_proj{SECOND}", "ffn_down_exps": "mlp.experts.down_proj",
        },
        keys={
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        states={"hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0},
        tokenizer=False,
    ),
}  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")
# Llama 3's frequencies (`LlamaConfig`, rope_type llama3), which a GGUF holds computed.
_ROPE = "rope_freqs.weight"
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
# Gemma 3 27B scales queries otherwise than all others; llama.cpp tells it by its number of layers.
_GEMMA_27B = 62


@dataclass(frozen=True)
class GgufModel:
    """A model as its class has it: config with the block that says how tensors are stored, and tensors
    by name: sources, of which `shard` numbers the files."""

    config: Mapping[str, Any]
    sources: Mapping[str, Source]


def model_of(files: Sequence[Path], headers: Sequence[GgufHeader]) -> GgufModel:
    """The model of one GGUF file or the parts of one. Raises CheckpointError for an architecture, a
    tensor or a fact that is not read here."""
    file, facts = files[0], headers[0].facts
    name = facts.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise CheckpointError(
            f"{file}: architecture {name!r} is not read here; {', '.join(ARCHITECTURES)} are"
        )
    tensors = [(n, one) for n, header in enumerate(headers) for one in header.tensors]
    by_name = {one.name: one for _, one in tensors}
    config = _config(file, facts, str(name), known, by_name)
    kinds, halves, added = dict[str, str](), dict[str, int](), list[str]()
    sources: dict[str, Source] = {}
    # What is the second of two is read behind the first.
    for shard, one in sorted(tensors, key=lambda each: "ffn_up_exps" in each[1].name):
        if one.name == _ROPE:
            continue  # stated by the config
        for place, source in _placed(file, known, one, shard):
            if place in sources:
                raise CheckpointError(
                    f"{file}: {one.name!r} is {place!r}, and so is another tensor"
                )
            sources[place] = source
            plus = known.plus_one and place.endswith("norm.weight")
            turned = known.halves and (".q_proj." in place or ".k_proj." in place)
            whole = ".experts." in place and not place.endswith(".weight")  # a stack of the class
            if one.kind != "BF16" or plus or turned or whole:
                kinds[place] = one.kind
            if plus:
                added.append(place)
            if turned:
                halves[place] = _head(file, config, one)
    for place in sources:
        both = place.removesuffix(SECOND)
        if "experts.gate_up_proj" not in place:
            continue
        if not {both, both + SECOND} <= sources.keys():
            raise CheckpointError(f"{file}: of {both!r} gate or up is missing")
        if (kinds[both], sources[both].type) != (kinds[both + SECOND], sources[both + SECOND].type):
            raise CheckpointError(f"{file}: gate and up of {both!r} are of different types")
    block = {"quant_method": METHOD, KINDS: kinds, HALVES: halves, PLUS_ONE: added}
    return GgufModel({**config, "quantization_config": block}, sources)


def _head(file: Path, config: Mapping[str, Any], one: GgufTensor) -> int:
    size: int = config["head_dim"]
    if size % 2 or one.shape[0] % size:
        raise CheckpointError(
            f"{file}: tensor {one.name!r}: expected rows in heads of {size}, found {list(one.shape)}"
        )
    return size


def _placed(
    file: Path, known: Architecture, one: GgufTensor, shard: int
) -> Iterator[tuple[str, Source]]:
    """Names in the class of a tensor, or of each matrix of a stack, and where they lie."""
    stem, _, parameter = one.name.rpartition(".")
    found, names = _BLOCK.fullmatch(stem), {**_LAYER, **known.names}
    place = _AROUND.get(stem) if found is None else names.get(found[2])
    if place is None or parameter not in ("weight", "bias"):
        raise CheckpointError(
            f"{file}: tensor {one.name!r} is not of a {known.class_name} as it is read here"
        )
    if found is not None:
        place = f"model.layers.{found[1]}.{place}"
    kind = one.stored
    if "{}" not in place:
        full = _parameter(place, parameter)
        yield full, Source(full, kind, shard, one.offset)
        return
    if len(kind.shape) != 3:
        raise CheckpointError(
            f"{file}: tensor {one.name!r}: expected a stack of matrices, found {list(one.shape)}"
        )
    each = known_type(kind.dtype, kind.shape[1:])
    for expert in range(kind.shape[0]):
        name = f"{place.format(expert)}.{parameter}"
        yield name, Source(name, each, shard, one.offset + expert * each.nbytes)


def _parameter(place: str, parameter: str) -> str:
    """Name of a module's parameter; stacks and sinks are parameters, with biases beside them."""
    if not place.removesuffix(SECOND).endswith((".gate_up_proj", "experts.down_proj", ".sinks")):
        return f"{place}.{parameter}"
    if parameter == "weight":
        return place
    return f"{place.removesuffix(SECOND)}_bias{SECOND if place.endswith(SECOND) else ''}"


def _config(
    file: Path,
    facts: Mapping[str, Any],
    name: str,
    known: Architecture,
    tensors: Mapping[str, GgufTensor],
) -> dict[str, Any]:
    """The config of the class, without a block."""
    config: dict[str, Any] = {
        "architectures": [known.class_name], "model_type": known.model_type, "torch_dtype": "bfloat16",
        **known.states,
    }  # fmt: skip
    for fact, key in {**_KEYS, **known.keys}.items():
        value = facts.get(f"{name}.{fact}")
        if isinstance(value, float):
            value = float(f"{value:.7g}")  # a float32, in the digits that it was written with
        if isinstance(value, int | float) and 0 < value < math.inf and value is not True:
            config[key] = value
        elif fact not in _OPTIONAL or value is not None:
            raise CheckpointError(
                f"{file}: expected a number above 0 as {name}.{fact}, found {_shown(value)}"
            )
    if "intermediate_size" not in config:
        raise CheckpointError(
            f"{file}: expected a number above 0 as {name}.feed_forward_length, found nothing"
        )
    if config["num_hidden_layers"] > len(tensors):
        raise CheckpointError(
            f"{file}: expected tensors of {count(config['num_hidden_layers'], 'layer')} by "
            f"{name}.block_count, found {count(len(tensors), 'tensor')}"
        )
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file}: tensor 'token_embd.weight' is missing")
    config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if known.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if known.model_type == "gemma3_text" and config["num_hidden_layers"] == _GEMMA_27B:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    if known.model_type == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[n % 2] for n in range(config["num_hidden_layers"])]
    for fact, key in _TOKENS.items():
        if type(value := facts.get(f"tokenizer.ggml.{fact}")) is int:
            config[key] = value
    scaling = _scaling(file, facts, name)
    if _ROPE in tensors:
        scaling = _llama3(file, config, tensors[_ROPE])
    return config if scaling is None else {**config, "rope_scaling": scaling}


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:80]


def _scaling(file: Path, facts: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Scaled rotary positions as facts state them."""
    begin = f"{name}.rope.scaling."
    kind, factor = facts.get(f"{begin}type", "none"), facts.get(f"{begin}factor")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or type(factor) is not float:
        raise CheckpointError(
            f"{file}: rotary positions scaled by {kind!r} with factor {_shown(factor)} are not read here"
        )
    found: dict[str, Any] = {"rope_type": kind, "factor": factor}
    original = facts.get(f"{begin}original_context_length")
    if kind == "yarn" and original is not None:
        found["original_max_position_embeddings"] = original
    if name == "gpt-oss":
        found |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # as it is published
    return found


def _llama3(file: Path, config: Mapping[str, Any], one: GgufTensor) -> dict[str, Any]:
    """Llama 3's statement of the frequencies that a tensor [head_dim / 2] divides. Raises
    CheckpointError where none gives them."""
    if one.kind != "F32" or len(one.shape) != 1:
        raise CheckpointError(f"{file}: tensor {one.name!r}: expected a vector of F32")
    found = read_floats(file, one)
    factor, half = max(found), len(found)
    for number, value in enumerate(found):
        length = 2 * math.pi * config.get("rope_theta", 10000.0) ** (number / half)
        share = (_ORIGINAL / length - _LOW) / (_HIGH - _LOW)
        smooth = min(1.0, max(0.0, share))
        if not math.isclose(value, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-4):
            raise CheckpointError(
                f"{file}: tensor {one.name!r} holds other frequencies than Llama 3's, and qconvert "
                "does not know how a config states them; start from the original release"
            )
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH, "original_max_position_embeddings": _ORIGINAL,
    }  # fmt: skip
