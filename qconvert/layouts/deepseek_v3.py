"""DeepSeek-V3, V3.1, R1 (multi-head latent attention, 256 experts) and DeepSeek-V3.2.

Names: `DeepseekV3ForCausalLM` and `DeepseekV32ForCausalLM` in transformers
(models/deepseek_v3/, models/deepseek_v32/), and for the draft layer, which transformers ignores,
`model.safetensors.index.json` of deepseek-ai/DeepSeek-V3 and deepseek-ai/DeepSeek-V3.2 with
README_WEIGHTS.md of github.com/deepseek-ai/DeepSeek-V3. The draft layer is numbered on from the
model's own: layer 61 of 61.
"""

from __future__ import annotations

from qconvert.core.family import Family, Role
from qconvert.core.roles import Kind
from qconvert.layouts._blocks import (
    deepseek_dims,
    deepseek_draft,
    deepseek_layer,
    latent_attention,
    outer,
    parts,
)

_AT = "model.layers.{L}"


def _indexer(prefix: str, every: str) -> tuple[Role, ...]:
    """The modules with which DeepSeek-V3.2 chooses the tokens it attends to."""
    kinds = {
        "wq_b": Kind.INDEXER, "wk": Kind.INDEXER, "k_norm": Kind.NORM,
        "weights_proj": Kind.INDEXER_WEIGHTS,
    }  # fmt: skip
    return parts(f"{prefix}indexer.", f"{_AT}.self_attn.indexer", kinds, every, optional=True)


FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "deepseek_v32"),
    dims=deepseek_dims,
    roles=(
        *outer(),
        *latent_attention("", _AT, "all", "low_rank_q", "full_rank_q"),
        *_indexer("", "all"),
        *deepseek_layer("", _AT, "all", "dense", "moe", "shared_experts"),
        *latent_attention("mtp.", _AT, "mtp", "mtp", "mtp", optional=True),
        *_indexer("mtp.", "mtp"),
        *deepseek_layer("mtp.", _AT, "mtp", "mtp_dense", "mtp_moe", "mtp_moe", optional=True),
        *deepseek_draft(_AT),
    ),
    tied=("lm_head", "embed_tokens"),
)
