"""Checkpoints of a class as others publish them than transformers saves: experts in stacks or each by
itself, fused rows of linear attention, and the layers of a draft model behind those of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

# Type and shape by name.
Entry = tuple[str, tuple[int, ...]]
Entries = dict[str, Entry]

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
_FUSED = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
_ENDS = {"embed_tokens": "embed_tokens", "lm_head": "shared_head.head"}
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.")


def stacked(entries: Entries) -> Entries:
    """Experts of three matrices each in two tensors of all."""
    found: Entries = {}
    for name, (dtype, shape) in entries.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = dtype, shape
            continue
        base, number, which = match.groups()
        rows, columns = shape
        to = f"{base}.{'down' if which == 'down' else 'gate_up'}_proj"
        found[to] = dtype, (int(number) + 1, rows if which == "down" else 2 * rows, columns)
    return found


def apart(entries: Entries, *, turned: bool) -> Entries:
    """Stacks of experts as matrices; `turned`: rows of those in the stack are columns."""
    found: Entries = {}
    for name, (dtype, shape) in entries.items():
        match = _STACK.fullmatch(name)
        if match is None or len(shape) != 3:
            found[name] = dtype, shape
            continue
        experts, rows, columns = (shape[0], shape[2], shape[1]) if turned else shape
        parts, rows = (("gate", "up"), rows // 2) if match[2] == "gate_up" else (("down",), rows)
        for number in range(experts):
            for part in parts:
                found[f"{match[1]}.{number}.{part}_proj.weight"] = dtype, (rows, columns)
    return found


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


# A draft that has the model's embeddings and head alone.
WITHOUT_ENDS = "without ends"
OTHER: Mapping[str, Callable[[Entries], Entries]] = {
    "stacks": stacked, "matrices": lambda entries: apart(entries, turned=False),
    "matrices of turned": lambda entries: apart(entries, turned=True), "fused rows": fused,
    WITHOUT_ENDS: dict,
}  # fmt: skip
