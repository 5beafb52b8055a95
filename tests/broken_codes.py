"""What is done to packed INT4 in groups of 32, for validators to find: codes of other places, scales of
another size. Each is what is done, the tensor's name and its new bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from data_folders import Array, home

_GROUP = 16  # bytes of a group's codes
Breaking = tuple[str, str, Array]
# What is done, to which scales (rows and a group, or a row), and by which factor.
At = tuple[int | slice, ...]
SIZES: tuple[tuple[str, At, float], ...] = (
    ("the scales of a group of columns halved", (slice(None), 1), 0.5),
    ("a scale of 8", (9, 1), 8), ("a row doubled", (9,), 2),
)  # fmt: skip
SIGNS: tuple[tuple[str, At, float], ...] = (
    ("a scale of zero", (9, 1), 0), ("a scale of the other sign", (9, 1), -1),
    ("a row of the other sign", (9,), -1),
)  # fmt: skip


def codes_moved(folder: Path, module: str) -> Iterator[Breaking]:
    name = f"{module}.weight_packed"
    tensor = home(folder, name)[1]
    raw = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)
    yield "codes of the next group", name, np.roll(raw, _GROUP, 1)
    yield "rows one further down", name, np.roll(raw, 1, 0)
    one = raw.copy()
    one[:, _GROUP : 2 * _GROUP] = raw[:, 2 * _GROUP : 3 * _GROUP]
    yield "one group twice", name, one


def scale_rounded_up(folder: Path, module: str) -> Iterator[Breaking]:
    """By its last bit."""
    name = f"{module}.weight_scale"
    scales = np.frombuffer(home(folder, name)[1].data, "<u2").copy()
    scales[77] += 1
    yield "a scale rounded up", name, scales.view(np.uint8)


def scales_times(
    folder: Path, module: str, changes: Iterable[tuple[str, At, float]]
) -> Iterator[Breaking]:
    name = f"{module}.weight_scale"
    tensor = home(folder, name)[1]
    raw = np.frombuffer(tensor.data, "<u2").reshape(tensor.shape)
    for what, where, factor in changes:
        wide = (raw.astype(np.uint32) << 16).view(np.float32)
        wide[where] *= factor
        yield what, name, (wide.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
