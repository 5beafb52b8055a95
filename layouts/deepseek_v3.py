"""DeepSeek-V3, V3.1, R1 (multi-head latent attention, 256 experts) and DeepSeek-V3.2.

Names: `DeepseekV3ForCausalLM` and `DeepseekV32ForCausalLM` in transformers 5.17
(models/deepseek_v3/, models/deepseek_v32/), and for the draft layer, which transformers ignores,
`model.safetensors.index.json` of deepseek-ai/DeepSeek-V3 and deepseek-ai/DeepSeek-V3.2 with
README_WEIGHTS.md of github.com/deepseek-ai/DeepSeek-V3. The draft layer is numbered on from the
model's own: layer 61 of 61.
"""

from __future__ import annotations

from qconvert.family import Config, Dims, Family, Role, first_int
from qconvert.layouts._blocks import experts, parts

_MLP = "gate_proj up_proj down_proj"
_ATTENTION = "kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj"
_LOW_RANK_Q = "q_a_proj q_a_layernorm q_b_proj"
_DRAFT = "embed_tokens enorm hnorm eh_proj shared_head.norm shared_head.head"
_AT = "model.layers.{L}"


def dims(config: Config) -> Dims:
    """Layer groups of a DeepSeek config. `moe` follows `first_k_dense_replace` and
    `moe_layer_freq`, or transformers 5's `mlp_layer_types`; the draft layer follows the same rule."""
    num_layers = first_int(config, "num_hidden_layers")
    mtp_layers = first_int(config, "num_nextn_predict_layers", "num_mtp_layers")
    num_experts = first_int(config, "n_routed_experts", "num_local_experts", "num_experts")
    first, step = first_int(config, "first_k_dense_replace"), first_int(config, "moe_layer_freq")
    types = list(config.get("mlp_layer_types") or ())

    def is_moe(layer: int) -> bool:
        if layer < len(types):
            return bool(types[layer] == "sparse")
        return num_experts > 0 and layer >= first and layer % (step or 1) == 0

    layers = tuple(range(num_layers))
    mtp = tuple(range(num_layers, num_layers + mtp_layers))
    moe = tuple(filter(is_moe, layers))
    return Dims(
        hidden_size=first_int(config, "hidden_size"),
        num_layers=num_layers,
        num_experts=num_experts,
        mtp_layers=mtp_layers,
        groups={
            "all": layers,
            "low_rank_q": layers if config.get("q_lora_rank") else (),
            "full_rank_q": () if config.get("q_lora_rank") else layers,
            "moe": moe,
            "dense": tuple(layer for layer in layers if not is_moe(layer)),
            "shared_experts": moe if config.get("n_shared_experts") else (),
            "mtp": mtp,
            "mtp_moe": tuple(filter(is_moe, mtp)),
            "mtp_dense": tuple(layer for layer in mtp if not is_moe(layer)),
        },
        tied=bool(config.get("tie_word_embeddings", False)),
        moe_intermediate_size=first_int(config, "moe_intermediate_size"),
    )


def _layer(
    prefix: str, every: str, low_q: str, full_q: str, dense: str, moe: str, shared: str
) -> tuple[Role, ...]:
    """A decoder layer. The draft's is the same under other groups, and optional: transformers drops
    it on saving and leaves its count in the config."""
    optional = bool(prefix)
    attn, mlp = f"{_AT}.self_attn", f"{_AT}.mlp"
    norms = "input_layernorm post_attention_layernorm"
    return (
        *parts(prefix, _AT, norms, every, optional=optional),
        *parts(f"{prefix}attn.", attn, _ATTENTION, every, optional=optional),
        *parts(f"{prefix}attn.", attn, _LOW_RANK_Q, low_q, optional=optional),
        *parts(f"{prefix}attn.", attn, "q_proj", full_q, optional=optional),
        *parts(
            f"{prefix}indexer.",
            f"{attn}.indexer",
            "wq_b wk k_norm weights_proj",
            every,
            optional=True,
        ),
        *parts(f"{prefix}mlp.", mlp, _MLP, dense, optional=optional),
        Role(f"{prefix}router", f"{mlp}.gate", moe, optional),
        Role(
            f"{prefix}router.e_score_correction_bias",
            f"{mlp}.gate.e_score_correction_bias",
            moe,
            optional,
        ),
        *parts(
            f"{prefix}shared_experts.", f"{mlp}.shared_experts", _MLP, shared, optional=optional
        ),
        *experts(prefix, _AT, moe),
    )


FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "deepseek_v32"),
    dims=dims,
    roles=(
        Role("embed_tokens", "model.embed_tokens"),
        Role("norm", "model.norm"),
        Role("lm_head", "lm_head"),
        *_layer("", "all", "low_rank_q", "full_rank_q", "dense", "moe", "shared_experts"),
        *_layer("mtp.", "mtp", "mtp", "mtp", "mtp_dense", "mtp_moe", "mtp_moe"),
        *parts("mtp.", _AT, _DRAFT, "mtp", optional=True),
    ),
    shared_scale=(("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")),
    tied=("lm_head", "embed_tokens"),
)
