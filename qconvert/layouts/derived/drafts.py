"""Draft layers (multi-token prediction), which no class of transformers builds: they repeat modules of
the model's layers, and what joins them to the model has names of its own.

Published names: `model.layers.N.` numbered on from the model's own, with `eh_proj` and its norms
(DeepSeek, GLM, MiMo; vLLM 0.33, deepseek_mtp.py, glm4_moe_mtp.py); `mtp.layers.N.` (Nemotron-H, Qwen;
nemotron_h_mtp.py, qwen3_next_mtp.py); `mtp.N.` (DeepSeek-V4; sglang 0.5.23, deepseek_v4_nextn.py);
`model.mtp_block.N.`, `model.mtp_emb_norm.N` (ERNIE-4.5; ernie_mtp.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from qconvert.core.names import parse, split_parameter
from qconvert.core.roles import Kind

# How names of a block of its own begin.
PREFIXES = ("mtp.", "model.mtp.", "model.mtp_", "language_model.mtp.")
_BLOCK = re.compile(r"(?:model\.|language_model\.)?mtp(?:_block)?(?:\.layers)?\.\{L\}\.(.+)")
_JOINS = {
    "eh_proj": Kind.DRAFT_JOIN, "e_proj": Kind.DRAFT_JOIN, "h_proj": Kind.DRAFT_JOIN,
    "fc": Kind.DRAFT_JOIN, "mtp_linear_proj": Kind.DRAFT_JOIN, "enorm": Kind.NORM,
    "hnorm": Kind.NORM, "norm": Kind.NORM, "final_layernorm": Kind.NORM,
    "shared_head.norm": Kind.NORM, "shared_head.head": Kind.HEAD, "embed_tokens": Kind.EMBEDDING,
    "pre_fc_norm_embedding": Kind.NORM, "pre_fc_norm_hidden": Kind.NORM,
    "mtp_emb_norm": Kind.NORM, "mtp_hidden_norm": Kind.NORM,
}  # fmt: skip


def is_draft(template: str) -> bool:
    """Return whether a name template is of a block of its own."""
    return template.startswith(PREFIXES)


def blocks(kinds: Mapping[str, Kind], names: Iterable[str]) -> dict[str, Kind]:
    """The modules of drafts in a block of their own, by name template; `kinds` are those of the class's
    modules, by theirs."""
    of_layer = {name.partition(".{L}.")[2]: kind for name, kind in kinds.items() if "{L}" in name}
    found: dict[str, Kind] = {}
    for template in {parse(name).template for name in names}:
        if not is_draft(template):
            continue
        for module in (split_parameter(template)[0], template):
            block = _BLOCK.fullmatch(module)
            own = block[1] if block else module.removesuffix(".{L}").rpartition(".")[2]
            kind = of_layer.get(own, _JOINS.get(own)) if block else _JOINS.get(own)
            if kind is not None:
                found[module] = kind
                break
    return found


def numbered_on(kinds: Mapping[str, Kind], names: Iterable[str]) -> dict[str, Kind]:
    """The modules that drafts have beside those of the model's layers, where they are numbered on from
    these: `model.layers.{L}.eh_proj`. Nothing for a checkpoint without such drafts."""
    before = {name.partition("{L}.")[0] for name in kinds if ".layers.{L}." in f".{name}"}
    found: dict[str, Kind] = {}
    for template in {parse(name).template for name in names}:
        module, _ = split_parameter(template)
        start, _, own = module.partition("{L}.")
        if start in before and own in _JOINS and module not in kinds:
            found[module] = _JOINS[own]
    return found if any(kind is Kind.DRAFT_JOIN for kind in found.values()) else {}
