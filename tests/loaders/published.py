"""Small checkpoints of every family with its published names, of sizes that runtimes take: heads and
experts' rows divide by four ranks of tensor parallelism in blocks of 128 columns.

Names and configs: transformers 5.17's classes, and the configs that the models' authors publish.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import numpy as np
from checkpoints import Model, Tensor
from gdn_models import Array, bf16
from gdn_models import numbers as drawn

HIDDEN, INNER, VOCAB = 256, 512, 512
HEADS, HEAD = 4, 128
GDN_KEYS, GDN_VALUES, GDN_HEAD = 4, 8, 128
BLOCK = 128


@cache
def _pool() -> Array:
    return drawn("pool", 1 << 21)


def numbers(name: str, *shape: int) -> Array:
    """As gdn_models has them, heavy-tailed and with outlier columns, of one drawing for all tensors: a
    tensor is a part of it that begins where its name says, which takes a tenth of the time."""
    count = prod(shape)
    first = zlib.crc32(name.encode()) % (_pool().size - count)
    values = _pool()[first : first + count].reshape(shape).copy()
    if len(shape) > 1:
        values[..., ::8] *= 8
    return values


@dataclass
class Parts:
    """Tensors by name; linears in block FP8, if `fp8`, with scales that are `exponents` as DeepSeek-V4
    names them; routed experts of `inner` rows."""

    fp8: bool
    inner: int = 512
    exponents: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)  # modules of matrices that stay bf16

    def plain(self, module: str, *shape: int) -> None:
        self.named(f"{module}.weight", *shape)
        if len(shape) == 2:
            self.kept.append(module)

    def named(self, name: str, *shape: int) -> None:
        self.tensors[name] = bf16(numbers(name, *shape))

    def float32(self, name: str, *shape: int) -> None:
        self.tensors[name] = Tensor("F32", shape, numbers(name, *shape).tobytes())

    def linear(self, module: str, rows: int, columns: int) -> None:
        if not self.fp8:
            self.plain(module, rows, columns)
            return
        name = f"{module}.weight"
        random = np.random.default_rng(zlib.crc32(name.encode()))
        codes = random.integers(0, 0x7F, (rows, columns), np.uint8)  # no NaN among them
        codes |= random.integers(0, 2, (rows, columns), np.uint8) << 7
        grid = -(-rows // BLOCK), -(-columns // BLOCK)
        scales = 0.002 * np.exp(random.standard_normal(grid))
        self.tensors[name] = Tensor("F8_E4M3", (rows, columns), codes.tobytes())
        if self.exponents:
            powers = random.integers(116, 120, grid, np.uint8)
            self.tensors[f"{module}.scale"] = Tensor("F8_E8M0", grid, powers.tobytes())
            return
        self.tensors[f"{name}_scale_inv"] = Tensor("F32", grid, scales.astype("<f4").tobytes())

    def mxfp4(self, module: str, rows: int, columns: int) -> None:
        """Experts of DeepSeek-V4, of which there are none in BF16."""
        if not self.fp8:
            self.plain(module, rows, columns)
            return
        random = np.random.default_rng(zlib.crc32(module.encode()))
        codes = random.integers(0, 256, (rows, columns // 2), np.uint8)
        powers = random.integers(116, 120, (rows, columns // 32), np.uint8)
        self.tensors[f"{module}.weight"] = Tensor("I8", codes.shape, codes.tobytes())
        self.tensors[f"{module}.scale"] = Tensor("F8_E8M0", powers.shape, powers.tobytes())

    def mlp(self, at: str, inner: int = INNER) -> None:
        self.linear(f"{at}.gate_proj", inner, HIDDEN)
        self.linear(f"{at}.up_proj", inner, HIDDEN)
        self.linear(f"{at}.down_proj", HIDDEN, inner)

    def norms(self, at: str) -> None:
        self.plain(f"{at}.input_layernorm", HIDDEN)
        self.plain(f"{at}.post_attention_layernorm", HIDDEN)

    def attention(self, at: str, *, gated: bool = False, bias: bool = False) -> None:
        sizes = {"q": HEADS * HEAD * (2 if gated else 1), "k": HEADS * HEAD, "v": HEADS * HEAD}
        for part, rows in sizes.items():
            self.linear(f"{at}.{part}_proj", rows, HIDDEN)
            if bias:
                self.named(f"{at}.{part}_proj.bias", rows)
        self.linear(f"{at}.o_proj", HIDDEN, HEADS * HEAD)
        self.plain(f"{at}.q_norm", HEAD)
        self.plain(f"{at}.k_norm", HEAD)

    def linear_attention(self, at: str, *, fused: bool) -> None:
        keys, values = GDN_KEYS * GDN_HEAD, GDN_VALUES * GDN_HEAD
        if fused:
            self.linear(f"{at}.in_proj_qkvz", 2 * keys + 2 * values, HIDDEN)
            self.plain(f"{at}.in_proj_ba", 2 * GDN_VALUES, HIDDEN)
        else:
            self.linear(f"{at}.in_proj_qkv", 2 * keys + values, HIDDEN)
            self.linear(f"{at}.in_proj_z", values, HIDDEN)
            self.plain(f"{at}.in_proj_b", GDN_VALUES, HIDDEN)
            self.plain(f"{at}.in_proj_a", GDN_VALUES, HIDDEN)
        self.plain(f"{at}.conv1d", 2 * keys + values, 1, 4)
        self.plain(f"{at}.norm", GDN_HEAD)
        self.linear(f"{at}.out_proj", HIDDEN, values)
        self.named(f"{at}.A_log", GDN_VALUES)
        self.named(f"{at}.dt_bias", GDN_VALUES)

    def latent_attention(self, at: str) -> None:
        self.linear(f"{at}.q_a_proj", 128, HIDDEN)
        self.plain(f"{at}.q_a_layernorm", 128)
        self.linear(f"{at}.q_b_proj", HEADS * 192, 128)
        self.linear(f"{at}.kv_a_proj_with_mqa", 576, HIDDEN)
        self.plain(f"{at}.kv_a_layernorm", 512)
        self.linear(f"{at}.kv_b_proj", HEADS * 256, 512)
        self.linear(f"{at}.o_proj", HIDDEN, HEADS * 128)

    def experts(
        self, at: str, count: int, *, shared: str = "", gate: bool = False, bias: bool = False
    ) -> None:
        self.plain(f"{at}.gate", count, HIDDEN)
        if bias:
            self.float32(f"{at}.gate.e_score_correction_bias", count)
        if gate:
            self.plain(f"{at}.shared_expert_gate", 1, HIDDEN)
        if shared:
            # DeepSeek and GLM have one size for both.
            self.mlp(f"{at}.{shared}", self.inner if shared == "shared_experts" else INNER)
        for expert in range(count):
            self.mlp(f"{at}.experts.{expert}", self.inner)

    def ends(self, base: str) -> None:
        self.plain(f"{base}.embed_tokens", VOCAB, HIDDEN)
        self.plain(f"{base}.norm", HIDDEN)
        self.plain("lm_head", VOCAB, HIDDEN)

    def next_token_layer(self, at: str) -> None:
        """What DeepSeek's and GLM's draft layer has beside a decoder layer."""
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            self.plain(f"{at}.{norm}", HIDDEN)
        self.plain(f"{at}.eh_proj", HIDDEN, 2 * HIDDEN)
        self.plain(f"{at}.embed_tokens", VOCAB, HIDDEN)
        self.plain(f"{at}.shared_head.head", VOCAB, HIDDEN)


Config = dict[str, Any]
_COMMON: Config = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
         "mrope_section": [6, 5, 5], "mrope_interleaved": True}  # fmt: skip


def _qwen_gdn(parts: Parts, name: str, experts: int) -> Config:
    """qwen3_next, qwen3_5_moe(_text), qwen3_5(_text): three layers of linear attention, one of full
    attention, and a draft layer."""
    vision, dense = name in ("qwen3_5_moe", "qwen3_5"), name in ("qwen3_5", "qwen3_5_text")
    base = "model.language_model" if vision else "model"
    parts.ends(base)

    def block(at: str, *, full: bool) -> None:
        parts.norms(at)
        if full:
            parts.attention(f"{at}.self_attn", gated=True)
        else:
            parts.linear_attention(f"{at}.linear_attn", fused=name == "qwen3_next")
        if dense:
            parts.mlp(f"{at}.mlp")
        else:
            parts.experts(f"{at}.mlp", experts, shared="shared_expert", gate=True)

    for layer in range(4):
        block(f"{base}.layers.{layer}", full=layer == 3)
    parts.plain("mtp.fc", HIDDEN, 2 * HIDDEN)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        parts.plain(f"mtp.{norm}", HIDDEN)
    block("mtp.layers.0", full=True)
    text: Config = {
        **_COMMON, "num_hidden_layers": 4, "head_dim": HEAD, "intermediate_size": INNER,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": GDN_KEYS, "linear_num_value_heads": GDN_VALUES,
        "linear_key_head_dim": GDN_HEAD, "linear_value_head_dim": GDN_HEAD,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }  # fmt: skip
    if not dense:
        text |= {"moe_intermediate_size": INNER, "shared_expert_intermediate_size": INNER,
                 "num_experts": experts, "num_experts_per_tok": 2}  # fmt: skip
    if name == "qwen3_next":
        return {**text, "model_type": name, "architectures": ["Qwen3NextForCausalLM"],
                "num_nextn_predict_layers": 1, "rope_theta": 1e7,
                "partial_rotary_factor": 0.25}  # fmt: skip
    text |= {"mtp_num_hidden_layers": 1, "rope_parameters": _ROPE,
             "model_type": "qwen3_5_text" if dense else "qwen3_5_moe_text"}  # fmt: skip
    if not vision:
        which = "Qwen3_5ForCausalLM" if dense else "Qwen3_5MoeForCausalLM"
        return {**text, "architectures": [which]}
    _tower(parts)
    which = "Qwen3_5" if dense else "Qwen3_5Moe"
    tower = {
        "model_type": name, "depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64,
        "out_hidden_size": HIDDEN, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }  # fmt: skip
    return {"architectures": [f"{which}ForConditionalGeneration"], "model_type": name,
            "text_config": text, "vision_config": tower, "torch_dtype": "bfloat16",
            "tie_word_embeddings": False, "image_token_id": 500, "video_token_id": 501,
            "vision_start_token_id": 502, "vision_end_token_id": 503}  # fmt: skip


def _tower(parts: Parts) -> None:
    at, size = "model.visual", 64
    parts.plain(f"{at}.patch_embed.proj", size, 3, 2, 4, 4)
    parts.named(f"{at}.patch_embed.proj.bias", size)
    parts.plain(f"{at}.pos_embed", 16, size)
    shapes = {
        "blocks.0.attn.qkv": (3 * size, size), "blocks.0.attn.proj": (size, size),
        "blocks.0.mlp.linear_fc1": (64, size), "blocks.0.mlp.linear_fc2": (size, 64),
        "blocks.0.norm1": (size,), "blocks.0.norm2": (size,), "merger.norm": (size,),
        "merger.linear_fc1": (4 * size, 4 * size), "merger.linear_fc2": (HIDDEN, 4 * size),
    }  # fmt: skip
    for module, shape in shapes.items():
        parts.plain(f"{at}.{module}", *shape)
        parts.named(f"{at}.{module}.bias", shape[0])


def _qwen3_moe(parts: Parts, name: str, experts: int) -> Config:
    parts.ends("model")
    for layer in range(2):
        at = f"model.layers.{layer}"
        parts.norms(at)
        parts.attention(f"{at}.self_attn")
        parts.experts(f"{at}.mlp", experts)
    return {**_COMMON, "model_type": name, "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 2, "head_dim": HEAD, "moe_intermediate_size": INNER,
            "intermediate_size": INNER, "num_experts": experts, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "rope_theta": 1e6}  # fmt: skip


def _qwen3_vl_moe(parts: Parts, name: str, experts: int) -> Config:
    """Qwen3-MoE's language model behind a tower with two deep mergers."""
    config = _qwen3_moe(parts, name, experts)
    for old in list(parts.tensors):
        if old.startswith("model."):
            inner = f"model.language_model.{old.removeprefix('model.')}"
            parts.tensors[inner] = parts.tensors.pop(old)
    parts.kept = [
        f"model.language_model.{module.removeprefix('model.')}"
        if module.startswith("model.")
        else module
        for module in parts.kept
    ]
    _tower(parts)
    deep = [0]
    for number, _ in enumerate(deep):
        at, size = f"model.visual.deepstack_merger_list.{number}", 64
        for module, shape in {
            "norm": (4 * size,), "linear_fc1": (4 * size, 4 * size), "linear_fc2": (HIDDEN, 4 * size),
        }.items():  # fmt: skip
            parts.plain(f"{at}.{module}", *shape)
            parts.named(f"{at}.{module}.bias", shape[0])
    text = {k: v for k, v in config.items() if k not in ("architectures", "rope_theta")}
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text |= {"model_type": "qwen3_vl_moe_text", "rope_theta": 5e6, "rope_scaling": rope}
    tower = {
        "model_type": name, "depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64,
        "out_hidden_size": HIDDEN, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, "num_position_embeddings": 16,
        "deepstack_visual_indexes": deep,
    }  # fmt: skip
    return {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": name,
            "text_config": text, "vision_config": tower, "torch_dtype": "bfloat16",
            "tie_word_embeddings": False, "image_token_id": 500, "video_token_id": 501,
            "vision_start_token_id": 502, "vision_end_token_id": 503}  # fmt: skip


def _with_draft_layer(parts: Parts, attention: Callable[[str], None], experts: int) -> None:
    """Layer 0 is dense, 1 and 2 have experts, 3 is the draft's."""
    parts.ends("model")
    for layer in range(4):
        at = f"model.layers.{layer}"
        parts.norms(at)
        attention(f"{at}.self_attn")
        if layer == 0:
            parts.mlp(f"{at}.mlp", 2 * INNER)
        else:
            parts.experts(f"{at}.mlp", experts, shared="shared_experts", bias=True)
    parts.next_token_layer("model.layers.3")


def _draft_layer_config(experts: int) -> Config:
    return {
        **_COMMON, "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
        "intermediate_size": 2 * INNER, "moe_intermediate_size": INNER,
        "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "norm_topk_prob": True,
    }  # fmt: skip


def _deepseek_v3(parts: Parts, name: str, experts: int) -> Config:
    _with_draft_layer(parts, parts.latent_attention, experts)
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
               "beta_slow": 1, "original_max_position_embeddings": 4096}  # fmt: skip
    return {**_draft_layer_config(experts), "model_type": name,
            "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 128, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "moe_layer_freq": 1, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "rope_theta": 10000.0,
            "rope_scaling": scaling, "attention_bias": False}  # fmt: skip


def _glm4_moe(parts: Parts, name: str, experts: int) -> Config:
    def attention(at: str) -> None:
        parts.attention(at, bias=True)

    _with_draft_layer(parts, attention, experts)
    return {**_draft_layer_config(experts), "model_type": name,
            "architectures": ["Glm4MoeForCausalLM"], "head_dim": HEAD, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 1.0, "use_qk_norm": True,
            "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1e6}  # fmt: skip


def _deepseek_v4(parts: Parts, name: str, experts: int) -> Config:
    """Two layers without compressed attention and with hashed routers, one of each kind that compresses,
    and a draft; experts in MXFP4 where linears are FP8."""
    parts.exponents = True
    heads, head, low, groups, rank, hyper = 8, 512, 128, 8, 128, 4
    ratios, hashed = (0, 0, 4, 128), 2
    mixed = (2 + hyper) * hyper

    def scored(at: str, block: str, rows: int, inputs: int) -> None:
        for end, shape in {"fn": (rows, inputs), "base": (rows,), "scale": (3,)}.items():
            parts.float32(f"{at}hc_{block}_{end}", *shape)

    def compressor(at: str, ratio: int, size: int) -> None:
        rows = size * (2 if ratio == 4 else 1)
        parts.float32(f"{at}.ape", ratio, rows)
        parts.plain(f"{at}.norm", size)
        parts.plain(f"{at}.wgate", rows, HIDDEN)
        parts.plain(f"{at}.wkv", rows, HIDDEN)

    def block(at: str, ratio: int) -> None:
        for end in ("attn", "ffn"):
            parts.plain(f"{at}.{end}_norm", HIDDEN)
            scored(f"{at}.", end, mixed, hyper * HIDDEN)
        attention = f"{at}.attn"
        parts.float32(f"{attention}.attn_sink", heads)
        parts.plain(f"{attention}.q_norm", low)
        parts.plain(f"{attention}.kv_norm", head)
        parts.linear(f"{attention}.wq_a", low, HIDDEN)
        parts.linear(f"{attention}.wq_b", heads * head, low)
        parts.linear(f"{attention}.wkv", head, HIDDEN)
        parts.linear(f"{attention}.wo_a", groups * rank, heads * head // groups)
        parts.linear(f"{attention}.wo_b", HIDDEN, groups * rank)
        if ratio:
            compressor(f"{attention}.compressor", ratio, head)
        if ratio == 4:
            indexer = f"{attention}.indexer"
            parts.linear(f"{indexer}.wq_b", 2 * 128, low)
            parts.plain(f"{indexer}.weights_proj", 2, HIDDEN)
            compressor(f"{indexer}.compressor", ratio, 128)
        sizes = {
            "w1": (parts.inner, HIDDEN),
            "w2": (HIDDEN, parts.inner),
            "w3": (parts.inner, HIDDEN),
        }
        parts.plain(f"{at}.ffn.gate", experts, HIDDEN)
        for end, (rows, columns) in sizes.items():
            parts.linear(f"{at}.ffn.shared_experts.{end}", rows, columns)
            for expert in range(experts):
                parts.mxfp4(f"{at}.ffn.experts.{expert}.{end}", rows, columns)

    parts.plain("embed", VOCAB, HIDDEN)
    parts.plain("head", VOCAB, HIDDEN)
    parts.plain("norm", HIDDEN)
    for at in ("", "mtp.0."):
        parts.float32(f"{at}hc_head_fn", hyper, hyper * HIDDEN)
        parts.float32(f"{at}hc_head_base", hyper)
        parts.float32(f"{at}hc_head_scale", 1)
    for layer, ratio in enumerate(ratios):
        block(f"layers.{layer}", ratio)
        if layer < hashed:
            chosen = np.arange(2 * VOCAB, dtype="<i8") % experts
            gate = f"layers.{layer}.ffn.gate"
            parts.tensors[f"{gate}.tid2eid"] = Tensor("I64", (VOCAB, 2), chosen.tobytes())
        else:
            parts.float32(f"layers.{layer}.ffn.gate.bias", experts)
    block("mtp.0", 0)
    parts.float32("mtp.0.ffn.gate.bias", experts)
    for norm in ("enorm", "hnorm", "norm"):
        parts.plain(f"mtp.0.{norm}", HIDDEN)
    for linear in ("e_proj", "h_proj"):
        parts.linear(f"mtp.0.{linear}", HIDDEN, HIDDEN)
    scaling = {"type": "yarn", "rope_type": "yarn", "factor": 16, "rope_theta": 10000, "beta_fast": 32,
               "beta_slow": 1, "original_max_position_embeddings": 4096}  # fmt: skip
    return {
        **_COMMON, "model_type": name, "architectures": ["DeepseekV4ForCausalLM"],
        "num_attention_heads": heads, "num_key_value_heads": 1,
        "num_hidden_layers": len(ratios), "num_nextn_predict_layers": 1,
        "compress_ratios": [*ratios, 0], "num_hash_layers": hashed, "head_dim": head,
        "qk_rope_head_dim": 64, "q_lora_rank": low, "o_lora_rank": rank, "o_groups": groups,
        "index_head_dim": 128, "index_n_heads": 2, "index_topk": 16, "sliding_window": 128,
        "hc_mult": hyper, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "expert_dtype": "fp4",
        "moe_intermediate_size": parts.inner, "n_routed_experts": experts, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "topk_method": "noaux_tc",
        "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "rope_scaling": scaling,
        "attention_bias": False,
    }  # fmt: skip


_FAMILIES: dict[str, Callable[[Parts, str, int], Config]] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _qwen_gdn
    ),
    "qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek_v3, "glm4_moe": _glm4_moe,
    "qwen3_vl_moe": _qwen3_vl_moe, "deepseek_v4": _deepseek_v4,
}  # fmt: skip
# Of which the tests try every form: Qwen3-VL is Qwen3-MoE behind a tower, and DeepSeek-V4 has one form.
FAMILIES = tuple(name for name in _FAMILIES if name not in ("qwen3_vl_moe", "deepseek_v4"))
# What a name of a family adds for the types that it is published in.
TYPES = {**dict.fromkeys(FAMILIES, (".bf16", ".fp8")), "deepseek_v4": (".fp8",)}
# Experts, and rows of one, of which eight ranks have whole tiles of its kernels.
_SIZES = {"deepseek_v4": (8, 1024)}


def published(
    family: str,
    *,
    fp8: bool = False,
    stacked: bool = False,
    experts: int = 0,
    inner: int = 0,
) -> Model:
    """A checkpoint of a family. `fp8`: linears in blocks of 128 x 128, as its authors publish them.
    `stacked`: experts in 3-D tensors, as the bf16 releases of Qwen3.5 have them. `inner`: rows of
    routed experts' gates; Qwen's shared experts keep theirs."""
    few, rows = _SIZES.get(family, (4, INNER))
    experts, inner = experts or few, inner or rows
    parts = Parts(fp8, inner)
    config = _FAMILIES[family](parts, family, experts)
    for level in (config, config.get("text_config", {})):
        if "moe_intermediate_size" in level:
            level["moe_intermediate_size"] = inner
    if stacked:
        _stack(parts.tensors, experts, turned=family == "qwen3_vl_moe")
    if fp8:
        block: Config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                         "weight_block_size": [BLOCK, BLOCK]}  # fmt: skip
        if family == "deepseek_v4":
            block["scale_fmt"] = "ue8m0"
        elif family != "deepseek_v3":
            # sglang asks for its own fused names too.
            fused = [f"{module}a" for module in parts.kept if module.endswith("in_proj_b")]
            block["modules_to_not_convert"] = [*parts.kept, *fused]
        config["quantization_config"] = block
    return Model(config, parts.tensors, {"tokenizer_config.json": b'{"model_max_length": 4096}\n'})


def _stack(tensors: dict[str, Tensor], experts: int, *, turned: bool) -> None:
    """Matrices of all experts in one tensor; `turned`: each transposed, as Qwen3-VL's are."""
    for first in [n for n in tensors if n.endswith(".experts.0.gate_proj.weight")]:
        at = first.removesuffix(".0.gate_proj.weight")
        both, down = list[Any](), list[Any]()
        for expert in range(experts):
            gate, up, last = (
                np.frombuffer(one.data, np.uint16).reshape(one.shape)
                for one in (
                    tensors.pop(f"{at}.{expert}.{part}_proj.weight")
                    for part in ("gate", "up", "down")
                )
            )
            both.append(np.concatenate([gate, up]))
            down.append(last)
        for name, matrices in (("gate_up_proj", both), ("down_proj", down)):
            whole = np.stack([one.T if turned else one for one in matrices])
            tensors[f"{at}.{name}"] = Tensor("BF16", whole.shape, whole.tobytes())
