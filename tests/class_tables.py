"""Tables of classes written by hand, in the form of those that the package ships, for tests of what
reads them: Qwen3-MoE's classes, which both simulators also know by hand."""

from __future__ import annotations

from typing import Any

from qconvert.core.versions import RELEASES

Table = dict[str, Any]
_AT = "model.layers.*"
_DENSE, _SPARSE = 0, 1


def _linear(name: str, kind: str, inputs: str, *outputs: str, **more: Any) -> Table:
    asked = {"asked": f"{_AT}.{name}", **more}
    return {"name": f"{_AT}.{name}", "kind": kind, "inputs": inputs, "outputs": [*outputs], **asked}


def _norm(name: str, size: str) -> Table:
    return {"name": f"{name}.weight", "kind": "parameter", "shape": [size], "dtype": "model"}


def qwen3_moe(runtime: str) -> Table:
    """The table of Qwen3MoeForCausalLM."""
    vllm = runtime == "vllm"
    experts = f"{_AT}.mlp.experts" + (".routed_experts" if vllm else "")
    embeds: Table = {
        "name": "model.embed_tokens", "kind": "embedding", "rows": "vocab_size", "inputs": "hidden_size",
        "stage": "all" if vllm else "first",
    }  # fmt: skip
    modules = [
        embeds,
        {"name": f"{_AT}.self_attn.qkv_proj", "asked": f"{_AT}.self_attn.qkv_proj", "kind": "qkv",
         "inputs": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
         "head_size": "head_dim", "bias": {"attention_bias": True}},
        _linear("self_attn.o_proj", "row", "num_attention_heads * head_dim", "hidden_size"),
        *([{"name": f"{_AT}.self_attn.attn", "kind": "attention", "asked": "x"}] if vllm else []),
        _norm(f"{_AT}.self_attn.q_norm", "head_dim"), _norm(f"{_AT}.self_attn.k_norm", "head_dim"),
        _linear("mlp.gate_up_proj", "merged", "hidden_size", *["intermediate_size"] * 2,
                variant=[_DENSE]),
        _linear("mlp.down_proj", "row", "intermediate_size", "hidden_size", variant=[_DENSE]),
        _linear("mlp.gate", "replicated", "hidden_size", "num_experts", variant=[_SPARSE],
                **({} if vllm else {"asked": None})),
        {"name": experts, "asked": f"{_AT}.mlp.experts", "kind": "experts", "routed": "num_experts",
         "hidden": "hidden_size", "inner": "moe_intermediate_size", "gated": True, "variant": [_SPARSE]},
        _norm(f"{_AT}.input_layernorm", "hidden_size"),
        _norm(f"{_AT}.post_attention_layernorm", "hidden_size"),
        {**_norm("model.norm", "hidden_size"), "stage": "all" if vllm else "last"},
        {"name": "lm_head", "kind": "head", "asked": "lm_head", "rows": "vocab_size",
         "inputs": "hidden_size", "stage": "all"},
    ]  # fmt: skip
    names = [
        *({"from": f"{_AT}.self_attn.{one}_proj", "to": f"{_AT}.self_attn.qkv_proj", "shard": one}
          for one in "qkv"),
        *({"from": f"{_AT}.mlp.{one}_proj", "to": f"{_AT}.mlp.gate_up_proj", "shard": number}
          for number, one in enumerate(("gate", "up"))),
        *({"from": f"{_AT}.mlp.experts.*.{one}_proj", "to": experts, "shard": shard}
          for one, shard in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
        *({"from": f"{_AT}.{one}", "to": f"{_AT}.{one}"} for one in (
            "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.down_proj", "mlp.gate",
            "input_layernorm", "post_attention_layernorm",
        )),
        *({"from": one, "to": one} for one in ("model.embed_tokens", "model.norm", "lm_head")),
    ]  # fmt: skip
    unknown = {"": "error" if vllm else "warn", "bias": "silent"}
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    if not vllm:
        packed["gate_up_proj"] = ["gate_proj", "up_proj"]
    return {
        "runtime": runtime, "version": RELEASES[runtime].version, "architecture": "Qwen3MoeForCausalLM",
        "model_type": "qwen3_moe", "layers": {"model.layers": "num_hidden_layers"},
        "packed": packed, "modules": modules, "names": names,
        "variants": {"model.layers": [
            {"names": ["mlp.gate_proj"]}, {"names": ["mlp.experts.*.gate_proj"]},
        ]},
        "unknown": {
            **dict.fromkeys(("fused", "linear", "experts", "parameter", "next_layer"), unknown),
            "rotary": {"": "silent"}, "draft": {"": "silent"},
        },
        "defaults": {"attention_bias": False}, "agrees": {"unquantized": [1, 2]},
    }  # fmt: skip
