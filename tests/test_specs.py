"""A stored format of another package: how it is stored, stated and read stands in one module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import numpy as np
import pytest
from acme4 import config_group
from checkpoints import Model, Result, Tensor
from other_package import installed, run_beside

SPEC = (Path(__file__).parent / "acme4.py").read_text(encoding="utf-8")


def encode(tensor: Tensor) -> dict[str, Tensor]:
    """A matrix BF16 as Acme4."""
    rows, columns = tensor.shape
    bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
    blocks = bits.view(np.float32).reshape(rows, -1, 64)
    low = blocks.min(axis=2)
    offset = (low.view(np.uint32) >> 16).astype("<u2")
    start = (offset.astype(np.uint32) << 16).view(np.float32)
    scale = ((blocks.max(axis=2) - start) / 15).astype(np.float16)
    steps = (blocks - start[..., None]) / scale.astype(np.float32)[..., None]
    codes = np.clip(np.rint(steps), 0, 15).astype(np.uint8)
    packed = codes[..., :32] | codes[..., 32:] << 4
    grid = (rows, columns // 64)
    return {
        "weight_acme": Tensor("U8", (rows, columns // 2), packed.tobytes()),
        "weight_scale": Tensor("F16", grid, scale.tobytes()),
        "weight_offset": Tensor("BF16", grid, offset.tobytes()),
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site")
    return installed(root, "acme4", {"form": SPEC}, {"qconvert.formats": "form"})


def usual(random: np.random.Generator, tensor: Tensor) -> Tensor:
    values = random.normal(size=tensor.shape).astype(np.float32)
    return tensor._replace(data=(values.view(np.uint32) >> 16).astype("<u2").tobytes())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose experts are ordinary numbers."""
    random, model = np.random.default_rng(1), models.qwen3_moe()
    for name, tensor in model.tensors.items():
        if ".experts." in name:
            model.tensors[name] = usual(random, tensor)
    return model


@pytest.fixture
def made(source: Model) -> Model:
    """The same with its experts as Acme4."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in source.tensors.items():
        stem = name.removesuffix("weight")
        parts = encode(tensor) if ".experts." in name else {"weight": tensor}
        if not name.endswith("weight"):
            parts, stem = {"": tensor}, name
        tensors |= {stem + end: part for end, part in parts.items()}
    config = {**source.config, "quantization_config": {"quant_method": "acme"}}
    return Model(config, tensors, source.side_files)


def validated(site: Path, source: Model, made: Model, folder: Path) -> Result:
    told = source.write(folder / "source")
    words = ("--against", told, "--level", "full", "--jobs", "1")
    return run_beside(site, "validate", made.write(folder / "made"), *words)


def test_a_format_of_another_package_is_validated(
    site: Path, source: Model, made: Model, tmp_path: Path
) -> None:
    result = validated(site, source, made, tmp_path)
    assert result.code == 0, result.out + result.err
    assert "every weight is the source's within its format's rounding" in result.out
    assert "acme4" in result.out


@pytest.mark.parametrize(
    ("part", "change", "rule"),
    [
        ("weight_acme", lambda data: data[:7] + bytes([data[7] ^ 0x80]) + data[8:], "QC060"),
        ("weight_scale", lambda data: data[2:4] + data[:2] + data[4:], "QC060"),
        ("weight_offset", lambda data: data[:1] + bytes([data[1] ^ 0x80]) + data[2:], "QC060"),
        ("weight_scale", lambda data: b"\0\x7c" + data[2:], "QC068"),
        ("weight_offset", None, "QC027"),
    ],
)
def test_faults_of_it_are_found(
    part: str, change: Callable[[bytes], bytes] | None, rule: str,
    site: Path, source: Model, made: Model, tmp_path: Path,
) -> None:  # fmt: skip
    name = f"model.layers.1.mlp.experts.0.down_proj.{part}"
    tensor = made.tensors.pop(name)
    if change is not None:
        made.tensors[name] = tensor._replace(data=change(tensor.data))
    result = validated(site, source, made, tmp_path)
    assert result.code == 3, result.out + result.err
    assert rule in result.out


def test_a_config_that_states_another_form_is_found(
    site: Path, source: Model, made: Model, tmp_path: Path
) -> None:
    group = config_group(["Linear"])
    for bits, said in ((4, ""), (8, "is stored as Acme4, but")):
        group["weights"]["num_bits"] = bits
        made.config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "acme4", "config_groups": {"group_0": group},
        }  # fmt: skip
        result = validated(site, source, made, tmp_path / str(bits))
        assert ("QC096" in result.out) == bool(said)
        assert said in result.out
