"""Checkpoints of a class as others publish them than transformers saves: fused rows of linear attention,
and the layers of a draft model behind those of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Type and shape by name.
Entry = tuple[str, tuple[int, ...]]
Entries = dict[str, Entry]

_FUSED = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
_ENDS = {"embed_tokens": "embed_tokens", "lm_head": "shared_head.head"}
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.")


def fused(entries: Entries) -> Entries:
    """Projections of linear attention that have the same inputs, in one tensor."""
    parts = {part: whole for whole, both in _FUSED.items() for part in both}
    found: Entries = {}
    for name, (dtype, shape) in entries.items():
        module, _, leaf = name.rpartition(".")
        before, _, last = module.rpartition(".")
        whole = f"{before}.{parts[last]}.{leaf}" if last in parts else name
        rows = found[whole][1][0] if whole in found else 0
        found[whole] = dtype, ((rows + shape[0], *shape[1:]) if last in parts else shape)
    return found


def with_draft(entries: Entries, config: Mapping[str, Any], *, ends: bool = True) -> Entries:
    """The same with the draft that published checkpoints of the class have: a layer like the last one
    between projections of its own, behind the layers and with `ends` of its own, or under `mtp` for
    Qwen's."""
    text = config.get("text_config", config)
    layers, hidden = text["num_hidden_layers"], text["hidden_size"]
    is_qwen = str(config["model_type"]).startswith("qwen3")
    last = {
        match[0]: name for name in entries
        if (match := _LAYER.match(name)) and int(match[2]) == layers - 1 and "visual" not in name
    }  # fmt: skip
    (start,) = last
    at = "mtp.layers.0." if is_qwen else f"{start.removesuffix(f'{layers - 1}.')}{layers}."
    own = {
        name.replace(start, at, 1): one for name, one in entries.items() if name.startswith(start)
    }
    plain = "BF16", (hidden,)
    joined = "BF16", (hidden, 2 * hidden)
    if is_qwen:
        own |= {f"mtp.{norm}.weight": plain for norm in (
            "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden",
        )} | {"mtp.fc.weight": joined}  # fmt: skip
    else:
        own |= {f"{at}{norm}.weight": plain for norm in ("enorm", "hnorm", "shared_head.norm")}
        own[f"{at}eh_proj.weight"] = joined
        for name, one in entries.items() if ends else ():
            end = _ENDS.get(name.split(".")[-2])
            own |= {f"{at}{end}.weight": one} if end is not None else {}
    return entries | own


# Forms of a checkpoint: its experts in the form that transformers does not save, fused projections, and
# a draft that has the model's embeddings and head alone.
OTHER_EXPERTS, FUSED_ROWS, WITHOUT_ENDS = "other experts", "fused rows", "without ends"
