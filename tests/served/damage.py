"""Folders that load and are wrong, as a broken converter makes them: the controls of the table."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from served.rows import Damage

Tensors = dict[str, Tensor]


def damaged(source: Path, target: Path, damage: Damage) -> list[str]:
    """Copy a folder of one shard with one kind of damage; the names of the tensors that changed. Raises
    ValueError where the folder has nothing to damage so."""
    shutil.copytree(source, target)
    (shard,) = target.glob("*.safetensors")
    before = load_file(shard)
    after = _DAMAGES[damage](dict(before))
    changed = [name for name, tensor in after.items() if not _equal(tensor, before[name])]
    if not changed:
        raise ValueError(f"{source.name} has nothing for {damage!r}")
    save_file(after, shard, metadata={"format": "pt"})
    return changed


def _equal(mine: Tensor, yours: Tensor) -> bool:
    return torch.equal(mine.view(torch.uint8), yours.view(torch.uint8))


def _of_first_layer(tensors: Tensors, ends: tuple[str, ...], part: str) -> list[str]:
    return [
        name for name in tensors if ".layers.0." in name and part in name and name.endswith(ends)
    ]


def _permuted_rows(tensors: Tensors) -> Tensors:
    """Two heads of a query projection exchanged, in its codes alone."""
    for name in _of_first_layer(tensors, (".weight", ".weight_packed"), "q_proj"):
        codes = tensors[name]
        tensors[name] = torch.cat([codes[64:128], codes[:64], codes[128:]]).contiguous()
    return tensors


def _negated_scale(tensors: Tensors) -> Tensors:
    """One block's scale below zero."""
    for name in _of_first_layer(tensors, ("_scale", "_scale_inv"), "down_proj"):
        scale = tensors[name].clone()
        scale[0, 0] = -scale[0, 0]
        tensors[name] = scale
    return tensors


def _shifted_blocks(tensors: Tensors) -> Tensors:
    """Scales one block further on, as a fused matrix cut in the wrong place has them."""
    for name in _of_first_layer(tensors, ("_scale", "_scale_inv"), "down_proj"):
        tensors[name] = tensors[name].roll(1, -1).contiguous()
    return tensors


def _exchanged_experts(tensors: Tensors) -> Tensors:
    """The gate projections of experts 0 and 1 exchanged."""
    for name in _of_first_layer(tensors, ("",), ".experts.0.gate_proj"):
        other = name.replace(".experts.0.", ".experts.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    return tensors


_DAMAGES: Mapping[Damage, Callable[[Tensors], Tensors]] = {
    "permuted rows": _permuted_rows,
    "negated scale": _negated_scale,
    "shifted blocks": _shifted_blocks,
    "exchanged experts": _exchanged_experts,
}
