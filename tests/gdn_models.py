"""Small Qwen3.5 and Qwen3-Next checkpoints with linear attention, experts, a draft layer and a vision
tower; every row is another, heavy-tailed and with outlier channels. Written with numpy alone."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from checkpoints import Model, Tensor

HIDDEN, NK, NV, DK, DV, EXPERTS, INTERMEDIATE, BLOCK, VOCAB = 32, 4, 8, 8, 8, 3, 16, 8, 24
KEYS, VALUES = NK * DK, NV * DV

Array = np.ndarray[Any, Any]


def numbers(name: str, *shape: int) -> Array:
    """Student-t with 4 degrees of freedom, every eighth column eight times as large: float32."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    values = 0.02 * random.standard_t(4, shape)
    if len(shape) > 1:
        values[..., ::8] *= 8
    return values.astype(np.float32)


def bf16(values: Array, *shape: int) -> Tensor:
    """Cut to bf16."""
    bits = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")
    return Tensor("BF16", shape or values.shape, bits.tobytes())


def plain(name: str, *shape: int) -> dict[str, Tensor]:
    return {name: bf16(numbers(name, *shape))}


def fp8(name: str, rows: int, columns: int, scale: str) -> dict[str, Tensor]:
    """Random codes, none of them NaN, and block scales in `scale`: F32, BF16 or U8 (exponents)."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    codes = random.integers(0, 0x7F, (rows, columns), np.uint8)
    codes |= random.integers(0, 2, (rows, columns), np.uint8) << 7
    grid = -(-rows // BLOCK), -(-columns // BLOCK)
    factors = (0.002 * np.exp(random.standard_normal(grid))).astype(np.float32)
    if scale == "U8":
        exponents = random.integers(110, 122, grid, np.uint8)
        held = Tensor("U8", grid, exponents.tobytes())
    elif scale == "BF16":
        held = bf16(factors)
    else:
        held = Tensor("F32", grid, factors.tobytes())
    return {name: Tensor("F8_E4M3", (rows, columns), codes.tobytes()), f"{name}_scale_inv": held}


def _config(kind: str, quantization: dict[str, Any] | None) -> dict[str, Any]:
    text: dict[str, Any] = {
        "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_experts": EXPERTS,
        "moe_intermediate_size": INTERMEDIATE, "linear_num_key_heads": NK,
        "linear_num_value_heads": NV, "linear_key_head_dim": DK, "linear_value_head_dim": DV,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "mtp_num_hidden_layers": 1, "tie_word_embeddings": False, "hidden_act": "silu",
        "num_experts_per_tok": 2, "vocab_size": VOCAB,
    }  # fmt: skip
    extra = {} if quantization is None else {"quantization_config": quantization}
    if kind == "qwen3_5_moe":
        vision = {"depth": 0}
        return {"model_type": kind, "text_config": {**text, "model_type": "qwen3_5_moe_text"},
                "vision_config": vision, **extra}  # fmt: skip
    return {"model_type": kind, **text, **extra}


def model(kind: str = "qwen3_5_moe", *, scale: str | None = None, stacked: bool = False) -> Model:
    """Of class `qwen3_5_moe` (multi-modal), `qwen3_5_moe_text` or `qwen3_next` (fused, interleaved by
    key head). `scale` makes big linears block FP8; `stacked` puts bf16 experts in 3-D stacks."""
    quantization: dict[str, Any] | None = None
    if scale is not None:
        quantization = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            **({"scale_fmt": "ue8m0"} if scale == "U8" else {}),
        }  # fmt: skip

    def linear(module: str, rows: int, columns: int) -> dict[str, Tensor]:
        name = f"{module}.weight"
        return plain(name, rows, columns) if scale is None else fp8(name, rows, columns, scale)

    def layer(at: str, attention: str) -> dict[str, Tensor]:
        found = plain(f"{at}.input_layernorm.weight", HIDDEN)
        found |= plain(f"{at}.post_attention_layernorm.weight", HIDDEN)
        if attention == "full":
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                found |= linear(f"{at}.self_attn.{part}", HIDDEN, HIDDEN)
            for part in ("q_norm", "k_norm"):
                found |= plain(f"{at}.self_attn.{part}.weight", 16)
        else:
            gdn = f"{at}.linear_attn"
            if kind == "qwen3_next":
                found |= linear(f"{gdn}.in_proj_qkvz", 2 * KEYS + 2 * VALUES, HIDDEN)
                found |= plain(f"{gdn}.in_proj_ba.weight", 2 * NV, HIDDEN)
            else:
                found |= linear(f"{gdn}.in_proj_qkv", 2 * KEYS + VALUES, HIDDEN)
                found |= linear(f"{gdn}.in_proj_z", VALUES, HIDDEN)
                found |= plain(f"{gdn}.in_proj_b.weight", NV, HIDDEN)
                found |= plain(f"{gdn}.in_proj_a.weight", NV, HIDDEN)
            found |= plain(f"{gdn}.conv1d.weight", 2 * KEYS + VALUES, 1, 4)
            name = f"{gdn}.A_log"
            found[name] = Tensor("F32", (NV,), numbers(name, NV).tobytes())
            found |= plain(f"{gdn}.dt_bias", NV) | plain(f"{gdn}.norm.weight", DV)
            found |= linear(f"{gdn}.out_proj", HIDDEN, VALUES)
        mlp = f"{at}.mlp"
        found |= plain(f"{mlp}.gate.weight", EXPERTS, HIDDEN)
        found |= plain(f"{mlp}.shared_expert_gate.weight", 1, HIDDEN)
        modules = [f"{mlp}.shared_expert"]
        if stacked and not at.startswith("mtp"):
            found |= plain(f"{mlp}.experts.gate_up_proj", EXPERTS, 2 * INTERMEDIATE, HIDDEN)
            found |= plain(f"{mlp}.experts.down_proj", EXPERTS, HIDDEN, INTERMEDIATE)
        else:
            modules += [f"{mlp}.experts.{expert}" for expert in range(EXPERTS)]
        for module in modules:
            found |= linear(f"{module}.gate_proj", INTERMEDIATE, HIDDEN)
            found |= linear(f"{module}.up_proj", INTERMEDIATE, HIDDEN)
            found |= linear(f"{module}.down_proj", HIDDEN, INTERMEDIATE)
        return found

    base = "model.language_model" if kind == "qwen3_5_moe" else "model"
    tensors = plain(f"{base}.embed_tokens.weight", VOCAB, HIDDEN)
    for number in range(4):
        tensors |= layer(f"{base}.layers.{number}", "full" if number == 3 else "linear")
    tensors |= plain(f"{base}.norm.weight", HIDDEN)
    tensors |= plain("lm_head.weight", VOCAB, HIDDEN)
    tensors |= plain("mtp.fc.weight", HIDDEN, 2 * HIDDEN)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors |= plain(f"mtp.{norm}.weight", HIDDEN)
    tensors |= layer("mtp.layers.0", "full")
    if kind == "qwen3_5_moe":
        tensors |= plain("model.visual.pos_embed.weight", 6, 16)
        tensors |= plain("model.visual.patch_embed.proj.weight", 16, 3, 2, 2, 2)
    if quantization is not None:
        quantization["modules_to_not_convert"] = [
            name.removesuffix(".weight")
            for name, held in tensors.items()
            if name.endswith(".weight") and held.dtype == "BF16" and len(held.shape) == 2
        ]
        # Runtimes fuse in_proj_b and in_proj_a: the list holds the fused name beside them.
        quantization["modules_to_not_convert"] += [
            name.replace("in_proj_b.weight", "in_proj_ba")
            for name in tensors
            if "in_proj_b." in name
        ]
    return Model(_config(kind, quantization), tensors, {"tokenizer.json": b"{}\n"})
