"""Tensors converted in memory: the bytes of a conversion of the folder, without one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gdn_models
import numpy as np
import pytest
import torch
from checkpoints import bf16_moe, fp8_moe
from safetensors.torch import load_file

from qconvert import api
from qconvert.passes.dequant import Dequant
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.fuse import Fuse
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.samples.request import Calibration


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linear attention, so that there is something to fuse, and experts."""
    model = gdn_models.model("qwen3_5_moe_text")
    return model.write(tmp_path_factory.mktemp("memory") / "bf16")


def held(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors, json.loads((folder / "config.json").read_text(encoding="utf-8"))


def as_bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (str(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


STEPS = [
    ToFp8(), ToFp8(exponents=True), ExpertsToW4A16(group_size=16), ToNvfp4(dialect="compressed-tensors"),
    ToNvfp4(targets=("Linear",)), Fuse(consumer="sglang"),
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_the_bytes_are_those_of_the_folder(step: Any, bf16: Path, tmp_path: Path) -> None:
    tensors, config = held(bf16)
    made = api.run(step, bf16, tmp_path / "out", jobs=1)
    want, wanted_config = held(made.folder)
    converter = api.converter(step, tensors, config)
    got = dict(converter.stream(tensors))
    assert as_bytes(got) == as_bytes(want)
    assert converter.config == wanted_config
    assert {name: str(kind) for name, kind in converter.types.items()} == {
        name: str(source.type) for name, source in api.open_checkpoint(made.folder).items()
    }


def test_quantized_weights_are_read_too(tmp_path: Path) -> None:
    folder = fp8_moe().write(tmp_path / "source")
    made = api.run(Dequant(), folder, tmp_path / "out", jobs=1)
    got = api.convert(Dequant(), *held(folder))
    assert as_bytes(got) == as_bytes(held(made.folder)[0])


def test_one_plan_takes_new_values(bf16: Path) -> None:
    tensors, config = held(bf16)
    converter = api.converter(ToFp8(), tensors, config)
    first = dict(converter.stream(tensors))
    later = {name: -tensor for name, tensor in tensors.items()}
    second = dict(converter.stream(later))
    assert as_bytes(second) == as_bytes(api.convert(ToFp8(), later, config))
    assert as_bytes(second) != as_bytes(first)


class Asked(Mapping[str, Any]):
    """Tensors that note when each was asked for, as a trainer that gathers them from its ranks."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors, self.names = tensors, list[str]()

    def __getitem__(self, name: str) -> Any:
        self.names.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_a_tensor_is_asked_for_when_a_result_needs_it(bf16: Path) -> None:
    tensors, config = held(bf16)
    converter = api.converter(ToFp8(), tensors, config)
    asked = Asked(tensors)
    stream = converter.stream(asked)
    assert asked.names == []
    name, _ = next(stream)
    assert set(asked.names) == {name}
    rest = [name for name, _ in stream]
    assert [name, *rest] == list(converter.types)
    assert set(asked.names) == set(tensors)
    assert len(asked.names) == len(tensors)  # each once: codes and scales are of one computation


def test_arrays_of_numpy(tmp_path: Path) -> None:
    """Where numpy has all dtypes; elsewhere it is refused before anything is computed."""
    model = bf16_moe()
    tensors, config = held(model.write(tmp_path / "source"))
    arrays = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    config = {**config, "torch_dtype": "float32"}
    copied = api.convert("copy", arrays, config)
    assert {name: array.tobytes() for name, array in copied.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }
    assert all(isinstance(array, np.ndarray) for array in copied.values())
    with pytest.raises(api.PlanError, match=r"numpy has no (BF16|F8_E4M3); give tensors of torch"):
        api.converter(ToFp8(), arrays, config)


def test_what_is_refused(bf16: Path) -> None:
    tensors, config = held(bf16)
    with pytest.raises(api.DataError, match="x: expected a tensor of torch or an array"):
        api.converter("copy", {"x": [1.0]}, config)
    with pytest.raises(api.CheckpointError, match="no tensors are given"):
        api.converter("copy", {}, config)
    with pytest.raises(api.CheckpointError, match="the config is not what"):
        api.converter("copy", tensors, {**config, "x": object()})
    calibrated = ExpertsToW4A16(group_size=32, calibrate=Calibration(synthetic=True))
    with pytest.raises(api.PlanError, match="a calibration runs the model"):
        api.converter(calibrated, tensors, config)
    converter = api.converter("copy", tensors, config)
    name = next(iter(converter.types))
    less = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(
        api.DataError, match=f"{name}: expected .* as planned, found no such tensor"
    ):
        dict(converter.stream(less))
    with pytest.raises(api.DataError, match=f"{name}: expected BF16 .*, found F32 .*; plan again"):
        dict(converter.stream({**tensors, name: tensors[name].float()}))


def test_data_that_cannot_be_right_names_the_tensor(tmp_path: Path) -> None:
    tensors, config = held(fp8_moe().write(tmp_path / "source"))
    scale = next(name for name in tensors if name.endswith("down_proj.weight_scale_inv"))
    bad = {**tensors, scale: tensors[scale] * float("inf")}
    with pytest.raises(api.RunError, match=scale.removesuffix("_scale_inv").replace(".", r"\.")):
        api.convert(Dequant(), bad, config)


def test_a_strided_tensor_is_read_as_it_is_seen(bf16: Path) -> None:
    tensors, config = held(bf16)
    name = "lm_head.weight"
    turned = {**tensors, name: tensors[name].t().contiguous().t()}
    assert not turned[name].is_contiguous()
    assert as_bytes(api.convert("copy", turned, config)) == as_bytes(tensors)
