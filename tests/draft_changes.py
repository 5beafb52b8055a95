"""Drafts that stand alone in the form that sglang reads, changed as others publish them or as they are
broken; and whether sglang's class loads them whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draft_tables import HIDDEN, TOKENS, Config, Tensors, dflash, eagle3, matrix, norm, write_draft

Change = Callable[[Tensors, Config], None]
MADE: dict[str, Any] = {"eagle3": eagle3, "dflash": dflash}


def _taking(count: int) -> Change:
    """A draft whose `fc` joins so many hidden states, wherever that is said."""
    return lambda tensors, config: tensors.update({"fc.weight": matrix(HIDDEN, count * HIDDEN)})


def _stating(**keys: Any) -> Change:
    return lambda tensors, config: config.update(keys)


def _without(*left: str) -> Change:
    def change(tensors: Tensors, config: Config) -> None:
        for name in left:
            (tensors if name in tensors else config).pop(name)

    return change


def _with(**more: Any) -> Change:
    return lambda tensors, config: tensors.update(
        {name.replace("__", "."): one for name, one in more.items()}
    )


def _named(old: str, new: str) -> Change:
    def change(tensors: Tensors, config: Config) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return change


def _two_layers(tensors: Tensors, config: Config) -> None:
    """The second layer takes hidden states alone."""
    _named("midlayer.", "layers.0.")(tensors, config)
    for name, one in [*tensors.items()]:
        if name.startswith("layers.0."):
            rows, *columns = one.shape
            wide = columns == [2 * HIDDEN] and "self_attn" in name
            tensors[name.replace(".0.", ".1.")] = matrix(rows, HIDDEN) if wide else one
    config["num_hidden_layers"] = 2


_IDS = {"eagle_aux_hidden_state_layer_ids": [1, 3], "use_aux_hidden_state": True}
_NORMS = {f"fc_norm.{number}.weight": norm(HIDDEN) for number in range(3)}
# What becomes of a published draft, and whether sglang then loads it whole; None: what it does is not
# known, and is not guessed.
CHANGED: dict[str, tuple[str, bool | None, list[Change]]] = {
    "two hidden states, counted": (
        "eagle3", True, [_taking(2), _stating(num_aux_hidden_states=2)]
    ),
    "two hidden states, listed": ("eagle3", True, [_taking(2), _stating(eagle_config=_IDS)]),
    "two hidden states, unsaid": ("eagle3", False, [_taking(2)]),
    "a wider target": (
        "eagle3", True, [
            _stating(target_hidden_size=2 * HIDDEN), _with(fc__weight=matrix(HIDDEN, 6 * HIDDEN)),
        ],
    ),
    "a norm for each state": ("eagle3", True, [_stating(fc_norm=True), _with(**_NORMS)]),
    "a norm for each state, unsaid": ("eagle3", False, [_with(**_NORMS)]),
    "a norm for each state, in older words": (
        "eagle3", None, [_stating(use_aux_norm=True), _with(**_NORMS)]
    ),
    "a norm before fc": (
        "eagle3", True, [_stating(norm_before_fc=True), _with(input_norm__weight=norm(3 * HIDDEN))]
    ),
    "a norm before fc that is not there": ("eagle3", False, [_stating(norm_before_fc=True)]),
    "a norm before fc, in a block": (
        "eagle3", None, [_stating(eagle_config={"norm_before_fc": True})]
    ),
    "two layers": ("eagle3", True, [_two_layers]),
    "names below model": ("eagle3", True, [_named("midlayer.", "model.layers.0.")]),
    "embeddings of its own": ("eagle3", True, [_with(embed_tokens__weight=matrix(TOKENS, HIDDEN))]),
    "no head of its own tokens": ("eagle3", False, [_without("lm_head.weight")]),
    "tokens of the target, unsaid": ("eagle3", False, [_without("draft_vocab_size")]),
    "tokens of the target": (
        "eagle3", True, [_stating(draft_vocab_size=None), _without("lm_head.weight", "d2t", "t2d")]
    ),
    "no norm": ("eagle3", False, [_without("norm.weight")]),
    "a bias": ("eagle3", False, [_with(midlayer__self_attn__q_proj__bias=norm(HIDDEN))]),
    "three hidden states, two listed": ("dflash", False, [_taking(3)]),
    "hidden states listed in the root": (
        "dflash", True, [_taking(3), _stating(dflash_config={}, target_layer_ids=[1, 2, 3])]
    ),
    "hidden states listed nowhere": ("dflash", None, [_stating(dflash_config={})]),
    "a convolution": (
        "dflash", None, [_stating(dflash_config={
            "target_layer_ids": [1, 3], "conv_kernel_size": 4, "conv_group_size": 64,
        })],
    ),
    "no norm of hidden states": ("dflash", False, [_without("hidden_norm.weight")]),
    "a layer too few": ("dflash", False, [_stating(num_hidden_layers=3)]),
}  # fmt: skip


def changed(what: str, folder: Path) -> tuple[Path, bool | None]:
    """The folder of a draft of `CHANGED`, and whether it is loaded whole."""
    algorithm, loads, changes = CHANGED[what]
    tensors, config = MADE[algorithm]("sglang")
    config["dtype"] = "bfloat16"
    for change in changes:
        change(tensors, config)
    return write_draft(folder, tensors, config), loads
