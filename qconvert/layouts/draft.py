"""Drafts that stand alone: EAGLE3 and DFlash, as sglang reads them and as speculators writes them.

Names: sglang (models/llama_eagle3.py, models/dflash.py), vLLM (models/llama_eagle3.py,
models/qwen3_dflash.py), speculators 0.9.0 (models/eagle3, models/dflash).
"""

from __future__ import annotations

from qconvert.core.family import (
    Config,
    Dims,
    Family,
    Role,
    counted,
    first_int,
    is_tied,
    text_config,
)
from qconvert.core.roles import Kind
from qconvert.layouts._blocks import ATTENTION, MLP, NORMS, QK_NORMS, parts

_AROUND = {
    "embed_tokens": Kind.EMBEDDING, "lm_head": Kind.HEAD, "input_norm": Kind.NORM,
    "d2t": Kind.BUFFER, "t2d": Kind.BUFFER,
}  # fmt: skip
_AT = "layers.{L}"


def _dims(config: Config) -> Dims:
    text = text_config(config)
    layers = counted(text, "num_hidden_layers")
    return Dims(
        hidden_size=first_int(text, "hidden_size"),
        num_layers=layers,
        num_experts=0,
        mtp_layers=0,
        groups={"all": tuple(range(layers))},
        tied=is_tied(config),
    )


FAMILY = Family(
    name="draft",
    model_types=(),
    architectures=(
        "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM",
        "Eagle3Speculator", "Eagle3DraftModel", "DFlashSpeculator", "DFlashDraftModel",
    ),
    aliases={
        "midlayer.": "layers.0.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.",
        "aux_norm_high.": "fc_norm.2.",
    },
    dims=_dims,
    roles=(
        Role("states.fc", "fc", Kind.LINEAR),  # hidden states of several layers to one
        Role("states.norm", "hidden_norm", Kind.NORM, optional=True),
        Role("states.each_norm", "fc_norm.{L}", Kind.NORM, "*", optional=True),
        Role("norm", "norm", Kind.NORM),
        *(Role(name, name, kind, optional=True) for name, kind in _AROUND.items()),
        *parts("", _AT, NORMS, "all"),
        *parts("attn.", f"{_AT}.self_attn", ATTENTION, "all"),
        *parts("attn.", f"{_AT}.self_attn", QK_NORMS, "all", optional=True),
        *parts("mlp.", f"{_AT}.mlp", MLP, "all"),
        # Of the layer that takes embeddings beside hidden states.
        Role("hidden_norm", f"{_AT}.hidden_norm", Kind.NORM, "*", optional=True),
    ),
    class_name="LlamaForCausalLMEagle3",
    class_names={"fc": "model.fc"},  # as vLLM asks whether it is quantized
    not_run="a draft computes from hidden states of its model, which samples do not hold",
)  # fmt: skip
