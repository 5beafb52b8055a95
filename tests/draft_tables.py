"""A small EAGLE3 draft with a vocabulary of its own, in the form of sglang and vLLM and in that of
speculators, and its tables of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Tensor, write_json, write_shard
from checkpoints import tensor as any_tensor

HIDDEN, TOKENS, DRAFT = 64, 300, 40
Tensors = dict[str, Tensor]
Config = dict[str, Any]


def numbers() -> Any:
    """The target's numbers of the draft's tokens, ascending as trainers write them."""
    chosen = np.random.default_rng(3).choice(TOKENS, DRAFT, replace=False)
    return np.sort(chosen).astype(np.int64)


def table(values: Any, dtype: str = "I64") -> Tensor:
    kind = {"I64": "<i8", "I32": "<i4"}[dtype]
    return Tensor(dtype, (len(values),), np.asarray(values, kind).tobytes())


def flags(chosen: Any, size: int = TOKENS) -> Tensor:
    held = np.zeros(size, np.uint8)
    held[chosen] = 1
    return Tensor("BOOL", (size,), held.tobytes())


def eagle3(form: str = "sglang", dtype: str = "I64") -> tuple[Tensors, Config]:
    """Tensors and config of a draft."""
    layer = {"sglang": "midlayer", "speculators": "layers.0"}[form]
    tensors = {
        "d2t": table(numbers() - np.arange(DRAFT), dtype), "t2d": flags(numbers()),
        "fc.weight": any_tensor("BF16", HIDDEN, 3 * HIDDEN),
        "lm_head.weight": any_tensor("BF16", DRAFT, HIDDEN),
        "norm.weight": any_tensor("BF16", HIDDEN),
    }  # fmt: skip
    for name, shape in (
        ("self_attn.q_proj", (HIDDEN, 2 * HIDDEN)), ("self_attn.k_proj", (32, 2 * HIDDEN)),
        ("self_attn.v_proj", (32, 2 * HIDDEN)), ("self_attn.o_proj", (HIDDEN, HIDDEN)),
        ("mlp.gate_proj", (128, HIDDEN)), ("mlp.up_proj", (128, HIDDEN)),
        ("mlp.down_proj", (HIDDEN, 128)), ("hidden_norm", (HIDDEN,)),
        ("input_layernorm", (HIDDEN,)), ("post_attention_layernorm", (HIDDEN,)),
    ):  # fmt: skip
        tensors[f"{layer}.{name}.weight"] = any_tensor("BF16", *shape)
    own: Config = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": TOKENS, "hidden_act": "silu",
    }  # fmt: skip
    if form == "sglang":
        return tensors, {
            **own, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT,
            "tie_word_embeddings": False,
        }  # fmt: skip
    return tensors, {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT, "transformer_layer_config": own,
        "speculators_config": {
            "algorithm": "eagle3", "verifier": {"name_or_path": "ORG/NAME"},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
    }  # fmt: skip


def write_draft(folder: Path, tensors: Tensors, config: Config) -> Path:
    folder.mkdir()
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", {"version": "1.0"})
    write_shard(folder / "model.safetensors", tensors)
    return folder
