"""`nvfp4 --gptq` of a real calibration, whose experts have outlier channels: the same tensors and config
as `nvfp4` writes, codes that compressed-tensors decompresses to what `dequant` does, and what validators
say of sound ones and of codes and scales that are another's.

Run with `pytest -m peer tests/test_nvfp4_calibrated.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from calibrate_models import qwen3_moe, samples, saved, with_outliers
from checkpoints import copied, read_tensors, run_cli
from data_folders import Array, home, store
from safetensors.torch import load_file, save_file

from qconvert.core.parameter_names import NVFP4, Dialect
from qconvert.formats.nvfp4.format import group_config
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Request, validate_folder

pytestmark = pytest.mark.peer

COUNT, LENGTH = 32, 96
UP = "model.layers.1.mlp.experts.1.up_proj"
OTHER = UP.replace("experts.1", "experts.5")
DIALECTS: list[Dialect] = ["compressed-tensors", "modelopt"]
both = pytest.mark.parametrize("dialect", DIALECTS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The model, and what is made of it: rounded and calibrated in each dialect."""
    folder = tmp_path_factory.mktemp("calibrated")
    data = folder / "tokens.safetensors"
    save_file({"input_ids": torch.from_numpy(np.stack(samples(COUNT, LENGTH)))}, data)
    config = qwen3_moe(num_hidden_layers=2, moe_intermediate_size=256)
    found = {"model": with_outliers(saved(config, folder / "model"))}
    options = ("--gptq", "--data", data, "--samples", str(COUNT), "--length", str(LENGTH))
    for dialect in DIALECTS:
        for name, more in ((dialect, options), (f"rounded {dialect}", ())):
            out = found[name] = folder / name.replace(" ", "-")
            done = run_cli("nvfp4", found["model"], out, "--dialect", dialect, *more)
            assert done.code == 0, done.err
    return found


def findings(folder: Path, made: Mapping[str, Path], level: str = "full") -> list[Finding]:
    request = Request("full" if level == "full" else "sample", jobs=1)
    return list(validate_folder(folder, str(made["model"]), request=request).findings)


@both
def test_all_but_codes_and_scales_is_what_rounding_writes(
    dialect: Dialect, made: Mapping[str, Path]
) -> None:
    """Global scales are those of the weights that were solved against, which correct propagated errors:
    near the source's, and gate and up of the first layer have nothing to correct."""
    ours, plain = made[dialect], made[f"rounded {dialect}"]
    config = (ours / "config.json").read_bytes()
    assert config == (plain / "config.json").read_bytes()
    assert (ours / "hf_quant_config.json").exists() == (plain / "hf_quant_config.json").exists()
    names, solved = NVFP4[dialect], 0
    mine, others = read_tensors(ours), read_tensors(plain)
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        other = others[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        if ".experts." in name and name.endswith((f".{names.weight}", f".{names.scale}")):
            solved += tensor.data != other.data
        elif ".experts." in name and name.endswith(f".{names.global_scale}"):
            one, two = (np.frombuffer(data, "<f4")[0] for data in (tensor.data, other.data))
            assert 0.8 < one / two < 1.25, name
            assert one == two or ".layers.0." not in name or "down_proj" in name
        else:
            assert tensor.data == other.data, name
    assert solved == 2 * 2 * 3 * 8


@both
def test_gate_and_up_share_a_global_scale(dialect: Dialect, made: Mapping[str, Path]) -> None:
    found = read_tensors(made[dialect])
    end = NVFP4[dialect].global_scale
    gates = [name for name in found if name.endswith(f"gate_proj.{end}")]
    assert len(gates) == 16
    for name in gates:
        assert found[name].data == found[name.replace("gate_proj", "up_proj")].data


def test_compressed_tensors_decompresses_to_the_same(
    made: Mapping[str, Path], tmp_path: Path
) -> None:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    done = run_cli("dequant", made["compressed-tensors"], tmp_path / "out")
    assert done.code == 0, done.err
    ours = load_file(tmp_path / "out" / "model.safetensors")
    stored = load_file(made["compressed-tensors"] / "model.safetensors")
    scheme = QuantizationScheme.model_validate(group_config(["Linear"], inputs=False))
    modules = [name.removesuffix(".weight_packed") for name in stored if "weight_packed" in name]
    assert len(modules) == 2 * 3 * 8
    for module in modules:
        parts = {
            name: stored[f"{module}.{name}"]
            for name in ("weight_packed", "weight_scale", "weight_global_scale")
        }
        theirs = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
        assert theirs.dtype == ours[f"{module}.weight"].dtype
        assert torch.equal(theirs, ours[f"{module}.weight"]), module


@both
def test_manifest_and_card_say_how_it_was_made(dialect: Dialect, made: Mapping[str, Path]) -> None:
    manifest = json.loads((made[dialect] / "qconvert.json").read_bytes())
    said = manifest["calibration"]
    assert (said["solver"], said["samples"], said["refit"]) == ("best", COUNT, 2)
    assert any(step.endswith(", calibrated") for step in manifest["lossy_steps"])
    assert manifest["passes"][0]["options"]["calibrate"] == said
    card = (made[dialect] / "README.md").read_text(encoding="utf-8")
    assert f"calibrated by solver best on at most {COUNT} samples of" in card


@both
def test_calibrated_weights_have_no_finding(dialect: Dialect, made: Mapping[str, Path]) -> None:
    for level in ("sample", "full"):
        assert findings(made[dialect], made, level) == []


def packed_breakings(raw: Array) -> Iterator[tuple[str, Array]]:
    """What is done to codes [256, 64], and the new ones."""
    yield "codes of the next block", np.roll(raw, 8, 1)
    yield "rows one further down", np.roll(raw, 1, 0)
    yield "halves of bytes exchanged", (raw >> 4) | (raw << 4)
    yield "no signs", raw & 0x77
    one = raw.copy()
    one[:, 8:16] = raw[:, 16:24]
    yield "one block twice", one
    one = raw.copy()
    one[[9, 10]] = raw[[10, 9]]
    yield "two rows exchanged", one
    one = raw.copy()
    one[9] ^= 0x88
    yield "a row of the other sign", one


def scale_breakings(raw: Array) -> Iterator[tuple[str, Array]]:
    """The same of scales [256, 8], codes of E4M3, eight of which are a factor of two."""
    yield "scales of the next block", np.roll(raw, 1, 1)
    yield "scales of the row below", np.roll(raw, 1, 0)
    yield "all scales doubled", raw + np.uint8(8)
    one = raw.copy()
    one[9] += 8
    yield "scales of a row doubled", one
    for what, code in (("a scale of 0", 0), ("a scale of 448", 0x7E), ("a scale of minus", 0xB8)):
        one = raw.copy()
        one[9, 1] = code
        yield what, one
    one = raw.copy()
    one[9, 1] -= 24
    yield "a scale of an eighth", one


@both
@pytest.mark.parametrize(
    ("part", "breakings", "count"),
    [("weight", packed_breakings, 7), ("scale", scale_breakings, 8)],
    ids=["codes", "scales"],
)
def test_codes_and_scales_of_other_places(
    part: str, breakings: Callable[[Array], Iterator[tuple[str, Array]]], count: int,
    dialect: Dialect, made: Mapping[str, Path], tmp_path: Path,
) -> None:  # fmt: skip
    name = f"{UP}.{getattr(NVFP4[dialect], part)}"
    raw = np.frombuffer(home(made[dialect], name)[1].data, np.uint8).reshape(256, -1)
    seen = []
    for what, data in breakings(raw):
        out = copied(made[dialect], tmp_path / what)
        store(out, name, np.ascontiguousarray(data).reshape(-1))
        found = [f for f in findings(out, made) if f.rule == "QC060"]
        assert [f.where for f in found] == [f"{UP}.{NVFP4[dialect].weight}"], what
        assert "expected " in found[0].message
        seen.append(what)
    assert len(seen) == count


@both
@pytest.mark.parametrize("scales", [True, False])
def test_another_experts_codes(
    scales: bool, dialect: Dialect, made: Mapping[str, Path], tmp_path: Path
) -> None:
    """With their scales, and under those that are right."""
    names = NVFP4[dialect]
    out = copied(made[dialect], tmp_path / "broken")
    held = read_tensors(out)
    for part in (names.weight, names.scale) if scales else (names.weight,):
        for here, there in ((UP, OTHER), (OTHER, UP)):
            data = np.frombuffer(held[f"{there}.{part}"].data, np.uint8)
            store(out, f"{here}.{part}", data)
    found = [f for f in findings(out, made) if f.rule == "QC060"]
    assert {f.where for f in found} == {f"{UP}.{names.weight}", f"{OTHER}.{names.weight}"}


@both
def test_rounded_weights_are_still_held_to_rounding(
    dialect: Dialect, made: Mapping[str, Path], tmp_path: Path
) -> None:
    """Codes of a calibration are no finding only where the manifest speaks of one."""
    out = copied(made[f"rounded {dialect}"], tmp_path / "other")
    assert findings(out, made) == []
    for part in (NVFP4[dialect].weight, NVFP4[dialect].scale):
        data = np.frombuffer(home(made[dialect], f"{UP}.{part}")[1].data, np.uint8)
        store(out, f"{UP}.{part}", data)
    found = [f.where for f in findings(out, made) if f.rule == "QC060"]
    assert found == [f"{UP}.{NVFP4[dialect].weight}"]
