"""Tiny checkpoints of any class of transformers as headers: the names and shapes that save_pretrained
would write, the bytes a hole in the file. Several sets of sizes, so that a size tells its key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from families.tiny import config_of

# What sizes of each set are: no two keys of one have the same value, and no product is another's.
# Multiples of 32, heads that divide the hidden size and are whole multiples of those of keys.
SETS: dict[str, tuple[Any, ...]] = {
    "hidden_size": (128, 192, 240), "intermediate_size": (224, 352, 416),
    "moe_intermediate_size": (96, 160, 288), "shared_expert_intermediate_size": (112, 272, 304),
    "moe_shared_expert_intermediate_size": (144, 176, 208), "moe_latent_size": (72, 136, 200),
    "vocab_size": (320, 448, 576), "num_attention_heads": (8, 6, 10),
    "num_key_value_heads": (2, 3, 5), "head_dim": (32, 48, 80), "num_experts": (6, 8, 4),
    "num_local_experts": (6, 8, 4), "n_routed_experts": (6, 8, 4), "moe_num_experts": (6, 8, 4),
    "q_lora_rank": (80, 168, 88), "v_head_dim": (72, 56, 104),
    "kv_lora_rank": (512, 448, 384), "qk_rope_head_dim": (64, 32, 96),
    "qk_nope_head_dim": (128, 80, 112), "linear_num_key_heads": (2, 4, 3),
    "linear_num_value_heads": (4, 8, 9), "linear_key_head_dim": (32, 64, 16),
    "linear_value_head_dim": (24, 48, 64), "linear_conv_kernel_dim": (4, 3, 5),
    "index_n_heads": (4, 10, 14), "index_head_dim": (64, 96, 128),
    "mamba_num_heads": (8, 6, 10), "mamba_head_dim": (32, 48, 24), "ssm_state_size": (16, 24, 40),
    "n_groups": (2, 3, 5), "conv_kernel": (4, 3, 5), "mamba_n_heads": (8, 6, 10),
    "mamba_d_head": (32, 64, 48), "mamba_d_state": (56, 40, 88), "mamba_d_conv": (4, 3, 5),
    "ffn_hidden_size": (224, 352, 416), "expert_ffn_hidden_size": (96, 160, 288),
    "n_embd": (128, 192, 240), "n_head": (8, 6, 10), "d_model": (128, 192, 240),
    "n_shared_experts": (1, 2, 3), "num_shared_experts": (1, 2, 3),
}  # fmt: skip
# Of a tower: sizes of its own, whose result is as wide as the text model.
TOWER: dict[str, tuple[Any, ...]] = {
    "hidden_size": (64, 96, 160),
    "intermediate_size": (152, 184, 232),
    "num_heads": (4, 6, 5),
    "num_attention_heads": (4, 6, 5),
    "depth": (2, 2, 2),
    "num_hidden_layers": (2, 2, 2),
    "out_hidden_size": (128, 192, 240),
    "projection_dim": (120, 216, 248),
    "num_position_embeddings": (64, 144, 256),
}
# Of a tower that takes videos, too: patches, whose shape is that of its first weight.
PATCHES: dict[str, tuple[Any, ...]] = {
    "patch_size": (16, 8, 32), "temporal_patch_size": (2, 1, 4),
}  # fmt: skip
COUNT = 3


def sized(
    model_type: str,
    given: Mapping[str, Any],
    sizes: Mapping[str, Any],
    number: int,
    fixed: frozenset[str] = frozenset(),
    *,
    head_dim: bool = False,
) -> Any:
    """The config of a model_type with the sizes of a set; `sizes` are those of the model's own that are
    so in every set, `fixed` keys that keep the value of set 0. `head_dim`: state one where the
    class has no such key, as published configs do."""
    import transformers

    hf: Any = transformers
    values = config_of(model_type, given, sizes).to_dict()
    values.pop("model_type")
    values.pop("qk_head_dim", None)  # of two others
    changed = _with_set(values, number, fixed, top=True)
    text = changed.get("text_config", changed)
    stated = text.get("head_dim") or text.get("kv_lora_rank")
    if head_dim and "num_attention_heads" in text and stated is None:
        text["head_dim"] = SETS["head_dim"][0 if "head_dim" in fixed else number]
    return hf.AutoConfig.for_model(model_type, **changed)


def _with_set(
    values: Mapping[str, Any], number: int, fixed: frozenset[str], *, top: bool
) -> dict[str, Any]:
    text = "text_config" in values
    known = SETS if top else TOWER | PATCHES if "temporal_patch_size" in values else TOWER
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("_config"):
            of = fixed if key == "text_config" else frozenset[str]()
            found[key] = _with_set(value, number, of, top=key == "text_config")
        elif type(value) is int and key in known and not (top and text):
            found[key] = known[key][0 if key in fixed else number]
        else:
            found[key] = value
    return found


Entries = dict[str, tuple[str, tuple[int, ...]]]
_WIDTHS = {"BF16": 2, "F32": 4, "I64": 8, "BOOL": 1}


def write(
    config: Any,
    folder: Path,
    more: Mapping[str, Any],
    *,
    turned: bool = False,
    published: Callable[[Entries, Mapping[str, Any]], Entries] = lambda entries, config: entries,
) -> Path:
    """A checkpoint's config.json and the header of its one file; `more` are keys that published configs
    have beside those that transformers saves; `turned`: the rows of matrices in stacks of experts are
    published as columns; `published`: what becomes of the names and shapes that transformers saves."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    from qconvert.layouts.derived.transformers_class import class_of

    hf: Any = transformers
    with torch.device("meta"):
        model: Any = class_of(hf, config)._from_config(config, dtype=torch.bfloat16)
    state = model.state_dict()
    for name in getattr(model, "all_tied_weights_keys", None) or {}:
        state.pop(name, None)
    entries: Entries = {}
    kept = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    for name, tensor in revert_weight_conversion(model, state).items():
        shape = [*tensor.shape]
        if turned and len(shape) == 3 and ".experts." in name:
            shape[1:] = reversed(shape[1:])
        entries[name] = kept.get(tensor.dtype, "BF16"), tuple(shape)
    saved = config.to_dict() | {"architectures": [type(model).__name__]}
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, sizes) in published(entries, saved).items():
        size = _WIDTHS[dtype] * math.prod(sizes)
        header[name] = {"dtype": dtype, "shape": [*sizes], "data_offsets": [end, end + size]}
        end += size
    folder.mkdir(parents=True)
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    text = saved.get("text_config", saved)
    for key, value in more.items():
        if key == "head_dim":  # follows from sizes of the set where transformers has no key for it
            text.setdefault(key, text["hidden_size"] // text["num_attention_heads"])
        elif key not in SETS or isinstance(value, list):
            text[key] = value
    (folder / "config.json").write_text(json.dumps(_plain(saved), indent=2))
    return folder


def _plain(value: Any) -> Any:
    """A config as JSON: types of torch by name, keys of maps as text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value).removeprefix("torch.")
