"""Small adapters as peft stores them, made without it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Tensor, write_shard

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.names import split_parameter

Numbers = np.ndarray[Any, Any]


def f32(values: Numbers) -> Tensor:
    return Tensor("F32", values.shape, values.astype("<f4").tobytes())


def write(folder: Path, tensors: Mapping[str, Numbers], **config: Any) -> Path:
    """An adapter's folder; of plain deltas without a config."""
    folder.mkdir(parents=True)
    write_shard(folder / "adapter_model.safetensors", {n: f32(t) for n, t in tensors.items()})
    if config:
        text = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, **config})
        (folder / "adapter_config.json").write_text(text)
    return folder


def lora(
    base: Path, folder: Path, targets: str = r".*\.(q|v)_proj", *, seed: int = 7, **config: Any
) -> Path:
    """LoRA, or DoRA, of the modules of a folder that a pattern matches, from BF16 or block FP8."""
    random = np.random.default_rng(seed)
    made: dict[str, Numbers] = {}
    for name, source in Checkpoint.open(base).items():
        module, parameter = split_parameter(name)
        if parameter not in ("weight", "weight_packed") or not re.fullmatch(targets, module):
            continue
        rows, columns = source.type.shape
        columns *= {"weight_packed": 8 if source.type.dtype == "I32" else 2}.get(parameter, 1)
        at = f"base_model.model.{module}.lora_"
        made[f"{at}A.weight"] = random.normal(0, 0.2, (4, columns))
        made[f"{at}B.weight"] = random.normal(0, 0.2, (rows, 4))
        if config.get("use_dora"):
            made[f"{at}magnitude_vector"] = random.uniform(0.5, 2, rows)
    assert made, targets
    return write(folder, made, **{"use_rslora": False, **config})


def of_experts(base: Path, folder: Path, parameters: Mapping[str, Sequence[str]]) -> Path:
    """LoRA of parameters of all experts, by the projections whose rows each has, nested as peft nests
    them: the last is outermost."""
    random, made = np.random.default_rng(8), dict[str, Numbers]()
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    experts: dict[str, int] = {}
    for name, source in Checkpoint.open(base).items():
        module, _, last = name.removesuffix(".weight").rpartition(".")
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)", module):
            experts[match[1]] = max(experts.get(match[1], 0), int(match[2]) + 1)
            sizes[match[1], last] = source.type.shape[0], source.type.shape[1]
        elif module.endswith(".experts") and len(source.type.shape) == 3:
            experts[module], *shape = source.type.shape
            for part in parameters[last]:
                sizes[module, part] = shape[0] // len(parameters[last]), shape[1]
    for at, count in experts.items():
        for depth, parts in enumerate([*parameters.values()][::-1]):
            rows, columns = sum(sizes[at, part][0] for part in parts), sizes[at, parts[0]][1]
            where = f"base_model.model.{at}{'.base_layer' * depth}.lora_"
            made[f"{where}A.weight"] = random.normal(0, 0.2, (4 * count, columns))
            made[f"{where}B.weight"] = random.normal(0, 0.2, (rows, 4 * count))
    return write(folder, made, target_parameters=[f"mlp.experts.{name}" for name in parameters])
