"""A model that no class of transformers answers to, and the family file that a user writes for it."""

from __future__ import annotations

from checkpoints import Model, tensor

# The same layout under other names, which no class has.
FAMILY_FILE = """
from qconvert.core.family import Family, Role
from qconvert.core.roles import Kind
from qconvert.layouts._blocks import NORMS, ATTENTION, outer, parts, qwen_dims

AT = "model.layers.{L}"
EXPERTS = {"g": Kind.EXPERT_GATE, "u": Kind.EXPERT_UP, "d": Kind.EXPERT_DOWN}
FAMILY = Family(
    name="acme",
    model_types=("acme_moe",),
    dims=qwen_dims,
    roles=(
        *outer(),
        *parts("", AT, NORMS, "all"),
        *parts("attn.", f"{AT}.self_attn", ATTENTION, "all"),
        Role("router", f"{AT}.moe.chooser", Kind.ROUTER, "all"),
        Role("experts.gate_proj", f"{AT}.moe.experts.{{E}}.g", Kind.EXPERT_GATE, "moe"),
        Role("experts.up_proj", f"{AT}.moe.experts.{{E}}.u", Kind.EXPERT_UP, "moe"),
        Role("experts.down_proj", f"{AT}.moe.experts.{{E}}.d", Kind.EXPERT_DOWN, "moe"),
    ),
    tied=("lm_head", "embed_tokens"),
)
"""


def remote(
    block: str = "block_sparse_moe",
    gate: str = "gate",
    words: str = "w1 w2 w3",
    *,
    hidden: int = 64,
    width: int = 96,
) -> Model:
    """A MoE of two layers and experts that no class of transformers answers to."""
    tensors = {
        name: tensor("BF16", *shape)
        for name, shape in (
            ("model.embed_tokens.weight", (64, hidden)),
            ("model.norm.weight", (hidden,)),
            ("lm_head.weight", (64, hidden)),
        )
    }
    first, down, third = words.split()
    for layer in range(2):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = tensor("BF16", hidden)
        for one in "qkvo":
            tensors[f"{at}.self_attn.{one}_proj.weight"] = tensor("BF16", hidden, hidden)
        tensors[f"{at}.{block}.{gate}.weight"] = tensor("BF16", 2, hidden)
        for expert in range(2):
            inside = f"{at}.{block}.experts.{expert}"
            for word in (first, third):
                tensors[f"{inside}.{word}.weight"] = tensor("BF16", width, hidden)
            tensors[f"{inside}.{down}.weight"] = tensor("BF16", hidden, width)
    config = {
        "model_type": "acme_moe", "architectures": ["AcmeForCausalLM"], "hidden_size": hidden,
        "auto_map": {"AutoModelForCausalLM": "modeling_acme.AcmeForCausalLM"},
        "num_hidden_layers": 2, "num_local_experts": 2, "intermediate_size": width,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    return Model(config, tensors)
