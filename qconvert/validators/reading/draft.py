"""Settings of a draft that stands alone (EAGLE3, DFlash), in one spelling for the form of speculators
and that of its authors; read apart from the pass that makes the one of the other.

Sources: vLLM, transformers_utils/configs/speculators/algos.py; sglang,
model_executor/model_runner_components/spec_aux_hidden_state.py and models/llama.py
(set_eagle3_layers_to_capture), speculative/dflash_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.core.errors import CheckpointError

_LAYERS, _IDS = "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"
# Words of one form: who is drafted for, which class, and what is read below.
_OF_FORM = frozenset((
    "architectures", "auto_map", "speculators_config", "speculators_version", "dflash_config",
    "eagle_config", "draft_vocab_size", "num_aux_hidden_states", "num_target_layers", "is_causal",
    "target_layer_ids", "aux_hidden_state_layer_ids", "sliding_window_non_causal", "use_aux_norm",
    "fc_norm", "speculators_model_type", "tie_word_embeddings", "embed_requires_grad", _IDS, _LAYERS,
))  # fmt: skip


def draft_stated(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of a draft, with the `draft.` ones in one spelling; None for another folder. Raises
    CheckpointError for lists that are none."""
    named = config.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    kind = config.get("speculators_model_type")
    if kind is None and not ("Eagle3" in first or first == "DFlashDraftModel"):
        return None
    layers, block, eagle = (
        _block(config, key) for key in (_LAYERS, "dflash_config", "eagle_config")
    )
    both = {**config, **layers, **block}
    found = {
        key: value for key, value in both.items() if key not in _OF_FORM and value is not False
    }
    # Layers before the one whose input is taken.
    taken = _numbers(config, _IDS) or _numbers(config, "aux_hidden_state_layer_ids")
    for inner, key in ((eagle, _IDS), (both, "target_layer_ids")):
        taken = taken or [number + 1 for number in _numbers(inner, key)]
    size = config.get("draft_vocab_size")
    windows = [one == "sliding_attention" for one in _list(both, "layer_types")]
    hidden, behind = both.get("is_causal"), config.get("sliding_window_non_causal")
    flash = "block_size" in both
    return found | {
        "draft.algorithm": "dflash" if flash else "eagle3", "draft.taken": taken or None,
        "draft.vocabulary": None if size == both.get("vocab_size") else size,
        "draft.fc_norm": bool(both.get("fc_norm") or both.get("use_aux_norm")) or None,
        "draft.hides": [
            window and not behind if hidden is None else bool(hidden)
            for window in windows or [False]
        ] if flash else None,
    }  # fmt: skip


def _block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    found = config.get(key)
    return found if isinstance(found, list) else []


def _numbers(config: Mapping[str, Any], key: str) -> list[int]:
    found = _list(config, key)
    if any(type(one) is not int for one in found):
        raise CheckpointError(
            f"config.json: expected {key} to be numbers of layers, found {found!r}"
        )
    return found
