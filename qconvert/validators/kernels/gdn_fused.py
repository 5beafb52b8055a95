"""Fused linear-attention projections compute what the separate ones do: our Triton kernels against
torch, on random weights and on the layers of a real pair.

Of a pair, the projections of one side are fused and the other's are in any order: random tokens go
through both, and the results are compared segment by segment after a kernel has taken the fused ones
split in the order that qconvert.json states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.run.work.reader import Reader
from qconvert.validation.runner import Folder, NotChecked
from qconvert.validators.kernels.device import NO_DATA, KernelValidator
from qconvert.validators.reading.forms import Unread
from qconvert.validators.reading.matrices import gdn_groups, segment_runs, whole
from qconvert.validators.reading.rows import bf16_rows

if TYPE_CHECKING:
    import torch

    from qconvert.validators.kernels.device import Case
    from qconvert.validators.kernels.triton import gdn

_FUSED, _APART = (
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
# Enough to detect strides: with one token, a kernel that ignores them is right.
_TOKENS = 7


def _found(folder: Folder, device: str) -> tuple[Iterator[tuple[str, Case]], str]:
    layers, note = _layers(folder)
    return ((at, one) for layer, at in layers.items() for one in _real(folder, layer, device)), note


def _layers(folder: Folder) -> tuple[dict[int, str], str]:
    """The fused weight of each layer to check, which is in any form in the source; or why
    there is none."""
    source, ours = folder.source, folder.checkpoint
    if source is None:
        return {}, "no layer of the folder was checked: give --against SRC"
    if ours.role_index.dims.gdn is None or source.role_index.dims.gdn is None:
        return {}, "the model has no linear attention"
    fused = _modules(ours, _FUSED[0])
    both = sorted(fused.keys() & _modules(source, "").keys())
    if not both:
        return {}, "no linear attention is fused here"
    if folder.request.level == "headers":
        return {}, NO_DATA
    asked = folder.request.layers
    chosen = sorted({both[0], both[-1]}) if asked is None else [n for n in both if n in asked]
    note = "" if chosen else "the layers asked for hold no fused linear attention"
    return {layer: f"{fused[layer]}.{_FUSED[0]}.weight" for layer in chosen}, note


def _modules(checkpoint: Checkpoint, part: str) -> dict[int, str]:
    """`...linear_attn` of each layer that has the part, or (``) any of them."""
    found: dict[int, str] = {}
    for name, place in checkpoint.role_index.places.items():
        if place.layer is None or not place.role.name.startswith("gdn."):
            continue
        at, _, _ = name.partition(".linear_attn.")
        parts = (part,) if part else (_FUSED[0], _APART[0])
        if any(name == f"{at}.linear_attn.{each}.weight" for each in parts):
            found[place.layer] = f"{at}.linear_attn"
    return found


def _groups(checkpoint: Checkpoint) -> int:
    """Raises NotChecked if nothing states the order."""
    found = gdn_groups(checkpoint)
    if found is None:
        raise NotChecked(f"{checkpoint.root}: the order of its fused projections is not stated")
    return found


def _real(folder: Folder, layer: int, device: str) -> Iterator[Case]:
    import torch

    from qconvert.validators.kernels.triton import gdn

    assert folder.source is not None
    dims = folder.checkpoint.role_index.dims.gdn
    assert dims is not None
    heads = gdn.Heads(*dims)
    ours = _weights(
        folder.checkpoint, _modules(folder.checkpoint, _FUSED[0])[layer], _FUSED, device
    )
    theirs = _apart(folder.source, _modules(folder.source, "")[layer], heads, device)
    random = torch.Generator().manual_seed(layer)
    x = torch.randn(_TOKENS, ours[0].shape[1], generator=random).bfloat16().to(device)
    pair = ours[0], ours[1]
    name, groups = f"layer {layer}", _groups(folder.checkpoint)
    yield from gdn.agree(name, x, theirs, pair, heads, groups, padding=8)


def _weights(
    checkpoint: Checkpoint, module: str, parts: tuple[str, ...], device: str
) -> list[torch.Tensor]:
    """Matrices as the consumer computes with them, bf16 [rows, hidden]. Raises NotChecked for an
    unsupported form."""
    import torch

    names, reader = [f"{module}.{part}.weight" for part in parts], Reader(checkpoint.shards)
    lacking = [name for name in names if name not in checkpoint]
    if lacking:
        raise NotChecked(f"{lacking[0]!r} is missing")
    try:
        found = [bf16_rows(reader, whole(checkpoint, name)) for name in names]
    except Unread as why:
        raise NotChecked(f"{module}: {why}") from why
    finally:
        reader.close()
    return [torch.from_numpy(matrix).bfloat16().to(device) for matrix in found]


def _apart(
    checkpoint: Checkpoint, module: str, heads: gdn.Heads, device: str
) -> list[torch.Tensor]:
    """q, k, v, z, b and a, in whatever order the source has them."""
    import torch

    keys = heads.segments[0]
    if f"{module}.{_FUSED[0]}.weight" not in checkpoint:
        qkv, z, b, a = _weights(checkpoint, module, _APART, device)
        return [qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :], z, b, a]
    groups = _groups(checkpoint)
    found: list[torch.Tensor] = []
    segments = (heads.segments, (heads.values, heads.values))
    for fused, rows in zip(_weights(checkpoint, module, _FUSED, device), segments, strict=True):
        for runs in segment_runs(rows, groups):
            found.append(torch.cat([fused[start:stop] for start, stop in runs]))
    return found


VALIDATOR = KernelValidator(
    "gdn_fused", "Triton's fused linear-attention projections compute what the separate ones do",
    "QC070", "gdn", _found,
)  # fmt: skip
