"""What the calibration backend refuses before anything is written, and what tells its work apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrated_plans import SYNTHETIC, MadeUp, amx_plan
from checkpoints import ran, run_cli
from models import qwen3_moe

from qconvert.calibrate.backend import GptqBackend, backend_for
from qconvert.calibrate.devices import check_devices, each_once, guessed_devices, kind_of
from qconvert.calibrate.expert_stats import begin
from qconvert.calibrate.gpu_workers import CalibrationArgs, WorkerPool
from qconvert.calibrate.settings import Settings
from qconvert.core.errors import DataError, OutputError, PlanError, RunError
from qconvert.plan.plan import Plan
from qconvert.run.executor import execute
from qconvert.samples.data import load_tokens
from qconvert.samples.request import Calibration, fact

HIDDEN, INTERMEDIATE = 128, 256


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = qwen3_moe("bf16", hidden=HIDDEN, intermediate=INTERMEDIATE)
    model.config["vocab_size"] = 8
    return model.write(tmp_path_factory.mktemp("backend") / "source")


def test_a_request_is_kept_with_the_settings_of_its_solver() -> None:
    of_other = Calibration(synthetic=True, solver="llmcompressor")
    found = fact(of_other, "d")
    assert found.keys() == {
        "data", "length", "seed", "samples", "synthetic", "column", "dampening_frac", "block_size",
        "experts", "min_tokens", "undersampled", "solver",
    }  # fmt: skip
    best = fact(Calibration(synthetic=True), "d")
    assert {key: best[key] for key in best.keys() - found.keys()} == {
        "scales": "search", "signs": "both", "order": "importance", "refit": 2,
        "descent": 2, "propagated_error": "correct",
    }  # fmt: skip
    assert (best["solver"], found["solver"]) == ("best", "llmcompressor")


def test_every_setting_reaches_the_solver() -> None:
    asked = Calibration(
        synthetic=True, solver="best", scales="amax", signs="positive", order="stored", refit=1,
        descent=3, propagated_error="ignore",
    )  # fmt: skip
    found = Settings.of(asked)
    assert (found.solver, found.scales, found.order) == ("best", "amax", "stored")
    assert (found.signs, found.refit, found.descent) == ("positive", 1, 3)
    assert not found.corrects
    assert Settings.of(Calibration(synthetic=True)).corrects
    assert (
        Settings.of(Calibration(synthetic=True, solver="llmcompressor")).solver == "llmcompressor"
    )


def test_a_request_that_corrects_says_so_and_takes_twice_the_disk(source: Path) -> None:
    for said in ("ignore", "correct"):
        asked = Calibration(synthetic=True, propagated_error=said)
        assert fact(asked, "d")["propagated_error"] == said
    needs = [
        made(amx_plan(source, replace(SYNTHETIC, devices=("cpu",), propagated_error=what))).needs()
        for what in ("ignore", "correct")
    ]
    tokens = SYNTHETIC.samples * SYNTHETIC.length
    assert needs[1].disk - needs[0].disk == tokens * (8 * HIDDEN + 128)
    assert needs[1].memory > needs[0].memory


def made(plan: Plan) -> GptqBackend:
    backend = backend_for([plan])
    assert backend is not None
    return backend


@pytest.mark.parametrize(
    ("field", "value"),
    [("dampening_frac", 0.0), ("dampening_frac", 1.0), ("dampening_frac", float("nan")),
     ("block_size", 0), ("min_tokens", 0)],
)  # fmt: skip
def test_settings_out_of_range_are_refused_at_planning(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=field):
        Calibration(**{"synthetic": True, field: value})
    with pytest.raises(DataError, match="expected a seed"):  # what holds for data holds here
        Calibration(synthetic=True, seed=-1)


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "cpu:0"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(
    name: str, source: Path, tmp_path: Path
) -> None:
    plan = amx_plan(source, replace(SYNTHETIC, devices=("cpu", name)))
    with pytest.raises(RunError, match=f"device '{name}': expected one that torch"):
        execute(plan, tmp_path / "out", backend=made(plan))
    assert list(tmp_path.iterdir()) == []


def test_devices_that_are_there() -> None:
    check_devices(["cpu", "cpu"])
    assert (kind_of(["cpu", "cpu"]), kind_of(["cuda:0", "cpu"])) == ("cpu", "cuda")


def test_data_that_cannot_be_used_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"input_ids": [1, 2]}\n{"input_ids": [3, 99]}\n')
    plan = amx_plan(source, Calibration(str(data), samples=2, length=8))
    with pytest.raises(DataError, match=r"data\.jsonl:2: token id 99 is outside"):
        execute(plan, tmp_path / "out", backend=made(plan))
    assert [file.name for file in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize("place", ["out/stats", "out", ".", "source"])
def test_statistics_lie_apart_from_source_and_result(
    place: str, source: Path, tmp_path: Path
) -> None:
    stats = source / "stats" if place == "source" else tmp_path / place
    plan = amx_plan(source, replace(SYNTHETIC, save_stats=str(stats)))
    with pytest.raises(OutputError, match="apart from"):
        execute(plan, tmp_path / "out", backend=made(plan))
    assert list(tmp_path.iterdir()) == []
    assert not (source / "stats").exists()


def test_a_folder_of_other_statistics_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    stats = tmp_path / "stats"
    request = replace(SYNTHETIC, save_stats=str(stats))
    one, same, other = (amx_plan(source, request, numa) for numa in (1, 1, 2))
    begin(stats, made(one)._about())
    made(same).check([tmp_path / "out"])
    with pytest.raises(OutputError, match="another calibration"):  # other formats
        execute(other, tmp_path / "out", backend=made(other))
    assert not (tmp_path / "out").exists()


def test_statistics_tell_models_apart(source: Path, tmp_path: Path) -> None:
    """Of one shape, with other weights."""
    model = qwen3_moe("bf16", hidden=HIDDEN, intermediate=INTERMEDIATE)
    model.config["vocab_size"] = 8
    copy = model.write(tmp_path / "copy")
    shard = next(copy.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    request = replace(SYNTHETIC, save_stats=str(tmp_path / "stats"))
    one, other = (made(amx_plan(folder, request))._about() for folder in (source, copy))
    assert one["source_sample"] != other["source_sample"]
    assert str(tmp_path) not in json.dumps(one)


def test_samples_are_read_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = load_tokens

    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr("qconvert.calibrate.backend.load_tokens", counted)
    backend = made(amx_plan(source))
    backend.check([])
    assert len(backend._data[0]) == SYNTHETIC.samples
    assert len(calls) == 1


def test_nothing_left_to_do_is_said_and_not_checked_again(source: Path, tmp_path: Path) -> None:
    first, second = MadeUp(HIDDEN, INTERMEDIATE), MadeUp(HIDDEN, INTERMEDIATE)
    plan = amx_plan(source, replace(SYNTHETIC, save_stats=str(tmp_path / "stats")))
    execute(plan, tmp_path / "out", backend=first)
    assert first.checked == [(tmp_path / "out",)]
    again = execute(plan, tmp_path / "out", backend=second)
    assert (again.already_done, again.remarks, second.checked) == (True, ("nothing made",), [])
    remarks = execute(plan, tmp_path / "out", backend=made(plan)).remarks
    assert len(remarks) == 1
    assert "no statistics" in remarks[0]
    assert not (tmp_path / "stats").exists()


def test_the_work_dir_is_of_a_kind_of_device(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of a CPU and of a GPU do not mix; and nothing runs after the last layer wanted."""

    class RoutedInputs(Exception):
        pass

    def seen(*_: Any, key: str, last: int, **__: Any) -> None:
        raise RoutedInputs(key.split()[1:], last)

    class Fake(WorkerPool):
        """A process that is not started."""

        def __init__(self, devices: Sequence[str]) -> None:
            self.devices = tuple(devices)

        def calibrate(self, given: CalibrationArgs | None, *_: Any) -> Any:
            assert given is not None
            seen(key=given.key, last=given.last or 0)

        def end(self, *, waits: bool = True) -> None:
            pass

    monkeypatch.setattr("qconvert.calibrate.engine.calibrate", seen)
    monkeypatch.setattr("qconvert.calibrate.backend.WorkerPool", Fake)
    monkeypatch.setattr("qconvert.calibrate.backend.check_devices", lambda _: None)
    for name, kind in (("cpu", "cpu"), ("cuda:1", "cuda")):
        plan = amx_plan(source, replace(SYNTHETIC, devices=(name,)))
        with pytest.raises(RoutedInputs) as caught:
            execute(plan, tmp_path / name, backend=made(plan))
        assert caught.value.args == ([kind], 1)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ((), ()),
        (("cpu", "cpu"), ("cpu", "cpu")),
        (("cuda", "cuda:1", "cuda:0"), ("cuda:0", "cuda:1")),
    ],
)
def test_a_gpu_is_used_once(given: tuple[str, ...], used: tuple[str, ...]) -> None:
    assert each_once(given) == used


def test_a_cpu_beside_gpus_is_refused() -> None:
    with pytest.raises(RunError, match="codes of both do not mix; give one kind"):
        each_once(("cuda:0", "cpu"))


@pytest.mark.parametrize(
    ("visible", "found"), [("", ()), ("0,2", ("cuda:0", "cuda:1")), ("GPU-8a", ("cuda:0",))]
)
def test_gpus_are_guessed_from_what_is_visible(
    visible: str, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert guessed_devices() == found


LLM_COMPRESSOR = """
default_stage:
  default_modifiers:
    GPTQModifier:
      ignore: [lm_head, "re:.*mlp.gate$", "re:.*self_attn.*"]
      targets: [Linear]
      scheme: W4A16
"""


def test_split_takes_data_for_a_recipe(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(LLM_COMPRESSOR)
    plain: list[str | Path] = ["split", source, tmp_path / "out", "--pp", "1,1", "--dry-run"]
    assert run_cli(*plain, "--synthetic").code == 2
    without = run_cli(*plain, "--recipe", recipe)
    assert (without.code, "needs data" in without.err) == (1, True)
    few = ["--synthetic", "--samples", "2", "--length", "8"]
    given = ran(*plain, "--recipe", recipe, *few)
    assert "calibrated (12 times)" in given.out


@pytest.mark.big
def test_the_libraries_say_nothing_on_stdout() -> None:
    """--json is alone there: llm-compressor warns, as it is imported, of a machine without a GPU."""
    code = (
        "from qconvert.calibrate.backend import silence_llm_compressor\n"
        "silence_llm_compressor()\n"
        "from llmcompressor.utils.dev import get_main_device\n"
        "get_main_device()\n"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout == ""
