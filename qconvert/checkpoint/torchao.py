"""torchao's weights in safetensors, taken apart by transformers, as compressed-tensors has the same.

A weight `X.weight` of a tensor class of torchao is stored as `X._weight_qdata`, `X._weight_scale` and
so on, and each header's metadata says of which class it is, in which blocks (torchao 0.18,
`prototype/safetensors/safetensors_support.py`, `flatten_tensor_state_dict`). Codes, scales and zero
points are those of compressed-tensors' int-quantized and float-quantized weights, (code - zero) x scale
or code x scale, so names and config are all that differs: both are given as compressed-tensors' here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError
from qconvert.core.graph import Source
from qconvert.core.json_text import parse_object
from qconvert.core.shown import count

METHOD = "torchao"
_KEY = "quantization_config"
_PARTS = {"qdata": "weight", "scale": "weight_scale", "zero_point": "weight_zero_point"}
_FLOAT8, _INT8, _INTX = "Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"
# Dtypes of the codes of each class.
_CODES = {_FLOAT8: "F8_E4M3", _INT8: "I8", _INTX: "I8"}


def translated(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint in compressed-tensors' names and words, if its config states torchao and its
    headers describe weights; else the same. Raises CheckpointError for a class that is not read here,
    for parts that are missing or more than it has, and for blocks that do not fit."""
    block = checkpoint.config.get(_KEY)
    if not isinstance(block, Mapping) or block.get("quant_method") != METHOD:
        return checkpoint
    classes = {
        name: one for name, text in checkpoint.metadata.items() if (one := _class(name, text))
    }
    sources = dict(checkpoint.sources)
    schemes: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, one in classes.items():
        module, _, parameter = name.rpartition(".")
        parts = _take(checkpoint, sources, name, one)
        weights = _scheme(name, one, parts)
        if parameter != "weight":
            raise CheckpointError(
                f"{name!r}: torchao's {one['_type']} is read of a layer's weight only"
            )
        for part, source in parts.items():
            renamed = f"{module}.{_PARTS[part]}"
            sources[renamed] = replace(source, name=renamed)
        schemes.setdefault(json.dumps(weights), (weights, []))[1].append(module)
    left = next((name for name in sources if name.endswith("._weight_qdata")), None)
    if left is not None:
        raise CheckpointError(f"{left!r}: no header says of which class of torchao it is")
    if not classes:
        return checkpoint
    forms = {"int": "int-quantized", "float": "float-quantized"}
    groups = {
        f"group_{n}": {"targets": modules, "weights": weights, "format": forms[weights["type"]]}
        for n, (weights, modules) in enumerate(schemes.values())
    }
    stated = {each["format"] for each in groups.values()}
    block = {
        "quant_method": "compressed-tensors", "config_groups": groups, "ignore": [],
        "format": stated.pop() if len(stated) == 1 else "mixed-precision",
    }  # fmt: skip
    kinds = ", ".join(sorted({one["_type"] for one in classes.values()}))
    said = (
        f"{count(len(classes), 'weight')} of torchao ({kinds}) read as compressed-tensors has them"
    )
    config = {**checkpoint.config, _KEY: block}
    return replace(
        checkpoint, sources=sources, config=config, warnings=(*checkpoint.warnings, said),
        config_bytes=(json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
    )  # fmt: skip


def _class(name: str, text: str) -> Mapping[str, Any] | None:
    """The description of a weight that was taken apart, None of a plain tensor and of what is none."""
    if not text.startswith("{"):
        return None
    found = parse_object(text, f"metadata of {name!r}")
    if found.get("_type") == "Tensor":
        return None
    if found.get("_type") not in _CODES:
        raise CheckpointError(
            f"{name!r}: torchao's {found.get('_type')} is not read here: {', '.join(_CODES)} are; start "
            "from the unquantized model"
        )
    return found


def _take(
    checkpoint: Checkpoint, sources: dict[str, Source], name: str, one: Mapping[str, Any]
) -> dict[str, Source]:
    """The parts of a weight, out of `sources`."""
    listed = one.get("_tensor_data_names")
    if not isinstance(listed, list) or not {"qdata", "scale"} <= {*listed} <= {*_PARTS}:
        raise CheckpointError(
            f"{name!r}: torchao's {one['_type']} has parts {listed}: expected codes and scales, with or "
            "without zero points"
        )
    module, _, parameter = name.rpartition(".")
    found = {}
    for part in listed:
        stored = f"{module}._{parameter}_{part}"
        if stored not in checkpoint:
            raise CheckpointError(
                f"{stored!r} is missing, a part of torchao's {one['_type']} {name!r}"
            )
        found[part] = sources.pop(stored)
    return found


def _scheme(name: str, one: Mapping[str, Any], parts: Mapping[str, Source]) -> dict[str, Any]:
    """A weight in compressed-tensors' words."""
    kind, codes = one["_type"], parts["qdata"].type
    data = one.get("_data")
    size = data.get("block_size") if isinstance(data, Mapping) else None
    if codes.dtype != _CODES[kind] or len(codes.shape) != 2:
        raise CheckpointError(
            f"{name!r}: expected a matrix of {_CODES[kind]} in torchao's {kind}, found {codes}"
        )
    sides = size if isinstance(size, list) and len(size) == 2 else [0, 0]
    fit = all(type(side) is int and side > 0 for side in sides)
    if not fit or any(whole % side for whole, side in zip(codes.shape, sides, strict=True)):
        raise CheckpointError(f"{name!r}: blocks of {size} do not fit {codes}")
    grid = codes.shape[0] // sides[0], codes.shape[1] // sides[1]
    for part in ("scale", "zero_point"):
        if part in parts and parts[part].type.shape != grid:
            raise CheckpointError(
                f"{name!r}: expected {part}s {list(grid)} for {codes} in blocks of {size}, found "
                f"{parts[part].type}"
            )
    common = {"type": "float" if kind == _FLOAT8 else "int", "num_bits": 8, "dynamic": False}
    common["symmetric"] = "zero_point" not in parts
    if grid == (1, 1) and kind == _FLOAT8:
        return {**common, "strategy": "tensor"}
    if grid[1] == 1 and sides[0] == 1:
        return {**common, "strategy": "channel"}
    if kind == _FLOAT8:
        return {**common, "strategy": "block", "block_structure": sides}
    if sides[0] != 1:
        raise CheckpointError(f"{name!r}: torchao's {kind} is read with scales of each row only")
    return {**common, "strategy": "group", "group_size": sides[1]}
