"""What a load from headers sees: shapes without memory, and which parameters were written by which
tensors. Skips itself without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from qconvert.runtimes.loader.server.from_headers import FromHeaders, HeaderFile

ROWS, COLUMNS = 4096, 512  # more elements than a tensor with memory has


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.empty(ROWS, COLUMNS), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.empty(4), requires_grad=False)


def file_of(folder: Path, tensors: dict[str, tuple[str, list[int]]]) -> HeaderFile:
    table = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()
    }
    data = json.dumps(table).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
    return HeaderFile(folder / "model.safetensors")


def loaded(
    folder: Path,
    tensors: dict[str, tuple[str, list[int]]],
    load: Callable[[Any, Iterator[tuple[str, Any]]], None],
) -> dict[str, Any]:
    """What is told of a load."""
    said: dict[str, Any] = {}
    with FromHeaders() as watch:
        file = file_of(folder, tensors)
        model = _Model()
        watch.begin(model)
        load(model, watch.handed((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
        watch.tell(model, said.__setitem__)
    return said


BOTH = {"a": ("F32", [ROWS // 2, COLUMNS]), "b": ("F32", [ROWS // 2, COLUMNS]), "s": ("F32", [4])}


def test_parts_make_a_whole(tmp_path: Path) -> None:
    def load(model: Any, weights: Iterator[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name == "s":
                model.scale.data.copy_(tensor)
            else:
                model.large.data.narrow(0, ROWS // 2 * "ab".index(name), ROWS // 2).copy_(tensor)

    said = loaded(tmp_path, BOTH, load)
    assert said["unwritten"] == []
    assert said["unused"] == []
    assert said["parameters"] == {"large": ["float32", [ROWS, COLUMNS]], "scale": ["float32", [4]]}
    assert said["nbytes"] == 4 * (ROWS * COLUMNS + 4)


def test_the_share_that_stays_unwritten_and_who_was_not_read(tmp_path: Path) -> None:
    def load(model: Any, weights: Iterator[tuple[str, Any]]) -> None:
        (_, first), _, _ = weights
        model.large.data[: ROWS // 2, : COLUMNS // 2] = first[:, : COLUMNS // 2]
        # The same place again adds nothing.
        model.large.data.t()[: COLUMNS // 2, : ROWS // 2].copy_(first[:, : COLUMNS // 2].t())

    said = loaded(tmp_path, BOTH, load)
    assert said["shares"] == {"large": 0.75, "scale": 1.0}
    assert said["unused"] == ["b", "s"]


def test_what_a_tensor_is_made_of_is_known(tmp_path: Path) -> None:
    def load(model: Any, weights: Iterator[tuple[str, Any]]) -> None:
        (_, first), (_, second), (_, scale) = weights
        model.large.data = torch.cat([first.to(torch.float16), second.half()]).contiguous()
        assert scale.max().item() == 1.0
        assert not bool((model.large.data[0] == first[0].half()).any())  # nobody has the values

    said = loaded(tmp_path, BOTH, load)
    assert said["unused"] == []
    assert said["unwritten"] == ["scale"]
    assert said["parameters"]["large"] == ["float16", [ROWS, COLUMNS]]


def test_a_wrong_shape_is_refused_as_by_torch(tmp_path: Path) -> None:
    def load(model: Any, weights: Iterator[tuple[str, Any]]) -> None:
        (_, first), *_ = weights
        model.scale.data.copy_(first)

    with pytest.raises(RuntimeError, match="4"):
        loaded(tmp_path, BOTH, load)


def test_a_large_model_has_no_memory(tmp_path: Path) -> None:
    """Half a petabyte, reshaped, converted and copied."""
    side = 1 << 24

    def load(model: Any, weights: Iterator[tuple[str, Any]]) -> None:
        _, huge = next(weights)
        own = torch.empty(side, side, device="cpu")
        own.copy_(huge.view(torch.int16).view(torch.bfloat16).float().t().contiguous())

    said = loaded(tmp_path, {"huge": ("BF16", [side, side])}, load)
    assert said["unused"] == []
    assert said["last"] == "huge"  # nobody asked for another
