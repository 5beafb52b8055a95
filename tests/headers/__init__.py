"""Headers of published checkpoints, without their data.

One YAML file a model: its config, and a line for each kind of tensor. A line's `layers` is a range
such as "0-60" or "3-47:4" (every fourth), several of them joined by commas, or a name of one from
the file's `layers`; `experts: 256` repeats it for that many experts; `scale: F32` adds the block
scales of an FP8 weight. `modules_to_not_convert`, `ignore` and `exclude_modules` become those lists of
the quantization config, `quantized_layers` modelopt's table (a line's `entry`), with which a group's
`targets: FP8` are its modules of that algorithm; `hf_quant_config` is modelopt's file, which takes list
and table from there.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.names import natural_key, parse

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class HeaderSet:
    """A checkpoint's config.json, its tensors in the order a model runs in, and how many files the
    published one has; JSON `files` beside them."""

    config: dict[str, Any]
    tensors: dict[str, TensorType]
    shards: int
    files: dict[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """The models there are headers of."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


@cache
def load(model: str) -> HeaderSet:
    """The headers of one model. Every test gets the same object: change none of it."""
    return read(_FOLDER / f"{model}.yaml")


def forms() -> list[str]:
    """The releases in other forms than `names`, of which few commands take any: they are validated."""
    return sorted(file.stem for file in (_FOLDER / "forms").glob("*.yaml"))


@cache
def form(model: str, most: int = 2) -> HeaderSet:
    """One of them with few experts. Change none of it."""
    return with_few(read(_FOLDER / "forms" / f"{model}.yaml"), most)


def model_type(model: str) -> str:
    """What its config calls it, without the headers: what tests choose their cases by."""
    return str(_raw(_FOLDER / f"{model}.yaml")["config"]["model_type"])


def read(file: Path) -> HeaderSet:
    """The headers that a file of this form states."""
    raw = deepcopy(_raw(file))
    config, groups = raw["config"], raw.get("layers", {})
    for key in _LISTS:
        if key in raw:
            listed = [name for line in raw[key] for name in _names(line, groups)]
            config["quantization_config"][key] = listed
    files = {}
    if "quantized_layers" in raw:
        _with_table(config["quantization_config"], raw["quantized_layers"], groups)
    if "hf_quant_config" in raw:
        files["hf_quant_config.json"] = _modelopt_file(raw["hf_quant_config"], config)
    block = config.get("quantization_config", {}).get("weight_block_size")
    tensors: dict[str, TensorType] = {}
    for line in raw["tensors"]:
        weight = TensorType(line["dtype"], tuple(line["shape"]))
        for name in _names(line, groups):
            if name in tensors:
                raise ValueError(f"{file} has {name} twice")
            tensors[name] = weight
            if "scale" in line:
                grid = tuple(ceil_div(*pair) for pair in zip(weight.shape, block, strict=True))
                tensors[f"{name}_scale_inv"] = TensorType(line["scale"], grid)
    ordered = {name: tensors[name] for name in sorted(tensors, key=natural_key)}
    return HeaderSet(config, ordered, raw["shards"], files)


_LISTS = ("modules_to_not_convert", "ignore", "exclude_modules")
_TABLE = "quantized_layers"


def _with_table(
    block: dict[str, Any], lines: Iterable[Mapping[str, Any]], groups: Mapping[str, str]
) -> None:
    """Put modelopt's table into a quantization block, and the targets of its groups."""
    table = {name: line["entry"] for line in lines for name in _names(line, groups)}
    for group in block.get("config_groups", {}).values():
        algorithm = group["targets"]
        group["targets"] = [n for n, entry in table.items() if entry["quant_algo"] == algorithm]
    block[_TABLE] = table


def _modelopt_file(found: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """hf_quant_config.json, with the list and the table that config.json's block has."""
    block, inner = config["quantization_config"], found["quantization"]
    listed = block.get("ignore", block.get("exclude_modules"))
    inner |= {} if listed is None else {"exclude_modules": listed}
    inner |= {_TABLE: block[_TABLE]} if _TABLE in block else {}
    return found


@cache
def _raw(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8")
    raw: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return raw


_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
# Beside a router, and of no expert.
_OF_NO_EXPERT = ("tid2eid", "router.scale", "gate.global_scale")
# Parts of names of what has a row or a number for each expert.
_PER_EXPERT = (".gate.", ".router.", "block_sparse_moe.e_score_", ".moe_statics.")


@cache
def few(model: str, most: int = 3) -> HeaderSet:
    """The same model with few experts: config, routers, stacks and names agree. Planned and judged in
    next to no time, by the same rules. Change none of it either."""
    return with_few(load(model), most)


def with_few(found: HeaderSet, most: int = 3) -> HeaderSet:
    """As `few`, of any headers."""
    config = deepcopy(found.config)
    counts = set()
    for level in (config, config.get("text_config", {})):
        for key in _COUNTS:
            if (level.get(key) or 0) > most:
                counts.add(level[key])
                level[key] = most
    if not counts:
        return found
    (count,) = counts
    tensors = {}
    for name, kind in found.tensors.items():
        if (parse(name).expert or 0) >= most:
            continue
        stack = ".experts." in name and parse(name).expert is None
        if stack or any(part in name for part in _PER_EXPERT):
            # A router may have rows of shared experts too: Inkling's has two.
            shape = tuple(
                most + size - count if count <= size <= count + 2 else size for size in kind.shape
            )
            assert shape != kind.shape or name.endswith(_OF_NO_EXPERT), name
            kind = TensorType(kind.dtype, shape)
        tensors[name] = kind
    config = without_experts(config, most)
    return HeaderSet(config, tensors, 3, without_experts(found.files, most))


def without_experts(value: Any, most: int) -> Any:
    """JSON without what names experts from a number on: entries of tables and lists."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if (parse(k).expert or 0) < most}
        return {key: without_experts(one, most) for key, one in kept.items()}
    if isinstance(value, list):
        return [v for v in value if not isinstance(v, str) or (parse(v).expert or 0) < most]
    return value


def write_sparse(headers: HeaderSet, folder: Path, *, shards: int | None = None) -> None:
    """Write the checkpoint as files of full size that take next to no room: headers, then a hole."""
    files = _split(headers.tensors, headers.shards if shards is None else shards)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write_file(folder / file, part)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in headers.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    for file, content in {"config.json": headers.config, **headers.files}.items():
        _write_json(folder / file, content)
    _write_json(folder / "tokenizer.json", {"version": "1.0", "model": {"type": "BPE"}})
    _write_json(folder / "tokenizer_config.json", {"model_max_length": 131072})


def numbers(layers: str) -> list[int]:
    """`0-2,5-13:4` -> 0, 1, 2, 5, 9, 13."""
    found: list[int] = []
    for part in layers.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def _names(line: Mapping[str, Any], groups: Mapping[str, str]) -> Iterator[str]:
    """The names a line stands for, layer by layer."""
    template: str = line["name"]
    layers = str(line.get("layers", "0"))
    for layer in numbers(groups.get(layers, layers)):
        in_layer = template.replace("{L}", str(layer))
        for expert in range(line.get("experts", 1)):
            yield in_layer.replace("{E}", str(expert))


def _split(tensors: Mapping[str, TensorType], shards: int) -> Sequence[Mapping[str, TensorType]]:
    """Cut the tensors, in their order, into files of about equal size, none of them empty."""
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors do not make {shards} files")
    total = sum(tensor.nbytes for tensor in tensors.values())
    files: list[dict[str, TensorType]] = [{}]
    done = 0
    for position, (name, tensor) in enumerate(tensors.items()):
        full = (done + tensor.nbytes / 2) * shards > total * len(files)
        last_chance = len(tensors) - position <= shards - len(files)
        if files[-1] and len(files) < shards and (full or last_chance):
            files.append({})
        files[-1][name] = tensor
        done += tensor.nbytes
    return files


def _write_file(file: Path, tensors: Mapping[str, TensorType]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
