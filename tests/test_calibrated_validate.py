"""Calibrated weights as validators judge them, of a real calibration: sound ones have no finding, codes
and scales that are another's have.

Run with `pytest -m peer tests/test_calibrated_validate.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from calibrate_models import qwen3_moe, samples, saved
from checkpoints import copied, edit_json, read_tensors, run_cli
from data_folders import Array, home, store
from safetensors.torch import save_file

from qconvert.cli.demo_checkpoint import VOCAB, write_sample
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Request, validate_folder

pytestmark = pytest.mark.peer

COUNT, LENGTH = 32, 96
UP = "model.layers.1.mlp.experts.1.up_proj"
CPU = "blk.1.ffn_up_exps.1.numa.0"
WAYS: Mapping[str, tuple[str, ...]] = {
    "packed": ("w4a16", "--group-size", "32"),
    "ordered": ("w4a16", "--group-size", "32", "--actorder", "group"),
    "asymmetric": ("w4a16", "--group-size", "32", "--asymmetric", "--format", "gptq-v2"),
    "gptq": ("w4a16", "--group-size", "32", "--actorder", "group", "--format", "gptq"),
    "amx": ("amx", "--method", "int4", "--numa", "2"),
}
BEST = "best "
CORRECTED = "corrected "
BEFORE = ("", BEST, CORRECTED)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The model, and what each command makes of it."""
    folder = tmp_path_factory.mktemp("calibrated")
    data = folder / "tokens.safetensors"
    save_file({"input_ids": torch.from_numpy(np.stack(samples(COUNT, LENGTH)))}, data)
    config = qwen3_moe(num_hidden_layers=2, moe_intermediate_size=256)
    found = {"model": saved(config, folder / "model")}
    options = ("--gptq", "--data", data, "--samples", str(COUNT), "--length", str(LENGTH))
    given = {
        "": ("--solver", "llmcompressor"),
        BEST: ("--solver", "best", "--propagated-error", "ignore"),
        CORRECTED: ("--solver", "best", "--propagated-error", "correct"),
    }
    for before, solver in given.items():
        for name, (command, *more) in WAYS.items():
            out = found[before + name] = folder / (before + name)
            done = run_cli(command, found["model"], out, *more, *options, *solver)
            assert done.code == 0, done.err
    return found


def findings(folder: Path, made: Mapping[str, Path], level: str = "full") -> list[Finding]:
    request = Request("full" if level == "full" else "sample", jobs=1)
    return list(validate_folder(folder, str(made["model"]), request=request).findings)


def exchanged(folder: Path, one: str, other: str, parts: tuple[str, ...]) -> None:
    held = read_tensors(folder)
    for part in parts:
        for here, there in ((one, other), (other, one)):
            store(folder, f"{here}.{part}", np.frombuffer(held[f"{there}.{part}"].data, np.uint8))


@pytest.mark.parametrize("way", [before + way for before in BEFORE for way in WAYS])
def test_calibrated_weights_have_no_finding(way: str, made: Mapping[str, Path]) -> None:
    for level in ("sample", "full"):
        assert findings(made[way], made, level) == []


@pytest.mark.parametrize(
    "line",
    [
        "w4a16 --group-size 128", "w4a16 --group-size 32 --solver llmcompressor",
        "nvfp4 --dialect compressed-tensors", "amx --method int4 --numa 1",
    ],
)  # fmt: skip
def test_a_draft_layer_is_rounded_beside_calibrated_ones(line: str, tmp_path: Path) -> None:
    """Under scales of its largest weights, whatever the solver searches for."""
    write_sample(tmp_path / "fp8")
    source, out, data = tmp_path / "bf16", tmp_path / "out", tmp_path / "tokens.safetensors"
    assert run_cli("dequant", tmp_path / "fp8", source).code == 0
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 64))
    save_file({"input_ids": torch.from_numpy(tokens)}, data)
    command, *options = line.split()
    done = run_cli(command, source, out, *options, "--gptq", "--data", data)
    assert done.code == 0, done.err
    assert any("mtp" in name or name.startswith("blk.4") for name in read_tensors(out))
    assert findings(out, {"model": source}) == []


def breakings(folder: Path) -> Iterator[tuple[str, str, Array]]:
    """What is done to it, to which tensor, and the new bytes."""
    name = f"{UP}.weight_packed"
    raw = np.frombuffer(home(folder, name)[1].data, np.uint8).reshape(256, 64)
    yield "codes of the next group", name, np.roll(raw, 16, 1)
    yield "rows one further down", name, np.roll(raw, 1, 0)
    one = raw.copy()
    one[:, 16:32] = raw[:, 32:48]
    yield "one group twice", name, one
    name = f"{UP}.weight_scale"
    scales = np.frombuffer(home(folder, name)[1].data, "<u2").copy()
    scales[77] += 1  # a last bit
    yield "a scale rounded up", name, scales.view(np.uint8)


def test_codes_and_scales_of_other_places(made: Mapping[str, Path], tmp_path: Path) -> None:
    seen = 0
    for what, name, data in breakings(made["packed"]):
        out = copied(made["packed"], tmp_path / str(seen))
        store(out, name, np.ascontiguousarray(data).reshape(-1))
        found = [f for f in findings(out, made) if f.rule == "QC060"]
        assert [f.where for f in found] == [f"{UP}.weight_packed"], what
        seen += 1
    assert seen == 4


def searched_breakings(folder: Path) -> Iterator[tuple[str, str, Array]]:
    """The same under scales that were searched for: codes of other places, scales of another size."""
    for what, name, data in breakings(folder):
        if what != "a scale rounded up":
            yield what, name, data
    name = f"{UP}.weight_scale"
    raw = np.frombuffer(home(folder, name)[1].data, "<u2").reshape(256, -1)
    for what, where, factor in (
        ("a scale halved", (9, 1), 0.5), ("a scale of 8", (9, 1), 8), ("a row doubled", 9, 2),
        ("a scale of zero", (9, 1), 0), ("a scale of the other sign", (9, 1), -1),
        ("a row of the other sign", 9, -1),
    ):  # fmt: skip
        wide = (raw.astype(np.uint32) << 16).view(np.float32)
        wide[where] *= factor
        yield what, name, (wide.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


@pytest.mark.parametrize("way", [BEST + "packed", CORRECTED + "packed"])
def test_codes_and_scales_of_other_places_where_scales_were_searched_for(
    way: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    seen = 0
    for what, name, data in searched_breakings(made[way]):
        out = copied(made[way], tmp_path / str(seen))
        store(out, name, np.ascontiguousarray(data).reshape(-1))
        found = [f for f in findings(out, made) if f.rule == "QC060"]
        assert [f.where for f in found] == [f"{UP}.weight_packed"], what
        seen += 1
    assert seen == 9


@pytest.mark.parametrize("way", ["packed", "gptq"])
def test_the_best_solver_makes_scales_of_both_signs(
    way: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    """And a folder that says it has none is held to it."""
    name = f"{UP}.weight_scale" if way == "packed" else f"{UP}.scales"
    out = copied(made[BEST + way], tmp_path / "out")
    bits = np.frombuffer(home(out, name)[1].data, "<u2")
    assert 0.2 < np.mean(bits >> 15) < 0.8
    manifest = (out / "qconvert.json").read_text()
    (out / "qconvert.json").write_text(manifest.replace("signs='both', ", ""))
    edit_json(out / "qconvert.json", lambda said: said["calibration"].pop("signs"))
    found = [f for f in findings(out, made) if f.rule == "QC068"]
    assert any(f.where == name and "0 or more" in f.message for f in found)


@pytest.mark.parametrize("way", [before + way for before in BEFORE for way in WAYS if way != "amx"])
@pytest.mark.parametrize("scales", [True, False])
def test_another_experts_codes(
    way: str, scales: bool, made: Mapping[str, Path], tmp_path: Path
) -> None:
    """With their scales, and under those that are right."""
    out = copied(made[way], tmp_path / "broken")
    turned = f"{UP}.qweight" in read_tensors(out)
    parts = ("qweight", "scales") if turned else ("weight_packed", "weight_scale")
    other = UP.replace("experts.1", "experts.5")
    exchanged(out, UP, other, parts if scales else parts[:1])
    found = [f for f in findings(out, made) if f.rule == "QC060"]
    assert {f.where for f in found} == {f"{UP}.{parts[0]}", f"{other}.{parts[0]}"}
    if way.startswith(
        (BEST, CORRECTED)
    ):  # whose scales may be those of other weights of the same size
        says = "expected "
    else:
        says = "expected a scale of" if scales else "with a cosine of at least"
    assert all(says in f.message for f in found)


@pytest.mark.parametrize("way", [before + "amx" for before in BEFORE])
@pytest.mark.parametrize("parts", [("weight", "scale"), ("weight",)])
def test_another_experts_amx_codes(
    parts: tuple[str, ...], way: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    out = copied(made[way], tmp_path / "broken")
    other = CPU.replace("exps.1", "exps.5")
    exchanged(out, CPU, other, parts)
    found = [f for f in findings(out, made) if f.rule == "QC042"]
    assert {f.where for f in found} == {f"{CPU}.weight", f"{other}.weight"}
    assert all("expected " in f.message for f in found)


@pytest.mark.parametrize("factor", [8, 2, 0.5])
@pytest.mark.parametrize("way", [before + "amx" for before in BEFORE])
def test_amx_steps_of_another_size(
    way: str, factor: float, made: Mapping[str, Path], tmp_path: Path
) -> None:
    out = copied(made[way], tmp_path / "broken")
    name = f"{CPU}.scale"
    scales = np.frombuffer(home(out, name)[1].data, "<f4").copy()
    scales *= factor  # codes keep their direction
    store(out, name, scales.view(np.uint8))
    found = [f for f in findings(out, made) if f.rule == "QC042"]
    assert [f.where for f in found] == [f"{CPU}.weight"]
