"""Small drafts of EAGLE3, with a vocabulary of its own and its tables of tokens, and of DFlash, in the
form of sglang and vLLM and in that of speculators."""

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


def matrix(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Numbers that every format can hold."""
    floats = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    data = (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return Tensor("BF16", (rows, columns), data)


def norm(size: int) -> Tensor:
    return any_tensor("BF16", size)


def _layer(hidden: int, inputs: int, seed: int = 1) -> Tensors:
    """A decoder layer of four heads, two of keys, whose attention takes `inputs` numbers."""
    return {
        f"{name}.weight": matrix(*shape, seed + at) if len(shape) == 2 else norm(*shape)
        for at, (name, shape) in enumerate((
            ("self_attn.q_proj", (hidden, inputs)), ("self_attn.k_proj", (hidden // 2, inputs)),
            ("self_attn.v_proj", (hidden // 2, inputs)), ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (2 * hidden, hidden)), ("mlp.up_proj", (2 * hidden, hidden)),
            ("mlp.down_proj", (hidden, 2 * hidden)), ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ))
    }  # fmt: skip


def _config(model_type: str, hidden: int, layers: int) -> Config:
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": TOKENS, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "head_dim": hidden // 4,
    }  # fmt: skip


def _of_speculators(algorithm: str, tokens: int, own: Config) -> Config:
    return {
        "speculators_model_type": algorithm, "transformer_layer_config": own,
        "speculators_config": {
            "algorithm": algorithm, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": "ORG/NAME", "architectures": []},
        },
    }  # fmt: skip


def dflash(form: str = "sglang", hidden: int = HIDDEN) -> tuple[Tensors, Config]:
    """Tensors and config of a draft of two layers that takes hidden states behind layers 1 and 3."""
    tensors = {
        "fc.weight": matrix(hidden, 2 * hidden),
        **{f"{name}.weight": norm(hidden) for name in ("hidden_norm", "norm")},
    }
    for number in range(2):
        layer = _layer(hidden, hidden, seed=number)
        norms = {f"self_attn.{x}_norm.weight": norm(hidden // 4) for x in "qk"}
        tensors |= {f"layers.{number}.{name}": one for name, one in (layer | norms).items()}
    own = _config("qwen3", hidden, 2)
    if form == "sglang":
        return tensors, {
            **own, "architectures": ["DFlashDraftModel"], "block_size": 8,
            "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]},
        }  # fmt: skip
    return tensors, {
        "architectures": ["DFlashSpeculator"], **_of_speculators("dflash", 7, own),
        "draft_vocab_size": TOKENS, "block_size": 8, "mask_token_id": 7,
        "aux_hidden_state_layer_ids": [2, 4], "sample_from_anchor": False,
        "sliding_window_non_causal": True,
    }  # fmt: skip


def eagle3(
    form: str = "sglang", dtype: str = "I64", hidden: int = HIDDEN
) -> tuple[Tensors, Config]:
    """Tensors and config of a draft."""
    layer = {"sglang": "midlayer", "speculators": "layers.0"}[form]
    tensors = {
        "d2t": table(numbers() - np.arange(DRAFT), dtype), "t2d": flags(numbers()),
        "fc.weight": matrix(hidden, 3 * hidden),
        "lm_head.weight": matrix(DRAFT, hidden),
        "norm.weight": norm(hidden),
        f"{layer}.hidden_norm.weight": norm(hidden),
    }  # fmt: skip
    tensors |= {f"{layer}.{name}": one for name, one in _layer(hidden, 2 * hidden).items()}
    own = _config("llama", hidden, 1)
    if form == "sglang":
        return tensors, {
            **own, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT,
            "tie_word_embeddings": False,
        }  # fmt: skip
    return tensors, {
        "architectures": ["Eagle3Speculator"], **_of_speculators("eagle3", 3, own),
        "draft_vocab_size": DRAFT, "norm_before_residual": False, "norm_before_fc": False,
        "fc_norm": False, "norm_output": False, "embed_requires_grad": False,
    }  # fmt: skip


def write_draft(folder: Path, tensors: Tensors, config: Config) -> Path:
    folder.mkdir()
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", {"version": "1.0"})
    write_shard(folder / "model.safetensors", tensors)
    return folder
