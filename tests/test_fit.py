"""`qconvert fit`: the solver against all choices, what was measured against whole models as transformers
runs them, budgets to the byte."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import calibrate_models as models
import eval_oracle as oracle
import numpy as np
import pytest
import torch
from checkpoints import convert, ran, run_cli
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders.published import published
from made_once import made_once

from qconvert import api
from qconvert.calibrate.activation_store import ScratchRows
from qconvert.core.errors import OutputError, PlanError, RunError, UsageError
from qconvert.evaluate import engine, head
from qconvert.fit import ACTIVATIONS, NAMES
from qconvert.fit import fitting as fit_module
from qconvert.fit import measure as measuring
from qconvert.fit.fitting import Budget, Fit, Fitting, cache_bytes
from qconvert.fit.groups import STAY, Group, model_of, steps_of, targets_of
from qconvert.fit.measure import Measured
from qconvert.fit.solve import Option, solve
from qconvert.models.linears import matches
from qconvert.plan.plan import Plan
from qconvert.runtimes.consumers import Consumer

# --- The solver against all choices ----------------------------------------------------------------

_COSTS = st.one_of(st.floats(0, 10, allow_nan=False), st.integers(0, 4).map(float))
_GROUPS = st.lists(
    st.lists(st.builds(Option, st.integers(1, 40), _COSTS), min_size=1, max_size=4),
    min_size=1, max_size=5,
)  # fmt: skip


def best(groups: Sequence[Sequence[Option]], budget: int) -> tuple[float, int]:
    """Least cost, and of those the fewest bytes, by trying every choice."""
    every = itertools.product(*groups)
    fitting = [one for one in every if sum(o.nbytes for o in one) <= budget]
    return min((sum(o.cost for o in one), sum(o.nbytes for o in one)) for one in fitting)


@settings(max_examples=300, deadline=None)
@given(_GROUPS, st.integers(0, 60))
def test_the_choice_is_the_best_of_all(groups: list[list[Option]], more: int) -> None:
    least = sum(min(o.nbytes for o in options) for options in groups)
    found = solve(groups, least + more)
    cost, _ = best(groups, least + more)
    assert found.cost == pytest.approx(cost, rel=1e-9, abs=1e-9)
    assert found.nbytes <= least + more
    chosen = [options[n] for options, n in zip(groups, found.chosen, strict=True)]
    assert found.nbytes == sum(o.nbytes for o in chosen)
    assert found.cost == pytest.approx(sum(o.cost for o in chosen))
    assert found.bound == found.cost
    assert found.gap == 0


@settings(max_examples=200, deadline=None)
@given(_GROUPS, st.integers(0, 60), st.integers(1, 3))
def test_with_too_few_states_the_bound_is_one(
    groups: list[list[Option]], more: int, most: int
) -> None:
    least = sum(min(o.nbytes for o in options) for options in groups)
    found = solve(groups, least + more, most)
    cost, _ = best(groups, least + more)
    assert found.nbytes <= least + more
    assert found.bound <= cost + 1e-9
    assert cost <= found.cost + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.builds(Option, st.integers(1, 20), st.integers(0, 3).map(float)),
       min_size=1, max_size=3), min_size=1, max_size=4), st.integers(0, 30))  # fmt: skip
def test_of_equal_costs_the_fewest_bytes(groups: list[list[Option]], more: int) -> None:
    least = sum(min(o.nbytes for o in options) for options in groups)
    found = solve(groups, least + more)
    assert (found.cost, found.nbytes) == best(groups, least + more)


def test_a_budget_below_the_smallest_formats_is_refused() -> None:
    with pytest.raises(PlanError, match="at least 30 bytes"):
        solve([[Option(10, 1.0), Option(20, 0.0)], [Option(20, 0.0)]], 29)


# --- Groups ----------------------------------------------------------------------------------------


def _published(family: str) -> Path:
    return made_once(f"fit-{family}", lambda at: published(family, inner=256).write(at))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next", "glm4_moe"])
def test_targets_are_those_of_the_groups_alone(family: str) -> None:
    """Every quantizable matrix is in one group, and what a group is targeted by finds no other's."""
    model = model_of(api.open_checkpoint(_published(family)), Consumer("vllm"))
    plan = model.plan
    seen: list[str] = []
    for group in model.groups:
        targets = targets_of(model, [group])
        found = {
            name.removesuffix(".weight")
            for name in plan.tensors
            if name.endswith(".weight") and matches(name.removesuffix(".weight"), targets)
        }
        assert set(group.modules) <= found
        others = found - set(group.modules)
        assert all(plan.role_index.kind(f"{m}.weight").routed for m in others)
        assert bool(others) == group.experts
        assert sum(plan.tensors[f"{m}.weight"].type.numel for m in found) == group.weights
        seen += found
    assert len(seen) == len(set(seen))
    wanted = {
        name.removesuffix(".weight")
        for name in plan.tensors
        if plan.role_index.kind(name).quantizable
        and name.endswith(".weight")
        and not plan.family.is_mtp(name, plan.role_index.dims)
        and not name.endswith("in_proj_qkvz.weight")  # sglang asks Qwen3-Next's for a `weight`
    }
    assert wanted <= set(seen)


def test_shared_experts_go_with_the_routed_where_the_runtime_fuses_them() -> None:
    """sglang makes DeepSeek's shared expert one more routed one, vLLM does not."""
    checkpoint = api.open_checkpoint(_published("deepseek_v3"))
    for runtime in ("sglang", "vllm"):
        parts = model_of(checkpoint, Consumer(runtime)).parts
        together = [part for part in parts if part.endswith("+shared experts")]
        apart = [part for part in parts if part.startswith("mlp.shared_experts.")]
        assert bool(together) != bool(apart), (runtime, list(parts))


# --- Small models ----------------------------------------------------------------------------------

MAKES: Mapping[str, models.Make] = {"moe": models.qwen3_moe, "dense": models.llama}
SAMPLES, LENGTH = 3, 40


def _source(name: str) -> Path:
    def make(at: Path) -> None:
        models.saved(MAKES[name](moe_intermediate_size=256, num_hidden_layers=3), at)

    return made_once(f"fit-small-{name}", make)


def _data(folder: Path) -> Path:
    file = folder / "ids.jsonl"
    samples = models.samples(SAMPLES, LENGTH, seed=5)
    file.write_text("".join(f'{{"input_ids": {one.tolist()}}}\n' for one in samples))
    return file


def _fitting(name: str, room: Path, **more: Any) -> Fitting:
    room.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "rtn": True, "samples": SAMPLES, "length": LENGTH, "devices": ["cpu"],
        "work_dir": room / "measured",
        **more,
    }  # fmt: skip
    return api.fitting(_source(name), _data(room), **options)


@pytest.fixture(scope="module", autouse=True)
def sliced_heads() -> Iterator[None]:
    """Heads in several slices, as those of large vocabularies are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(head, "SLICE", 64)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Fitting]:
    room = tmp_path_factory.mktemp("fit")
    found = {name: _fitting(name, room / name) for name in MAKES}
    for one in found.values():
        one.measured()
    return found


@pytest.mark.parametrize("name", MAKES)
def test_a_budget_is_held_to_the_byte(
    name: str, measured: Mapping[str, Fitting], tmp_path: Path
) -> None:
    """Of files and of bits; with one byte less than the choice takes there is another."""
    fitting = measured[name]
    first = fitting.fit(Budget(bits=4.6))
    assert first.bits <= 4.6
    for budget in (first.nbytes, first.nbytes - 1):
        found = fitting.fit(Budget(nbytes=budget))
        assert found.nbytes <= budget
        out = tmp_path / str(budget)
        made = api.run(api.Recipe("fit", found.steps), _source(name), out, jobs=1)
        assert sum(file.stat().st_size for file in out.glob("*.safetensors")) == found.nbytes
        assert made.warnings == ()
    assert found.nbytes < first.nbytes
    assert found.predicted >= first.predicted
    runtime = ["--for", "vllm==0.33.0", "--tp", "1"] if found.line else []
    ran("validate", out, "--against", _source(name), "--level", "full", *runtime)
    assert bool(found.line) != any(note.startswith("not known") for note in found.notes)


def test_a_result_says_what_chose_its_formats(
    measured: Mapping[str, Fitting], tmp_path: Path
) -> None:
    """The manifest and the card; and nothing is said of another checkpoint."""
    found = measured["dense"].fit(Budget(bits=5))
    made = api.run(api.Recipe("fit", found.steps), _source("dense"), tmp_path / "out", jobs=1)
    first, *_ = json.loads((made.folder / "qconvert.json").read_text())["passes"]
    assert first["name"] == "fitted"
    said = {key: first["options"][key] for key in ("budget", "bits", "kl", "tokens", "data")}
    kl = pytest.approx(found.measured, rel=0.05)
    bits = pytest.approx(found.bits, rel=1e-3)
    assert said == {
        "budget": "5 bits a weight", "bits": bits, "kl": kl, "tokens": SAMPLES * LENGTH, "data": "text"
    }  # fmt: skip
    card = (made.folder / "README.md").read_text()
    assert "- formats of layers were chosen by \\`qconvert fit\\` for 5 bits a weight: " in card
    assert f" nats a token, over {SAMPLES * LENGTH} tokens of text\n" in card
    with pytest.raises(PlanError, match=r"for another checkpoint.*run qconvert fit on it"):
        api.plan(api.Recipe("fit", found.steps), _source("moe"))


# The numbers of E4M3 that are not negative: 3 bits behind the point, the last code is no number.
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)


def _seen(rows: torch.Tensor, form: str) -> torch.Tensor:
    """Activations as runtimes quantize them, a token or 128 columns of it at a time, by numpy."""
    found = rows.detach().numpy().reshape(-1, rows.shape[-1]).astype(np.float64)
    for row in found:
        step = 128 if form == "fp8" else row.size
        for start in range(0, row.size, step):
            part = row[start : start + step]
            if form == "int8":
                scale = np.abs(part).max() / 127
                part[:] = np.rint(part / scale) * scale
            else:
                scale = np.abs(part).max() / 448
                codes = np.abs(part / scale)[:, None] - E4M3
                part[:] = np.sign(part) * E4M3[np.abs(codes).argmin(1)] * scale
    return torch.from_numpy(found.astype(np.float32)).reshape(rows.shape)


@pytest.mark.parametrize("name", MAKES)
def test_the_kl_is_that_of_the_whole_model(
    name: str, measured: Mapping[str, Fitting], tmp_path: Path
) -> None:
    """Of the mixture, converted and decoded, and of single groups, in transformers' own run in F32, with
    what goes into FP8 and INT8 linears rounded by a token."""
    fitting, source = measured[name], _source(name)
    samples = models.samples(SAMPLES, LENGTH, seed=5)
    clean = oracle.run(oracle.whole(source).float(), samples)

    def kl(chosen: Mapping[str, Sequence[Group]], at: Path) -> float:
        steps = steps_of(fitting.model, chosen)
        api.run(api.Recipe("fit", steps), source, at / "made", jobs=1)
        convert("dequant", at / "made", at / "bf16")
        model = oracle.whole(at / "bf16").float()
        for form in ACTIVATIONS:
            for group in chosen.get(form, ()):
                assert not group.experts
                for module in group.modules:
                    model.get_submodule(module).register_forward_pre_hook(
                        lambda _, given, form=form: (_seen(given[0], form),)
                    )
        return oracle.compared(clean, oracle.run(model, samples), samples).kl

    found = fitting.fit(Budget(bits=4.6))
    assert len(found.chosen) > 1
    # A code of an activation that lies between two is another in F64, and may lead to other experts.
    near = {form: 0.05 if form in ACTIVATIONS else 3e-3 for form in (*NAMES, STAY)}
    rel = max(near[form] for form in found.chosen)
    assert found.measured == pytest.approx(kl(found.chosen, tmp_path / "mixture"), rel=rel)
    last = len(fitting.model.groups) - 1
    linear = next(n for n, group in enumerate(fitting.model.groups) if not group.experts)
    for number, form in (
        (0, "w4a16-g32"),
        (last, "w4a16-g32"),
        (linear, "int8"),
        (linear, "fp8-channel"),
    ):
        there = kl({form: [fitting.model.groups[number]]}, tmp_path / f"{form} {number}")
        assert found.costs[number][form] == pytest.approx(there, rel=near[form])


def test_another_budget_needs_no_measurement(
    measured: Mapping[str, Fitting], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And other data, or formats, are another measurement."""
    fitting = measured["moe"]
    first = fitting.fit(Budget(bits=5))

    def never(*_: Any, **__: Any) -> Measured:
        raise AssertionError("measured again")

    monkeypatch.setattr(fit_module, "measure", never)
    again = _fitting("moe", fitting.base.parent)
    assert again.fit(Budget(bits=5)).solution == first.solution
    assert again.fit(Budget(bits=4.6)).bits < first.bits
    for changed in ({"length": LENGTH - 1}, {"formats": ["fp8", "w4a16-g32"]}):
        with pytest.raises(AssertionError, match="measured again"):
            _fitting("moe", fitting.base.parent, **changed).fit(Budget(bits=5))


class _Killed(Exception):
    pass


@pytest.mark.parametrize("last", [1, 2])
def test_a_killed_measurement_goes_on(
    last: int, measured: Mapping[str, Fitting], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the layer where it was, to the same figures; and a damaged state is refused."""
    whole = measured["moe"].measured()
    ran_layers: list[int] = []
    one_layer = measuring._one_layer

    def killed(run: Any, number: int, *more: Any) -> Any:
        if number == last and not ran_layers.count(-1):
            ran_layers.append(-1)
            raise _Killed
        ran_layers.append(number)
        return one_layer(run, number, *more)

    monkeypatch.setattr(measuring, "_one_layer", killed)
    fitting = _fitting("moe", tmp_path)
    with pytest.raises(_Killed):
        fitting.measured()
    assert fitting.kept() is None
    assert _fitting("moe", tmp_path).measured() == whole
    assert ran_layers == [*range(last), -1, *range(last, 3)]
    assert not list(fitting.folder.glob("*.rows"))
    (fitting.folder / "measured.json").write_text("{}")
    with pytest.raises(RunError, match=r"is no measurement.*remove"):
        fitting.kept()


@pytest.mark.parametrize("direct", [0, 1000])
@pytest.mark.parametrize("name", MAKES)
def test_the_disk_that_a_plan_states(
    name: str, direct: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No less than what the files take at any time, and little more; less of it is refused first."""
    monkeypatch.setattr(measuring, "DIRECT", direct)
    fitting = _fitting(name, tmp_path)
    stated, seen, through = fitting.estimate().disk, [0], measuring._Run.through

    def watched(run: Any, *given: Any) -> None:
        through(run, *given)
        seen.append(sum(file.stat().st_size for file in fitting.folder.glob("*.rows")))

    close = ScratchRows.close

    def closed(scratch: Any) -> None:
        seen.append(sum(file.stat().st_size for file in fitting.folder.glob("*.rows")))
        close(scratch)

    monkeypatch.setattr(measuring._Run, "through", watched)
    monkeypatch.setattr(ScratchRows, "close", closed)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=stated - 1))
        with pytest.raises(RunError, match="--measured DIR"):
            fitting.measured()
    assert len(seen) == 1
    fitting.measured()
    assert max(seen) <= 1.05 * stated  # routes of experts are not counted
    assert max(seen) >= 0.95 * stated


def test_experts_are_read_once_for_all_that_goes_through_a_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once as they are, whatever formats linears are tried in, and once in each format of theirs; and
    twice in each of two mixtures. A plan counts just these."""
    fitting = _fitting("moe", tmp_path)
    asked, weights, read = list[str](), [0], engine._read

    def counted(experts: Any, *given: Any) -> Iterator[Any]:
        made = getattr(experts, "made", None)
        asked.append(next((name for name, one in fitting.made.items() if one is made), STAY))
        for one in read(experts, *given):
            weights[0] += one.gate_up.numel() + one.down.numel()
            yield one

    placed, changed = list[Group](), measuring._changed

    def put(opened: Any, layer: Any, group: Group, *given: Any) -> Any:
        placed.append(group)
        return changed(opened, layer, group, *given)

    monkeypatch.setattr(engine, "_read", counted)
    monkeypatch.setattr(measuring, "_changed", put)
    fitting.measured()
    linears = sum(group.weights for group in fitting.model.groups if not group.experts)
    # But for three reads of all layers as they are, and the mixture that is not run yet.
    in_formats = measuring.weights_read(fitting.model, fitting.made)[0] - 4 * linears
    assert sum(group.weights for group in placed if not group.experts) == in_formats
    groups = [number for number, group in enumerate(fitting.model.groups) if group.experts]
    assert len(groups) == 3
    wanted = [form for n in groups for form, one in fitting.made.items() if n in one.nbytes]
    assert sorted(asked[: -2 * 3]) == sorted([STAY] * 3 + wanted)
    fitting.fit(Budget(bits=4.6))
    assert weights[0] == measuring.weights_read(fitting.model, fitting.made)[1]


def test_two_runs_do_not_measure_at_once(measured: Mapping[str, Fitting]) -> None:
    fitting = measured["moe"]
    with fitting._locked(), pytest.raises(OutputError, match="is running there"):
        fitting.mixture_kl([0] * len(fitting.model.groups))


def test_formats_that_were_not_carried_follow_from_the_square_of_their_error(
    measured: Mapping[str, Fitting], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each group then has the KL of its smallest format alone, and costs of the others are near those
    that are measured one by one."""
    fitting = measured["dense"]
    direct = fitting.measured()
    monkeypatch.setattr(measuring, "DIRECT", 0)
    few = _fitting("dense", tmp_path).measured()
    assert few.errors == direct.errors
    assert all(len(kl) == 1 for kl in few.kl)
    sizes = [dict(zip(forms, one, strict=True)) for forms, one in
             zip(fitting.choices.forms, fitting.choices.nbytes, strict=True)]  # fmt: skip
    for own, every, size in zip(few.kl, direct.kl, sizes, strict=True):
        ((form, value),) = own.items()
        assert value == every[form]
        assert size[form] == min(size.values())
    for kinds, far in ((("w4a16", "nvfp4", "mxfp4"), 1.6), (("w8a16", "int8"), 3)):
        ratios = sorted(
            one[form] / other[form]
            for one, other in zip(few.costs(), direct.costs(), strict=True)
            for form in other
            if form.startswith(kinds)
        )
        assert 1 / far < ratios[len(ratios) // 2] < far


def test_predicted_and_measured_agree(measured: Mapping[str, Fitting]) -> None:
    """Within a quarter, for a KL above the noise; and no uniform format of no more bytes has less."""
    for fitting in measured.values():
        for bits in (4.3, 4.6, 5.5):
            found = fitting.fit(Budget(bits=bits))
            assert found.solution.gap == 0
            if found.measured > 1e-4:
                assert found.predicted == pytest.approx(found.measured, rel=0.25)
            for one in found.uniform:
                assert one.bits > bits or one.kl >= found.predicted


def test_what_was_measured_together_is_predicted(measured: Mapping[str, Fitting]) -> None:
    """Of all groups in their smallest formats; the less of a small error, the nearer to the sum."""
    for fitting in measured.values():
        known = fitting.measured()
        least = 8 * sum(map(min, fitting.choices.nbytes)) / fitting.model.weights
        found = fitting.fit(Budget(bits=least))
        assert found.predicted == pytest.approx(found.measured, rel=1e-6)
        assert known.joint(known.alone) == pytest.approx(known.together)
        assert known.joint(0.0) == 0
        off = [
            abs(known.joint(known.alone * part) / (known.alone * part) - 1)
            for part in (1, 0.25, 1e-6)
        ]
        assert off[1] == pytest.approx(off[0] / 2)
        assert off[2] < 0.01 * off[0] + 1e-9


def test_all_of_it_stays_where_the_budget_allows_it(measured: Mapping[str, Fitting]) -> None:
    found = measured["moe"].fit(Budget(bits=16))
    assert set(found.chosen) == {STAY}
    assert (found.predicted, found.measured, found.steps) == (0, 0, ())


# --- Budgets of GPUs -------------------------------------------------------------------------------


def test_a_budget_of_gpus_is_held_on_the_fullest_rank(measured: Mapping[str, Fitting]) -> None:
    fitting = measured["moe"]
    most = fitting.fit(Budget(bits=5)).rank_bytes
    budget = Budget(gpus=1, gpu_memory=int(most / 0.75) + 2)
    found = fitting.fit(budget)
    assert 0 < found.rank_bytes <= most
    cache = cache_bytes(fitting.checkpoint, Budget(gpus=1, gpu_memory=1, context=1000))
    assert cache == 2 * 2 * 3 * 2 * 32 * 1000  # keys and values, BF16, 3 layers, 2 heads of 32
    beside = Budget(gpus=1, gpu_memory=int((most + cache) / 0.85) + 2, context=1000)
    assert fitting.fit(beside).rank_bytes <= most
    assert fitting.fit(beside).cache_bytes == cache
    with pytest.raises(PlanError, match="no room for weights"):
        fitting.fit(Budget(gpus=1, gpu_memory=cache, context=1000))


def test_latent_attention_keeps_one_vector() -> None:
    """DeepSeek's cache: kv_lora_rank and the rotary part, on every rank."""
    checkpoint = api.open_checkpoint(_published("deepseek_v3"))
    config = checkpoint.config
    each = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    found = cache_bytes(checkpoint, Budget(gpus=8, gpu_memory=1, context=10))
    assert found == 2 * config["num_hidden_layers"] * each * 10


# --- The command -----------------------------------------------------------------------------------


def test_the_command(measured: Mapping[str, Fitting], tmp_path: Path) -> None:
    """Prints a choice, converts, and its recipe makes the same folder."""
    source, base = _source("moe"), measured["moe"].base
    words: list[str | Path] = [
        "--bits", "4.6", "--data", _data(tmp_path), "--samples", str(SAMPLES), "--length", str(LENGTH),
        "--device", "cpu", "--measured", base, "--jobs", "1", "--rtn",
    ]  # fmt: skip
    told = json.loads(ran("fit", source, tmp_path / "out", *words, "--choose-only", "--json").out)
    assert told["bits"] <= 4.6
    assert not (tmp_path / "out").exists()
    chosen = {(one["layer"], one["part"]): one["chosen"] for one in told["groups"]}
    assert len(set(chosen.values())) > 1
    text = ran("fit", source, tmp_path / "out", *words, "--dry-run").out
    assert re.search(r"KL \S+ nats a token over 120 tokens, predicted", text)
    assert "no choice within the budget is predicted lower" in text
    ran("fit", source, tmp_path / "out", *words)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ran("fit", source, tmp_path / "out", *words, "--print-recipe").out)
    ran("run", recipe, source, tmp_path / "again", "--jobs", "1")
    assert api.diff(tmp_path / "out", tmp_path / "again") == []
    for name, output in Plan.identity(api.open_checkpoint(tmp_path / "out")).tensors.items():
        if name.endswith("o_proj.weight") and output.type.dtype == "BF16":
            assert chosen[int(name.split(".")[2]), "self_attn.o_proj"] == STAY


def test_what_a_measurement_would_take(tmp_path: Path) -> None:
    """A dry run measures nothing."""
    words: list[str | Path] = [
        "--bits", "4.6", "--rtn", "--samples", "2", "--length", "8", "--device", "cpu", "--measured",
        tmp_path, "--dry-run",
    ]  # fmt: skip
    told = json.loads(ran("fit", _source("moe"), tmp_path / "out", *words, "--json").out)
    assert told["measured"] is False
    assert told["seconds"] > told["reading"] > 0
    assert told["forwards"] > 9 * (len(NAMES) - 3)  # groups, and formats that experts may have
    assert "s on this CPU; " in ran("fit", _source("moe"), tmp_path / "out", *words).out
    words[words.index("cpu")] = "cuda:0"
    on_gpus = ran("fit", _source("moe"), tmp_path / "out", *words).out
    assert "about 0 s to read and decode weights, and what the GPUs compute; " in on_gpus
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rtn"], "give one budget"),
        (["--rtn", "--bits", "4.5", "--bytes", "1GB"], "give one budget"),
        (["--rtn", "--gpus", "2"], "--gpu-memory"),
        (["--rtn", "--bits", "4.5", "--context", "100"], "add --gpus"),
        (["--bits", "4.5"], "give --data FILE, or --rtn"),
        (["--rtn", "--bits", "99"], "not in the range"),
        (["--rtn", "--bits", "nan"], "from 1 to 16"),
        (["--rtn", "--bits", "4.5", "--formats", "q4"], "'q4' is not one of 'fp8', "),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], says: str, tmp_path: Path) -> None:
    done = run_cli("fit", _source("moe"), tmp_path / "out", *words)
    assert done.code == 2
    assert says in done.err


def test_formats_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="'q4': expected one of fp8, "):
        api.fitting(_source("moe"), None, formats=["q4"])


def test_runtimes_that_are_not_simulated_are_refused() -> None:
    with pytest.raises(UsageError, match="sglang or vllm"):
        api.fitting(_source("moe"), None, "transformers")


def test_a_budget_that_is_too_small_is_refused(measured: Mapping[str, Fitting]) -> None:
    with pytest.raises(PlanError, match="budget: expected at least"):
        measured["moe"].fit(Budget(bits=2))


def test_a_result_is_told_whole(measured: Mapping[str, Fitting]) -> None:
    """To programs: the bytes of all groups are those of the choice; and random tokens are said."""
    found: Fit = measured["dense"].fit(Budget(bits=8.2))
    told = found.as_object()
    assert told["quantizable_bytes"] == sum(
        one["formats"][one["chosen"]]["nbytes"] for one in told["groups"]
    )
    assert not any("random token ids" in note for note in found.notes)
