"""Tiny checkpoints of any class of transformers as headers: the names and shapes that save_pretrained
would write, the bytes a hole in the file. Several sets of sizes, so that a size tells its key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
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
    "mamba_num_heads": (16, 24, 8), "mamba_head_dim": (32, 48, 24), "ssm_state_size": (24, 40, 56),
    "n_groups": (8, 8, 8), "conv_kernel": (4, 3, 5), "mamba_n_heads": (16, 12, 20),
    "mamba_d_head": (16, 32, 24), "mamba_d_state": (56, 40, 88), "mamba_d_conv": (4, 3, 5),
    "ffn_hidden_size": (224, 352, 416), "expert_ffn_hidden_size": (96, 160, 288),
    "n_embd": (128, 192, 240), "n_head": (8, 6, 10), "d_model": (128, 192, 240),
    "n_shared_experts": (1, 2, 3), "num_shared_experts": (1, 2, 3), "n_heads": (8, 6, 10),
    "linear_head_dim": (32, 64, 16), "linear_num_heads": (4, 8, 12),
    "vocab_size_per_layer_input": (336, 464, 592), "intermediate_size_mlp": (384, 544, 608),
    "draft_vocab_size": (304, 368, 528),
}  # fmt: skip
# Of a tower: sizes of its own, whose result is as wide as the text model.
TOWER: dict[str, tuple[Any, ...]] = {
    "hidden_size": (64, 96, 160), "intermediate_size": (152, 184, 232),
    "num_heads": (4, 6, 5), "num_attention_heads": (4, 6, 5),
    "depth": (2, 2, 2),
    "num_hidden_layers": (2, 2, 2), "out_hidden_size": (128, 192, 240),
    "embed_dim": (96, 120, 200), "num_key_value_heads": (4, 3, 1),
    "projection_dim": (120, 216, 248), "num_position_embeddings": (64, 144, 256),
}  # fmt: skip
# Of a tower that takes videos, too: patches, whose shape is that of its first weight.
PATCHES: dict[str, tuple[Any, ...]] = {
    "patch_size": (16, 8, 32), "temporal_patch_size": (2, 1, 4),
}  # fmt: skip
# Of layers that have a config of their own.
LAYER: Mapping[str, tuple[int, ...]] = {
    "head_dim": (64, 96, 112), "num_key_value_heads": (4, 2, 1),
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
    """The config of a model_type with the sizes of a set. `sizes`: those of the model's own, the same in
    every set or one of each in a tuple, None where it follows from others; `fixed`: keys that keep the
    value of set 0; `head_dim`: state one where the class has no such key, as published configs do."""
    import transformers

    hf: Any = transformers
    same = {key: value for key, value in sizes.items() if not isinstance(value, tuple)}
    values = config_of(model_type, given, same).to_dict()
    values.pop("model_type")
    values.pop("qk_head_dim", None)  # of two others
    changed = _with_set(values, number, fixed, top=True)
    if "projection_hidden_size" in changed:  # a projector is as wide as its tower
        changed["projection_hidden_size"] = changed["vision_config"]["hidden_size"]
    text = changed.get("text_config", changed)
    for key, value in sizes.items():
        if value is None or isinstance(value, tuple):
            text[key] = value and value[number]
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
        if key == "per_layer_config":
            found[key] = {
                int(layer): {name: LAYER[name][number] for name in own if name in LAYER}
                for layer, own in value.items()
            }
        elif isinstance(value, dict) and key.endswith("_config"):
            of = fixed if key == "text_config" else frozenset[str]()
            found[key] = _with_set(value, number, of, top=key == "text_config")
        elif type(value) is int and key in known and not (top and text):
            found[key] = known[key][0 if key in fixed else number]
        else:
            found[key] = value
    if not top and "layer_types" in found:
        found["layer_types"] = found["layer_types"][: found["num_hidden_layers"]]
    return found


Entries = dict[str, tuple[str, tuple[int, ...]]]
_WIDTHS = {"BF16": 2, "F32": 4, "I64": 8, "BOOL": 1}


def write(
    config: Any,
    folder: Path,
    more: Mapping[str, Any],
    names: Mapping[str, str | None] = MappingProxyType({}),
    changed: Callable[[dict[str, Any]], None] | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    *,
    turned: bool = False,
    otherwise: bool = False,
    published: Callable[[Entries, Mapping[str, Any]], Entries] = lambda entries, config: entries,
) -> Path:
    """A checkpoint's config.json and the header of its one file. `more`: keys of published configs, see
    `as_published`, and `changed` makes a config of theirs what is published; `names`: patterns of names
    that are published otherwise, None for those that are not; `turned`: the rows of matrices in stacks
    of experts are published as columns; `otherwise`: experts whose matrices are published in stacks
    have each its own, and those whose matrices are published apart are in stacks, as commands make
    them; `published`: what becomes of the names and shapes then. Raises ValueError where a model has no
    such form."""
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
    saved = revert_weight_conversion(model, state)
    if otherwise:
        saved = _otherwise(state, saved, config.get_text_config().hidden_size)
        turned = False
    entries: Entries = {}
    kept = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    for name, tensor in saved.items():
        shape = [*tensor.shape]
        if turned and len(shape) == 3 and ".experts." in name:
            shape[1:] = reversed(shape[1:])
        if stored := published_name(name, names):
            entries[stored] = kept.get(tensor.dtype, "BF16"), tuple(shape)
    stated = config.to_dict() | {"architectures": [type(model).__name__]}
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, sizes) in published(entries, stated).items():
        size = _WIDTHS[dtype] * math.prod(sizes)
        header[name] = {"dtype": dtype, "shape": [*sizes], "data_offsets": [end, end + size]}
        end += size
    folder.mkdir(parents=True)
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    as_published(stated, more)
    if changed is not None:
        changed(stated)
    (folder / "config.json").write_text(json.dumps(_plain(stated), indent=2))
    write_index(folder)
    return folder


def published_name(name: str, names: Mapping[str, str | None]) -> str:
    """The name of a published tensor, "" where there is none."""
    for saved_as, published in names.items():
        if published is None and re.search(saved_as, name):
            return ""
        name = re.sub(saved_as, published or "", name)
    return name


def as_published(config: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Change a config that transformers saves to what published ones state: keys of its text model, or
    of a part before a dot; None where they have no such key; `=key` for the value of another. What
    belongs to a set of sizes stays, and head_dim follows from them."""
    text = config.get("text_config", config)
    for key, value in more.items():
        part, _, inner = key.rpartition(".")
        at = config[part] if part else text
        if value is None:
            at.pop(inner, None)
        elif key == "head_dim":
            at.setdefault(key, text["hidden_size"] // text["num_attention_heads"])
        elif key not in SETS or isinstance(value, list):
            at[inner] = _value(value, text)


def _value(value: Any, text: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _value(one, text) for key, one in value.items()}
    return text[value[1:]] if isinstance(value, str) and value.startswith("=") else value


def write_index(folder: Path) -> None:
    """Write the index of a folder of one file, as published models have one: some classes look in it for
    what the folder has."""
    file = folder / "model.safetensors"
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    index = {"metadata": {}, "weight_map": dict.fromkeys(header, file.name)}
    (folder / f"{file.name}.index.json").write_text(json.dumps(index))


# The two stacks of experts with a gate, and the names that each expert's matrices have.
_STACKS = {
    "experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",),
    "input_linear.weight": ("gate_proj", "up_proj"), "output_linear.weight": ("down_proj",),
}  # fmt: skip
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


def _otherwise(state: Mapping[str, Any], saved: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """Tensors of a model with its experts in the other form. `state`: by transformers' own names, in
    which experts are in stacks."""
    stacks = {n: t for n, t in saved.items() if n.endswith(tuple(_STACKS)) and t.ndim == 3}
    kept = {name: t for name, t in saved.items() if not _EXPERT.search(name) and name not in stacks}
    if not stacks:
        stacked = {name: t for name, t in state.items() if name.endswith(tuple(_STACKS))}
        if len(kept) == len(saved) or not stacked:
            raise ValueError("its experts have one form")
        return kept | stacked
    for name, tensor in stacks.items():
        end = next(one for one in _STACKS if name.endswith(one))
        at, parts = f"{name.removesuffix(end)}experts", _STACKS[end]
        count, rows, columns = tensor.shape
        if (columns == hidden) != (len(parts) > 1):
            rows, columns = columns, rows
        for number, part in product(range(count), parts):
            kept[f"{at}.{number}.{part}.weight"] = tensor.new_empty(rows // len(parts), columns)
    return kept


def _plain(value: Any) -> Any:
    """A config as JSON: types of torch by name, keys of maps as text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value).removeprefix("torch.")
