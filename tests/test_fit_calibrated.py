"""`qconvert fit` with data: codes of a mixture that a calibration of the same samples finds, on small
models trained on a language of their own; each layer's experts in the format that was chosen for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import calibrate_models as models
import numpy as np
import pytest
import torch
from calibrate_models import Kept, calibrated, hf, meant, same, saved
from checkpoints import ran, read_tensors
from faults import differing, tree
from layer_models import stacked_fp8
from loaders.published import published
from made_once import made_once
from safetensors.torch import load_file, save_file

from qconvert import api
from qconvert.calibrate import backend
from qconvert.calibrate.settings import Settings
from qconvert.core.int_scheme import IntScheme
from qconvert.fit import NAMES
from qconvert.fit.fitting import Budget, Fitting
from qconvert.fit.groups import FORMS, model_of, solved_steps, steps_of
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.runtimes.consumers import Consumer
from qconvert.samples.request import Calibration

VOCAB, LENGTH = 64, 48
FORMATS = ("fp8-channel", "nvfp4", "w4a16-g128")


def sentences(count: int, seed: int) -> torch.Tensor:
    """Samples [count, LENGTH] of a language: two words say which four may follow, one of them often."""
    rules = np.random.default_rng(7).integers(0, VOCAB, (VOCAB, 8, 4))
    chance = np.random.default_rng(seed)
    found = chance.integers(0, VOCAB, (count, LENGTH))
    for at in range(2, LENGTH):
        which = np.minimum(chance.integers(0, 8, count), chance.integers(0, 4, count))
        found[:, at] = rules[found[:, at - 1], found[:, at - 2] % 8, which % 4]
    return torch.from_numpy(found)


def trained(config: Any, folder: Path) -> None:
    """Some steps of training, the same each time."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(80):
        tokens = sentences(16, 100 + step)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.to(torch.bfloat16).save_pretrained(folder)


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "moe_intermediate_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
MAKES: Mapping[str, models.Make] = {"moe": models.qwen3_moe, "dense": models.qwen3}


def _source(name: str) -> Path:
    return made_once(f"fit-trained-{name}", lambda at: trained(MAKES[name](**SIZES), at))


def _data(file: Path, count: int, seed: int) -> Path:
    rows = sentences(count, seed).tolist()
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return file


def _fitting(name: str, room: Path, **more: Any) -> Fitting:
    data = _data(room / "calibration.jsonl", 16, 1)
    options: dict[str, Any] = {
        "samples": 16, "length": LENGTH, "devices": ["cpu"], "work_dir": room / "measured", **more,
    }  # fmt: skip
    return api.fitting(_source(name), data, formats=FORMATS, **options)


def _kl(folder: Path, name: str, room: Path) -> float:
    """On sentences that were not in the calibration."""
    held = _data(room / "held.jsonl", 32, 2)
    found = api.evaluate(
        folder, _source(name), held, samples=32, length=LENGTH, devices=["cpu"]
    ).logits
    assert found is not None
    return found.kl


def test_formats_cost_what_their_calibrated_codes_lose(tmp_path: Path) -> None:
    """Those that have some, the others what they cost without data; and so a choice as a whole."""
    fitting = _fitting("dense", tmp_path)
    plain = replace(fitting, calibrates=False)
    assert fitting.folder != plain.folder
    own, rounded = (one.measured().costs() for one in (fitting, plain))
    assert len(own) == len(rounded)

    def total(costs: Sequence[Mapping[str, float]], form: str) -> float:
        return sum(one[form] for one in costs)

    assert total(own, "w4a16-g128") < 0.8 * total(rounded, "w4a16-g128")
    for form in ("fp8-channel", "nvfp4"):
        assert total(own, form) == total(rounded, form)
    every = [forms.index("w4a16-g128") for forms in fitting.choices.forms]
    assert fitting.mixture_kl(every) < 0.8 * plain.mixture_kl(every)


class _Killed(Exception):
    pass


@pytest.mark.parametrize("name", [pytest.param("moe", marks=pytest.mark.big), "dense"])
def test_calibrated_codes_lose_less_in_the_same_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an interrupted conversion goes on to the same bytes; the manifest says how each part was
    made."""
    fitting = _fitting(name, tmp_path)
    found = fitting.fit(Budget(bits=4.55))
    assert found.solved
    out, rounded = tmp_path / "out", tmp_path / "rounded"
    plain = steps_of(fitting.model, found.chosen)
    api.run(api.Recipe("fit", plain), _source(name), rounded, jobs=1)
    api.run(api.Recipe("fit", found.steps), _source(name), out, jobs=1)
    sizes = {key: (one.dtype, one.shape) for key, one in read_tensors(rounded).items()}
    assert {key: (one.dtype, one.shape) for key, one in read_tensors(out).items()} == sizes
    configs = [json.loads((at / "config.json").read_bytes()) for at in (out, rounded)]
    schemes = [
        sorted(json.dumps(group["weights"]) for group in one["config_groups"].values())
        for one in (config["quantization_config"] for config in configs)
    ]
    assert sorted(set(schemes[0])) == sorted(set(schemes[1]))
    assert _kl(out, name, tmp_path) < 0.8 * _kl(rounded, name, tmp_path)
    said = ran("validate", out, "--against", _source(name), "--level", "full").out
    assert "calibrated weights have scales that fit the source's" in said
    manifest = json.loads((out / "qconvert.json").read_bytes())
    assert manifest["calibration"]["solver"] == "best"
    beside = any(group.modules for groups in found.solved.values() for group in groups)
    assert manifest["calibration"]["propagated_error"] == ("ignore" if beside else "correct")
    told = {(one["layer"], one["part"]): one["calibrated"] for one in found.as_object()["groups"]}
    wanted = {(one.layer, one.part) for groups in found.solved.values() for one in groups}
    assert {place for place, solved in told.items() if solved} == wanted

    solved, seen = backend._solved, list[int]()

    def killed(*given: Any) -> Any:
        seen.append(1)
        if len(seen) == 5:
            raise _Killed
        return solved(*given)

    monkeypatch.setattr(backend, "_solved", killed)
    again = tmp_path / "again"
    with pytest.raises(_Killed):
        api.run(api.Recipe("fit", found.steps), _source(name), again, jobs=1)
    assert not (again / "config.json").exists()
    api.run(api.Recipe("fit", found.steps), _source(name), again, jobs=1)
    assert differing(tree(again), tree(out)) == []


def test_with_rtn_all_codes_are_rounded(tmp_path: Path) -> None:
    """Data show what matters all the same."""
    words: list[str | Path] = [
        "fit", _source("dense"), tmp_path / "out", "--bits", "4.55", "--data",
        _data(tmp_path / "calibration.jsonl", 4, 1), "--samples", "4", "--length", str(LENGTH),
        "--device", "cpu", "--measured", tmp_path / "measured", "--print-recipe",
        "--formats", "w4a16-g32", "--formats", "fp8-channel",
    ]  # fmt: skip
    solved, rounded = ran(*words), ran(*words, "--rtn")
    assert "calibrate:" in solved.out
    assert "calibrate" not in rounded.out
    choice = ran(*words[:-5], "--choose-only", *words[-4:]).out
    assert "w4a16-g32) are calibrated" in choice
    told = ran(*words[:-5], "--choose-only", *words[-4:], "--rtn").out
    assert "calibrated" not in told


def test_what_is_rounded_beside_calibrated_codes_is_judged_so(tmp_path: Path) -> None:
    """By its own step: codes of 8 bits are the nearest, and those of 4 bits need not be."""
    request = Calibration(synthetic=True, samples=2, length=LENGTH, devices=("cpu",))
    steps = (
        ExpertsToW4A16(bits=8, targets=("o_proj",)),
        ExpertsToW4A16(group_size=32, targets=("down_proj",), calibrate=request),
    )
    api.run(api.Recipe("mixture", steps), _source("dense"), tmp_path / "out", jobs=1)
    words: list[str | Path] = ["--against", _source("dense"), "--level", "full", "-v"]
    said = ran("validate", tmp_path / "out", *words).out
    assert "how good the codes of 2 calibrated matrices are" in said


def test_formats_are_those_that_options_name() -> None:
    assert tuple(form.name for form in FORMS) == NAMES


@pytest.mark.parametrize("stacked", [False, True])
def test_what_was_decoded_is_solved_as_it_was_stored(stacked: bool, tmp_path: Path) -> None:
    """A quantized source is decoded first; stacks that were are rounded, because a calibration reads one
    matrix at a time."""
    made = stacked_fp8() if stacked else published("qwen3_moe", inner=256, fp8=True)
    source = made.write(tmp_path / "source")
    fitted = model_of(api.open_checkpoint(source), Consumer("vllm"))
    chosen = {"w4a16-g32": fitted.groups}
    request = Calibration(synthetic=True, samples=1, length=8)
    found = solved_steps(fitted, chosen, request)
    solved = [group for groups in found.groups.values() for group in groups]
    assert {group.experts for group in solved} == ({False} if stacked else {False, True})
    steps = [one for one in found.steps if isinstance(one, ExpertsToW4A16)]
    assert [one.calibrate is not None for one in steps] == ([True, False] if stacked else [True])
    assert len(found.steps) == len(steps) + 1  # decoded first


# --- Experts of each layer in their own format -----------------------------------------------------

ALONE = Settings(min_tokens=1, propagated_error="ignore")
CORRECTS = Settings(min_tokens=1, propagated_error="correct")
G32, G64 = IntScheme(4, 32), IntScheme(4, 64)
TOKENS = models.samples(6, 40)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers") / "model"
    return saved(models.qwen3_moe(num_hidden_layers=3), folder)


def _solved(folder: Path, room: Path, schemes: Any, settings: Settings) -> Kept:
    return calibrated(folder, room, TOKENS, schemes, settings, statistics=False)


def test_layers_have_schemes_of_their_own(layers: Path, tmp_path: Path) -> None:
    """A layer sees what those before it make as they will be served: the codes are those of a
    model in which these layers have been replaced."""
    mixed = _solved(layers, tmp_path / "mixed", {0: [G32], 2: [G64]}, ALONE)
    assert {layer for layer, _, _ in mixed.made} == {0, 2}
    tensors = load_file(layers / "model.safetensors")
    for (layer, expert, kind), (codes,) in mixed.made.items():
        if layer == 0:
            name = f"model.layers.0.mlp.experts.{expert}.{kind}.weight"
            tensors[name] = meant(codes, G32)
    replaced = tmp_path / "replaced"
    replaced.mkdir()
    for file in layers.iterdir():
        (replaced / file.name).write_bytes(file.read_bytes())
    save_file(tensors, replaced / "model.safetensors", {"format": "pt"})
    last = _solved(replaced, tmp_path / "last", {2: [G64]}, ALONE)
    plain = _solved(layers, tmp_path / "plain", {2: [G64]}, ALONE)
    assert last.made.keys() == plain.made.keys()
    assert all(same(codes[0], mixed.made[key][0]) for key, codes in last.made.items())
    assert not all(same(codes[0], mixed.made[key][0]) for key, codes in plain.made.items())


def test_where_no_layer_before_is_quantized_there_is_no_error_to_correct(
    layers: Path, tmp_path: Path
) -> None:
    """Both streams go through a layer that stays as it is."""
    one, other = (
        _solved(layers, tmp_path / settings.propagated_error, {1: [G32]}, settings)
        for settings in (ALONE, CORRECTS)
    )
    assert {layer for layer, _, _ in one.made} == {1}
    # down follows from codes of gate and up, which it can make up for.
    keys = [key for key in one.made if key[2] != "down_proj"]
    assert all(same(one.made[key][0], other.made[key][0]) for key in keys)
