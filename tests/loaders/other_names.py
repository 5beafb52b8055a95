"""Checkpoints of a class as others publish them than transformers saves: fused rows of linear attention,
the layers of a draft model behind those of the model, and drafts that stand alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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


def eagle3(entries: Entries, config: Mapping[str, Any]) -> Entries:
    """The draft of EAGLE3 whose layers are those of a model: the first takes embeddings beside hidden
    states, so that its projections have twice the columns."""
    hidden, rows = config["hidden_size"], config["draft_vocab_size"] or config["vocab_size"]
    width, count = config["target_hidden_size"], config["num_aux_hidden_states"]
    found = _without_model(entries)
    for name, (dtype, shape) in found.items():
        if name.startswith("layers.0.") and name.endswith(_INPUTS):
            found[name] = dtype, (shape[0], 2 * shape[1])
    for number in range(config["num_hidden_layers"]):
        found[f"layers.{number}.hidden_norm.weight"] = "BF16", (hidden,)
    found["fc.weight"] = "BF16", (hidden, count * width)
    if config["norm_before_fc"]:
        found["input_norm.weight"] = "BF16", (count * width,)
    for number in range(count if config["fc_norm"] else 0):
        found[f"fc_norm.{number}.weight"] = "BF16", (width,)
    found |= {"d2t": ("I64", (rows,)), "t2d": ("BOOL", (config["vocab_size"],))}
    return found if config["tie_word_embeddings"] else found | {
        "lm_head.weight": ("BF16", (rows, hidden))
    }  # fmt: skip


def dflash(entries: Entries, config: Mapping[str, Any]) -> Entries:
    """The draft of DFlash whose layers are those of a model, between no embeddings and no head."""
    hidden, taken = config["hidden_size"], config["dflash_config"]["target_layer_ids"]
    found = _without_model(entries)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        found.pop(name, None)
    return found | {
        "fc.weight": ("BF16", (hidden, len(taken) * hidden)),
        "hidden_norm.weight": ("BF16", (hidden,)),
    }


_INPUTS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def _without_model(entries: Entries) -> Entries:
    return {name.removeprefix("model."): one for name, one in entries.items()}


def of_authors(entries: Entries) -> Entries:
    """The names of a draft of EAGLE3 that its authors and older classes use."""
    return {
        _NORMED.sub(lambda found: _NORMS[int(found[1])], name).replace("layers.0.", "midlayer."): one
        for name, one in entries.items()
    }  # fmt: skip


_NORMED = re.compile(r"^fc_norm\.([012])(?=\.)")
_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


def below_model(entries: Entries) -> Entries:
    """The names of a draft in a model's, as some publish one."""
    return {
        name if name.startswith(("lm_head.", "d2t", "t2d")) else f"model.{name}": one
        for name, one in entries.items()
    }


# Forms of a checkpoint: its experts in the form that transformers does not save, fused projections, and
# a draft that has the model's embeddings and head alone; of drafts that stand alone, other names.
OTHER_EXPERTS, FUSED_ROWS, WITHOUT_ENDS = "other experts", "fused rows", "without ends"
OF_AUTHORS, BELOW_MODEL = "of authors", "below model"
NAMED: Mapping[str, Callable[[Entries], Entries]] = {
    FUSED_ROWS: fused, OF_AUTHORS: of_authors, BELOW_MODEL: below_model,
}  # fmt: skip
# Drafts that stand alone, by the class that reads them, and the forms in which they are published.
ALONE: Mapping[str, Callable[[Entries, Mapping[str, Any]], Entries]] = {
    "LlamaForCausalLMEagle3": eagle3, "DFlashDraftModel": dflash,
}  # fmt: skip
FORMS = {"LlamaForCausalLMEagle3": (OF_AUTHORS, BELOW_MODEL), "DFlashDraftModel": (BELOW_MODEL,)}
