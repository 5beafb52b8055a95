"""The calibration engine's promises that need no other project: resuming, grouping, few tokens, several
schemes at once, statistics, hashes of what was read, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from calibrate_models import (
    EXPERTS,
    HIDDEN,
    Kept,
    Looking,
    Stopped,
    Stopping,
    assert_same,
    calibrated,
    deepseek_v3,
    hf,
    keep_states_in_files,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    same,
    samples,
    saved,
)
from safetensors.torch import load_file, save_file
from sampled import thinned

from qconvert.calibrate import layers
from qconvert.calibrate.engine import disk_bytes
from qconvert.calibrate.settings import ExpertSchemes, Settings
from qconvert.calibrate.solve import rounded
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.demo import write_sample
from qconvert.core.errors import PlanError, RunError
from qconvert.core.int_scheme import IntScheme, Nvfp4Scheme, Scheme
from qconvert.plan.plan import Plan
from qconvert.run.work.reader import Reader

ROUTED = Settings(min_tokens=1, propagated_error="ignore")
THEIRS = Settings(min_tokens=1, solver="llmcompressor")
CORRECTED = Settings(min_tokens=1, propagated_error="correct")
G32 = IntScheme(4, 32)
FP4 = Nvfp4Scheme("modelopt")
TOKENS = samples(6, 40)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Qwen3-MoE."""
    return saved(qwen3_moe(num_hidden_layers=2), tmp_path_factory.mktemp("model") / "model")


def run(folder: Path, work_dir: Path, output: Kept | None = None, **over: Any) -> Kept:
    options: dict[str, Any] = {"tokens": TOKENS, "schemes": [G32], "settings": ROUTED, **over}
    return calibrated(folder, work_dir, kept=output, **options)


ASKED: dict[str, dict[str, Any]] = {
    "best": {"settings": ROUTED}, "positive": {"settings": replace(ROUTED, signs="positive")},
    "llmcompressor": {"settings": THEIRS}, "corrected": {"settings": CORRECTED},
    "nvfp4": {"settings": ROUTED, "schemes": [FP4]},
    "nvfp4-corrected": {"settings": CORRECTED, "schemes": [FP4]},
}  # fmt: skip
# What goes on differs by whether errors are corrected and by what codes are; the others are as "best".
STAND_FOR_ALL = ("best", "corrected", "nvfp4-corrected")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one, id=name, marks=[] if name in STAND_FOR_ALL else pytest.mark.big)
        for name, one in ASKED.items()
    ],
)
def asked(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of either solver, of either kind of codes, without scales below 0, and with propagated errors
    corrected."""
    found: dict[str, Any] = request.param
    return found


@pytest.fixture(scope="module")
def finished(
    small: Path, asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Kept, Path]:
    """An undisturbed run, and the folder that it leaves."""
    folder = tmp_path_factory.mktemp("undisturbed") / "work"
    return run(small, folder, **asked), folder


@pytest.fixture(scope="module")
def undisturbed(finished: tuple[Kept, Path]) -> Kept:
    return finished[0]


@pytest.mark.parametrize(
    "at",
    [
        (1, 3, "down_proj"),
        *(pytest.param(at, marks=pytest.mark.rest) for at in ((0, 0, "gate_proj"), 0, 1)),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_codes(
    at: Any, small: Path, asked: dict[str, Any], undisturbed: Kept, tmp_path: Path
) -> None:
    first = Stopping(at)
    with pytest.raises(Stopped):
        run(small, tmp_path / "work", first, **asked)
    second = run(small, tmp_path / "work", **asked)
    # The layer that was under way is done again, the one before it is not.
    begun = 1 if at in ((1, 3, "down_proj"), 1) else 0
    assert {layer for layer, _, _ in second.made} == set(range(begun, 2))
    for key, made in second.made.items():
        assert same(made[0], undisturbed.made[key][0]), key
    both = {**first.made, **second.made}
    assert both.keys() == undisturbed.made.keys()


def test_a_finished_run_does_nothing_again(
    small: Path, asked: dict[str, Any], finished: tuple[Kept, Path]
) -> None:
    made, folder = finished
    assert made.made
    assert not run(small, folder, **asked).made
    states = ["hidden.2.plain.0.rows"] if asked["settings"].corrects else []
    left = sorted(p.name for p in folder.iterdir())
    assert left == ["hidden.2.0.rows", *states, "state.json"]


def test_nothing_runs_after_the_last_layer_wanted(
    small: Path, asked: dict[str, Any], undisturbed: Kept, tmp_path: Path
) -> None:
    first = run(small, tmp_path / "first", last=0, **asked)
    assert {layer for layer, _, _ in first.made} == {0}
    for key, codes in first.made.items():
        assert same(codes[0], undisturbed.made[key][0]), key


def test_another_key_is_refused(small: Path, tmp_path: Path) -> None:
    run(small, tmp_path / "work", schemes=[])
    with pytest.raises(RunError, match="another calibration"):
        run(small, tmp_path / "work", schemes=[], key="other")


@pytest.mark.parametrize("name", ["hidden.0.0.rows", "hidden.0.plain.0.rows"])
def test_a_cut_state_file_is_refused(name: str, small: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(small, tmp_path / "work", Stopping(0), settings=CORRECTED)
    left = tmp_path / "work" / name
    left.write_bytes(left.read_bytes()[:-2])
    with pytest.raises(RunError, match=rf"{name}: expected .* bytes of hidden states"):
        run(small, tmp_path / "work", settings=CORRECTED)
    left.unlink()
    with pytest.raises(RunError, match=rf"{name}: expected .* bytes of hidden states"):
        run(small, tmp_path / "work", settings=CORRECTED)


_GROUPED: dict[str, tuple[Settings, Scheme]] = {
    "routed": (ROUTED, G32),
    "theirs": (THEIRS, G32),
    "corrected": (CORRECTED, G32),
    "all": (Settings(experts="all", propagated_error="ignore"), G32),
    "corrected-all": (Settings(experts="all", propagated_error="correct"), G32),
    "corrected-few": (Settings(min_tokens=60, propagated_error="correct"), G32),
    "corrected-rounded": (
        Settings(min_tokens=60, undersampled="rtn", propagated_error="correct"),
        G32,
    ),
    "nvfp4": (ROUTED, FP4),
    "nvfp4-corrected": (CORRECTED, FP4),
}


@pytest.mark.big
@pytest.mark.parametrize("name", thinned(_GROUPED, 2))
def test_groups_change_no_code(
    name: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, scheme = _GROUPED[name]
    at_once = run(small, tmp_path / "one", settings=settings, schemes=[scheme])
    if settings.min_tokens == 60:
        assert 0 < len(at_once.stats[0].few) < EXPERTS
    monkeypatch.setattr(layers, "experts_together", lambda *_, **__: 3)
    apart = run(small, tmp_path / "two", settings=settings, schemes=[scheme])
    assert_same(at_once, apart)


@pytest.mark.big
def test_states_in_files_change_no_code(
    small: Path, asked: dict[str, Any], undisturbed: Kept, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    keep_states_in_files(monkeypatch)
    looking = Looking(tmp_path / "two")
    assert_same(undisturbed, run(small, tmp_path / "two", looking, **asked))
    kept = {f"{n}.0.rows" for n in ("inputs", "answers", "routes", "shares")}
    assert kept <= looking.names
    assert ({f"plain.{name}" for name in kept} <= looking.names) == asked["settings"].corrects


@pytest.mark.big
@pytest.mark.parametrize("settings", [ROUTED, CORRECTED], ids=["best", "corrected"])
def test_the_work_dir_holds_no_more_than_it_says(
    settings: Settings, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing of a layer fits in memory."""
    keep_states_in_files(monkeypatch)
    looking = Looking(tmp_path / "work")
    run(small, tmp_path / "work", looking, settings=settings)
    count = sum(sample.size for sample in TOKENS)
    streams = 2 if settings.corrects else 1
    said = disk_bytes(count, HIDDEN, corrects=settings.corrects)
    assert streams * 4 * 2 * count * HIDDEN <= looking.most <= said


@pytest.mark.big
def test_several_schemes_from_one_pass(small: Path, tmp_path: Path) -> None:
    """The first one's weights go on, so it is as if alone; in the first layer so is the second."""
    row = IntScheme(4, None, scale_dtype="F32", narrow=True)
    both = run(small, tmp_path / "both", schemes=[G32, ExpertSchemes(row, replace(row, group=64))])
    first = run(small, tmp_path / "first")
    second = run(small, tmp_path / "second", schemes=[ExpertSchemes(row, replace(row, group=64))])
    for key, (one, two) in both.made.items():
        assert same(one, first.made[key][0]), key
        assert key[0] > 0 or same(two, second.made[key][0]), key
        assert two.scale.shape[1] == (2 if key[2] == "down_proj" else 1)
    assert any(not same(both.made[k][1], second.made[k][0]) for k in both.made if k[0] > 0)


def test_no_scheme_gives_statistics_alone(small: Path, tmp_path: Path) -> None:
    kept = run(small, tmp_path / "work", schemes=[])
    assert not kept.made
    assert set(kept.stats) == {0, 1}


@pytest.mark.big
def test_statistics_are_of_what_experts_saw(small: Path, tmp_path: Path) -> None:
    """Of the first layer, against a hook on the whole model's experts."""
    stats = run(small, tmp_path / "work").stats[0]
    model = hf.AutoModelForCausalLM.from_pretrained(
        small, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    seen: list[Any] = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda m, args: seen.append(args))
    with torch.no_grad():
        for sample in TOKENS:
            model.model(torch.from_numpy(sample)[None], use_cache=False)
    rows = torch.cat([args[0].reshape(-1, HIDDEN) for args in seen])
    routes = torch.cat([args[1] for args in seen])
    assert stats.counts.tolist() == torch.bincount(routes.reshape(-1), minlength=EXPERTS).tolist()
    assert stats.counts.sum() == 2 * sum(sample.size for sample in TOKENS)
    for expert in range(EXPERTS):
        mine = rows[(routes == expert).any(-1)]
        square = mine.double().square().mean(0).numpy()
        assert np.allclose(stats.gate_up_mean_square[expert], square, rtol=1e-4)
        assert np.array_equal(stats.gate_up_absmax[expert], mine.abs().amax(0).float().numpy())
        gate, up = torch.nn.functional.linear(mine, experts.gate_up_proj[expert]).chunk(2, -1)
        middle = experts.act_fn(gate) * up
        square = middle.detach().double().square().mean(0).numpy()
        assert np.allclose(stats.down_mean_square[expert], square, rtol=0.02)
    assert stats.gate_up_mean_square.dtype == np.float32


@pytest.mark.big
def test_few_tokens_get_all_or_are_rounded(small: Path, tmp_path: Path) -> None:
    """With a threshold between the rarest and the most frequent expert, both kinds are there."""
    counts = run(small, tmp_path / "work").stats[0].counts
    most = int(np.sort(counts)[EXPERTS // 2])
    few = {e for e in range(EXPERTS) if counts[e] < most}
    assert 0 < len(few) < EXPERTS
    routed = run(small, tmp_path / "routed")
    with_all = run(small, tmp_path / "all", settings=replace(ROUTED, min_tokens=most))
    with_rtn = run(
        small, tmp_path / "rtn", settings=replace(ROUTED, min_tokens=most, undersampled="rtn")
    )
    every = run(small, tmp_path / "every", settings=replace(ROUTED, experts="all"))
    assert set(with_all.stats[0].few) == few == set(with_rtn.stats[0].few)
    assert with_all.stats[0].rounded == ()
    assert set(with_rtn.stats[0].rounded) == few
    stored = load_file(small / "model.safetensors")
    for (layer, expert, kind), (codes,) in with_all.made.items():
        if layer:
            continue
        key = layer, expert, kind
        assert same(codes, (every if expert in few else routed).made[key][0]), key
        name = f"model.layers.0.mlp.experts.{expert}.{kind}.weight"
        nearest = rounded(stored[name], G32, ROUTED).numpy()
        assert same(with_rtn.made[key][0], nearest) == (expert in few), key


@pytest.mark.parametrize("few", ["all", "rtn"])
def test_an_expert_without_a_token_is_never_zeroed(few: Any, tmp_path: Path) -> None:
    """One expert is never chosen: the router's row for it answers with the opposite of another's and
    the input is the same token over and over."""
    folder = saved(qwen3_moe(num_hidden_layers=1), tmp_path / "model")
    tokens = [np.full(16, 7, np.int64)]
    kept = run(
        folder, tmp_path / "work", tokens=tokens, settings=Settings(min_tokens=1, undersampled=few)
    )
    stats = kept.stats[0]
    idle = [e for e in range(EXPERTS) if stats.counts[e] == 0]
    assert len(idle) == EXPERTS - 2
    assert list(stats.few) == idle
    for expert in range(EXPERTS):
        for kind in ("gate_proj", "up_proj", "down_proj"):
            assert np.count_nonzero(kept.made[0, expert, kind][0].codes) > 1000


@pytest.mark.parametrize(
    "settings", [ROUTED, THEIRS, CORRECTED], ids=["best", "theirs", "corrected"]
)
def test_dead_columns_are_counted(settings: Settings, tmp_path: Path) -> None:
    """A norm with two zero weights makes two input columns zero, in gate and up of all experts.
    llm-compressor's solver makes their weights zero; ours rounds them."""
    folder = saved(qwen3_moe(num_hidden_layers=1), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.post_attention_layernorm.weight"][[3, 40]] = 0
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    kept = run(folder, tmp_path / "work", settings=settings)
    dead = {"gate_proj": 2 * EXPERTS, "up_proj": 2 * EXPERTS, "down_proj": 0}
    assert kept.stats[0].dead_columns == dead
    what = (
        "rounded their weights to nearest" if settings.solver == "best" else "zeroed their weights"
    )
    assert any(f"zero throughout; {what}" in remark for remark in kept.remarks)
    codes = kept.made[0, 0, "gate_proj"][0].codes[:, [3, 40]]
    assert codes.any() == (settings.solver == "best")


@pytest.mark.big
def test_sources_are_hashed_as_they_were_read(small: Path, tmp_path: Path) -> None:
    kept = run(small, tmp_path / "work")
    checkpoint = Checkpoint.open(small)
    reader = Reader(checkpoint.shards)
    for (layer, expert, kind), sources in kept.sources.items():
        (one,) = sources
        assert one["name"] == f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"
        data = memoryview(bytearray(one["stop"] - one["start"]))
        reader.read(checkpoint[one["name"]], one["start"], data)
        assert data.nbytes == checkpoint[one["name"]].type.nbytes
        assert xxhash.xxh3_128(data).hexdigest() == one["xxh3"]
    reader.close()


def test_group_order_puts_columns_alike_together(small: Path, tmp_path: Path) -> None:
    """Columns of one group are neighbours in importance, so groups' sums of squares fall."""
    kept = run(small, tmp_path / "work", schemes=[replace(G32, actorder="group")])
    stats = kept.stats[0]
    for (layer, expert, kind), (codes,) in kept.made.items():
        assert codes.g_idx is not None
        assert np.bincount(codes.g_idx).tolist() == [32] * (codes.codes.shape[1] // 32)
        if layer or kind == "down_proj":
            continue
        square = stats.gate_up_mean_square[expert]
        for group in range(3):
            assert square[codes.g_idx == group].min() >= square[codes.g_idx == group + 1].max()


def fp8_sample(folder: Path) -> Path:
    """The demo's FP8 checkpoint without its draft layer, whose index would miss it."""
    write_sample(folder, shards=1)
    return folder


def dequantized(folder: Path, into: Path) -> Path:
    """The same model in BF16, computed by the ops of the plan."""
    from qconvert.calibrate.reading import Weights
    from qconvert.core.names import split_parameter
    from qconvert.formats.registry import read_matrix

    plan = Plan.identity(Checkpoint.open(folder))
    weights = Weights(plan)
    tensors: dict[str, torch.Tensor] = {}
    for name, output in plan.tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if output.type.dtype == "F8_E4M3":
            module, _ = split_parameter(name)
            tensors[name] = weights.matrix(module, read_matrix(plan, module)[0])[0].clone()
        else:
            tensors[name] = weights.tensor(name, output).clone()
    weights.close()
    into.mkdir()
    config = json.loads((folder / "config.json").read_bytes())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config))
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.mark.big
def test_fp8_weights_are_read_as_bf16(tmp_path: Path) -> None:
    """An FP8 checkpoint with a draft layer gives the codes of its BF16 self, and none for the draft."""
    fp8 = fp8_sample(tmp_path / "fp8")
    bf16 = dequantized(fp8, tmp_path / "bf16")
    scheme = IntScheme(4, 64)
    ours = run(fp8, tmp_path / "one", schemes=[scheme])
    theirs = run(bf16, tmp_path / "two", schemes=[scheme])
    assert len(ours.made) == 4 * 4 * 3
    assert_same(ours, theirs)
    names = {source["name"] for source in ours.sources[0, 0, "gate_proj"]}
    at = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert names == {at, f"{at}_scale_inv"}


@pytest.mark.big
def test_a_multi_modal_folder_gives_the_codes_of_its_text_model(tmp_path: Path) -> None:
    """Qwen3.5 as published: other names, nested settings, a vision tower that is not computed."""
    text = saved(qwen3_5_moe(), tmp_path / "text")
    stored = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: v
        for name, v in load_file(text / "model.safetensors").items()
    }
    stored["model.visual.merger.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    inner = json.loads((text / "config.json").read_bytes())
    whole = {
        "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": inner, "vision_config": {"depth": 0, "hidden_size": HIDDEN},
    }  # fmt: skip
    both = tmp_path / "both"
    both.mkdir()
    save_file(stored, both / "model.safetensors", metadata={"format": "pt"})
    (both / "config.json").write_text(json.dumps(whole))
    assert_same(run(both, tmp_path / "one"), run(text, tmp_path / "two"))


_AT = "model.layers.1"
BROKEN: dict[str, tuple[str, Callable[[str, dict[str, torch.Tensor]], object], str]] = {
    "missing": (
        f"{_AT}.self_attn.q_norm.weight", lambda name, stored: stored.pop(name), "'{}' is missing",
    ),
    "computed with by nobody": (
        f"{_AT}.self_attn.q_proj.bias", lambda name, stored: stored.update({name: torch.zeros(128)}),
        "'{}': unexpected tensor",
    ),
    "of another shape": (
        f"{_AT}.self_attn.k_norm.weight", lambda name, stored: stored.update({name: torch.ones(16)}),
        r"{}: expected \[32\].*found \[16\]",
    ),
    "infinite": (
        f"{_AT}.mlp.experts.2.up_proj.weight", lambda name, stored: stored[name][0, 0].fill_(torch.inf),
        "{}: holds NaN or infinity",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_tensor_is_named(what: str, small: Path, tmp_path: Path) -> None:
    name, change, says = BROKEN[what]
    stored = load_file(small / "model.safetensors")
    change(name, stored)
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_bytes((small / "config.json").read_bytes())
    shown = name.removesuffix(".weight") if what == "infinite" else name
    with pytest.raises((PlanError, RunError), match=says.format(re.escape(shown))):
        run(broken, tmp_path / "work")


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"tokens": [np.array([1, 300, 2])]}, "token id 300 is outside the vocabulary of 300"),
        ({"tokens": []}, "one or more samples"),
        (
            {"schemes": [IntScheme(4, 48)]},
            r"experts\.0\.\w+: .* 48\b.*, found \d",
        ),
    ],
    ids=["an id", "no samples", "groups"],
)
def test_what_cannot_be_calibrated_is_refused(
    over: dict[str, Any], says: str, small: Path, tmp_path: Path
) -> None:
    with pytest.raises((PlanError, RunError), match=says):
        run(small, tmp_path / "work", **over)
    assert "schemes" not in over or not (tmp_path / "work").exists()


def test_too_little_memory_is_refused_with_what_would_do(small: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"give --memory (\d+)MiB") as told:
        run(small, tmp_path / "work", memory=1 << 20)
    enough = int(str(told.value).rpartition(" ")[2].removesuffix("MiB")) << 20
    assert run(small, tmp_path / "again", memory=enough + (64 << 20), last=0).made


def test_a_class_that_computes_something_else_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another release of transformers might scale what its experts answer."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    kind: Any = modeling_qwen3_moe.Qwen3MoeExperts
    real = kind.forward
    monkeypatch.setattr(
        kind, "forward", lambda self, *args, **named: real(self, *args, **named) * 2
    )
    with pytest.raises(RunError, match="layer 0: Qwen3MoeExperts does not compute its experts as"):
        run(small, tmp_path / "work")


@pytest.mark.big
def test_linear_attention_and_dense_layers_stream_on(tmp_path: Path) -> None:
    """A layer without experts hands nothing in and still feeds the next."""
    folder = saved(deepseek_v3(num_hidden_layers=2), tmp_path / "model")
    kept = run(folder, tmp_path / "work")
    assert {layer for layer, _, _ in kept.made} == {1}
    other = saved(qwen3_next(num_hidden_layers=4), tmp_path / "next")
    assert set(run(other, tmp_path / "other").stats) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("field", "value"),
    [("dampening_frac", 0.0), ("block_size", 0), ("min_tokens", 0), ("gather", 0)],
)
def test_settings_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=field):
        Settings(**{field: value})
