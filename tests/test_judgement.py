"""Plans judged by the header rules before a byte is read: what `validate` would call an error is refused
while planning, and what the source has already is carried along and said."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import gdn_models
import golden
import pytest
from broken_repos import resized
from checkpoints import (
    Model,
    bf16_moe,
    edit_json,
    fp8_moe,
    published,
    ran,
    refused,
    run_cli,
    tensor,
    watched_reads,
    without,
)
from commands import COMMANDS, OTHERS, Command, written
from hub_client import hub_and_client
from loaders.published import published as of_release

from qconvert import api
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.main import cli
from qconvert.core.errors import PlanError, QConvertError
from qconvert.plan.plan import Plan, run_passes
from qconvert.recipe.recipe import parse_recipe
from qconvert.run.executor import execute
from qconvert.run.folder import staging
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.options import RunOptions
from qconvert.validation import judgement, runner
from qconvert.validation.findings import Finding
from qconvert.validation.judgement import judged, planned_checkpoint
from qconvert.validation.runner import Folder, Need, judge_headers, validators

_ROOT = Path(__file__).parent.parent
Change = Callable[[Model], None]


def planned(source: Path, recipe: str) -> Plan:
    return run_passes(Plan.identity(Checkpoint.open(source)), parse_recipe(recipe, "test").passes)


# --- What is refused ------------------------------------------------------------------------------

REFUSED = [
    # Split, under a class whose loaders take fused ones.
    ("qwen3_next", ("unfuse",), "QC052", "as_class: {to: qwen3_5_text}"),
    # Contiguous, under a class that is interleaved: another class of the same fault.
    ("qwen3_next", ("fuse", "--groups", "1"), "QC052", "takes 4 (interleaved"),
    # Interleaved under the class that is contiguous.
    ("qwen3_5_moe_text", ("fuse", "--groups", "4"), "QC052", "takes 1 (contiguous)"),
]


@pytest.mark.parametrize(("kind", "words", "rule", "said"), REFUSED)
def test_what_validate_would_call_an_error(
    kind: str,
    words: tuple[str, ...],
    rule: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out = gdn_models.model(kind).write(tmp_path / "source"), tmp_path / "out"
    reads = watched_reads(monkeypatch)
    command, *options = words
    result = run_cli(command, source, out, *options)
    assert result.code == 1
    assert f"the result would fail validation, so nothing is read: {rule}: " in result.err
    assert said in result.err
    assert (reads, out.exists()) == ([], False)


def test_halves_of_a_pair_are_judged_as_one(tmp_path: Path) -> None:
    """Both folders, each with the rules of its kind."""
    from qconvert.hub.readme import with_card
    from qconvert.passes.amx import ExpertsToAmx
    from qconvert.passes.pair import pair_plans
    from qconvert.passes.w4a16 import ExpertsToW4A16
    from qconvert.run.folder.prepare import prepare_together

    model = bf16_moe(hidden_size=128, moe_intermediate_size=128)
    for name, held in list(model.tensors.items()):
        if ".experts." in name:
            model.tensors[name] = tensor(held.dtype, 128, 128)
    source = Checkpoint.open(model.write(tmp_path / "source"))
    plans = pair_plans(Plan.identity(source), ExpertsToAmx("int8", 1), ExpertsToW4A16())
    ready = prepare_together([with_card(plan) for plan in plans], RunOptions(jobs=1))
    cpu, gpu = planned_checkpoint(ready[0]), planned_checkpoint(ready[1])
    assert "amx" in (cpu.manifest or {})
    assert "amx" not in (gpu.manifest or {})
    judged(ready, source)
    found = judge_headers(Folder(cpu, source, gpu, planned=True))
    assert [f for f in found if f.severity == "error"] == []
    stranger = prepare(with_card(plans[1]), RunOptions(jobs=1))
    assert stranger.plan.facts["pair"]["side"] == "gpu"
    stolen = judge_headers(Folder(cpu, source, Checkpoint.open(source.root), planned=True))
    assert [f.rule for f in stolen if f.severity == "error"] in ([], ["QC050"])


# --- A plan's folder is the folder ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("fp8", "passes: [dequant]"),
        ("fp8", "passes: []"),
        ("next", "passes: [unfuse]"),
        ("next", "passes: [unfuse, {as_class: {to: qwen3_5_text}}]"),
        ("qwen3.5", "passes: [{fuse: {consumer: sglang}}]"),
    ],
)
def test_a_planned_folder_is_the_one_that_is_written(
    kind: str, recipe: str, tmp_path: Path
) -> None:
    models = {
        "fp8": fp8_moe(),
        "next": gdn_models.model("qwen3_next", scale="F32"),
        "qwen3.5": gdn_models.model("qwen3_5_moe", scale="F32"),
    }
    source = models[kind].write(tmp_path / "source")
    plan = planned(source, recipe)
    here = planned_checkpoint(prepare(plan, RunOptions(jobs=1)))
    execute(plan, tmp_path / "out", RunOptions(jobs=1))
    there = Checkpoint.open(tmp_path / "out")
    assert {n: s.type for n, s in here.items()} == {n: s.type for n, s in there.items()}
    assert all(here[name].offset == there[name].offset for name in there)
    assert here.config == there.config
    assert here.quantization_configs == there.quantization_configs
    known = {key: value for key, value in (there.manifest or {}).items() if key != "seal"}
    assert {**(here.manifest or {}), "identity": 0} == {**known, "identity": 0}
    assert here.side_files == there.side_files
    origin = Checkpoint.open(source)
    rules = [
        {(found.rule, found.severity) for found in judge_headers(Folder(one, origin, planned=True))}
        for one in (here, there)
    ]
    assert rules[0] == rules[1]


def test_nothing_of_a_planned_folder_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opens files says so in its needs; the others get along without any."""
    ready = prepare(
        planned(fp8_moe().write(tmp_path / "s"), "passes: [dequant]"), RunOptions(jobs=1)
    )
    source = ready.plan.checkpoint
    here = planned_checkpoint(ready)

    def closed(self: Path, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{self} was opened")

    with monkeypatch.context() as patched:
        for name in ("open", "read_bytes", "read_text", "stat", "is_file", "exists"):
            patched.setattr(Path, name, closed)
        judge_headers(Folder(here, source, planned=True))
    judged_by = [v for v in validators() if not v.needs - {"source", "model", "gdn", "nvfp4"}]
    assert len(judged_by) > 5


# --- What the source has already -----------------------------------------------------------------


def _lacks_a_norm(model: Model) -> None:
    model.tensors = without(model.tensors, ["model.layers.1.input_layernorm.weight"])


def _counts_too_many_layers(model: Model) -> None:
    model.config["num_hidden_layers"] = 3


def _is_quantized_and_says_not(model: Model) -> None:
    model.config["quantization_config"]["modules_to_not_convert"] = [
        "model.layers.0.self_attn.q_proj"
    ]


@pytest.mark.parametrize(
    ("change", "recipe"),
    [
        (_lacks_a_norm, "copy"),
        (_lacks_a_norm, "dequant-fp8"),
        (_counts_too_many_layers, "copy"),
        (_is_quantized_and_says_not, "copy"),
    ],
)
def test_errors_of_the_source_are_carried_along_and_said(
    change: Change, recipe: str, tmp_path: Path
) -> None:
    model = fp8_moe()
    change(model)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    shown = ran("plan", recipe, source, out)
    assert re.search(r"^warning QC\d+ of the source", shown.out, re.MULTILINE)
    told = json.loads(run_cli("plan", recipe, source, out, "--json").out)
    assert told["findings"]
    assert all(one["of_source"] for one in told["findings"] if one["severity"] == "error")
    assert run_cli("run", recipe, source, out, "--jobs", "1").code == 0
    assert published(out)


def test_an_error_that_the_source_has_elsewhere_excuses_nothing(tmp_path: Path) -> None:
    """Split projections under Qwen3-Next, of a source that lacks a norm: the one is added."""
    model = gdn_models.model("qwen3_next")
    model.tensors = without(model.tensors, ["model.layers.1.input_layernorm.weight"])
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    said = refused("unfuse", source, out)
    assert "QC052: " in said
    assert "QC013" not in said


def test_a_renamed_tensor_is_still_the_sources(tmp_path: Path) -> None:
    """Qwen3.5's names change with its class: what is missing there is missing here."""
    model = gdn_models.model("qwen3_5_moe")
    gone = "model.language_model.layers.1.linear_attn.norm.weight"
    model.tensors = without(model.tensors, [gone])
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    result = ran("fuse", source, out, "--for", "qwen3-next", "--dry-run")
    assert "of the source: model.layers.1.linear_attn.norm" in result.out


def test_a_warning_is_shown_and_does_not_refuse(tmp_path: Path) -> None:
    """Groups of single ranks: for a loader of one's own."""
    source = gdn_models.model("qwen3_5_moe_text").write(tmp_path / "source")
    result = ran("fuse", source, tmp_path / "out", "--groups", "2", "--dry-run")
    assert "warning QC052 of the result: " in result.out


@pytest.mark.parametrize("name", ["mlp.gate.smooth_factor", "self_attn.q_proj.pre_quant_scale"])
def test_a_copied_tensor_that_nobody_knows_or_reads_is_a_warning(name: str, tmp_path: Path) -> None:
    """Of the run, with -q too, and for programs."""
    model = of_release("qwen3_moe")
    extra = f"model.layers.0.{name}"
    model.tensors[extra] = tensor("F32", 64)
    source = model.write(tmp_path / "source")
    done = ran("run", "copy", source, tmp_path / "out", "-q")
    assert f"QC132 of the result (and 1 more): {extra}: a tensor of unknown role" in done.err
    found = api.plan("copy", source).warnings
    assert [text for text in found if "QC132" in text and extra in text]


def test_the_message_names_the_first_and_counts_the_others(tmp_path: Path) -> None:
    source = gdn_models.model("qwen3_5_moe_text").write(tmp_path / "source")
    ready = prepare(planned(source, "passes: [{fuse: {consumer: sglang}}]"), RunOptions(jobs=1))
    bad = [Finding("QC013", "error", f"x{n}", "missing") for n in range(3)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            judgement, "judge_headers", lambda folder: bad if folder.source is not None else []
        )
        with pytest.raises(PlanError, match=r"QC013: x0: missing \(2 more errors like it\)\. "):
            judged([ready], ready.plan.checkpoint)


# --- Every folder, before it is published ---------------------------------------------------------

PLANTED = "a fault that no plan shows"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


def _planted(folder: Folder) -> Iterator[Finding]:
    """An error of every folder whose config.json has the mark."""
    if PLANTED in folder.checkpoint.config:
        yield Finding("QC013", "error", "config.json", PLANTED)


@dataclass(frozen=True)
class _Planted:
    name: str = "planted"
    proves: str = "nothing"
    needs: frozenset[Need] = frozenset({"files"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        return _planted(folder)


def _mark_made_files(monkeypatch: pytest.MonkeyPatch, room: Path) -> None:
    """From now on every config.json that is written has the mark, or has it already."""
    own = staging.config_bytes

    def marked(plan: Plan) -> bytes:
        return json.dumps({**json.loads(own(plan)), PLANTED: 1}).encode()

    monkeypatch.setattr(staging, "config_bytes", marked)
    for where in (runner, judgement):
        for name in ("validators", "_validators_with"):
            if (found := getattr(where, name, None)) is not None:
                monkeypatch.setattr(
                    where, name, lambda *given, found=found: [*found(*given), _Planted()]
                )
    for file in room.glob("out/config.json"):  # of a folder that is changed
        edit_json(file, lambda config: config.update({PLANTED: 1}))
        resized(file.parent, file.name)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_no_command_publishes_what_header_rules_refuse(
    command: Command, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is planted where the plan has been judged, into the files that are written."""
    command.begin(sources, tmp_path)
    written(command.source, sources)
    before = command.result(tmp_path)
    with monkeypatch.context() as patched:
        _mark_made_files(patched, tmp_path)
        before = command.result(tmp_path) if command.inside else before
        with pytest.raises(QConvertError, match=PLANTED):
            command.run(sources, tmp_path)
    if command.inside:
        assert command.result(tmp_path) == before
        return
    assert [made for made in command.made if published(tmp_path / made)] == []
    shutil.rmtree(tmp_path / "out")
    command.run(sources, tmp_path)
    golden.same_tensors(
        f"commands.py: {command.words}", *(tmp_path / made for made in command.made)
    )
    for made in command.made:
        report = run_cli("validate", tmp_path / made)
        assert "0 errors" in report.out, report.out


def test_no_command_is_missing_from_the_table() -> None:
    """One that makes a folder is walked; the others are named."""
    walked = {command.words.split()[0] for command in COMMANDS}
    assert walked | OTHERS == set(cli.commands)
    assert not walked & OTHERS
    compared = [name for name in golden.sections("outputs.txt") if name.startswith("commands.py: ")]
    assert len(compared) == len([command for command in COMMANDS if not command.inside])


def test_a_folder_on_the_hub_is_judged_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent before is not in sight, and stays so."""
    source = fp8_moe().write(tmp_path / "source")
    with hub_and_client(tmp_path / "home") as (hub, _), monkeypatch.context() as patched:
        _mark_made_files(patched, tmp_path)
        with pytest.raises(QConvertError, match=PLANTED):
            api.run("dequant-fp8", source, "hf://me/made", jobs=1, work_dir=tmp_path / "work")
        assert [n for n in hub.repos["me/made"].tree() if n != ".gitattributes"] == []


def test_a_card_that_the_hub_would_refuse_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that looks at files, of a folder that no plan can show: QC059."""
    source, out = fp8_moe().write(tmp_path / "source"), tmp_path / "out"
    own = staging.made_texts

    def torn(ready: Any) -> dict[str, bytes]:
        return {**own(ready), "README.md": b"---\nlicense: mit\n"}

    monkeypatch.setattr(staging, "made_texts", torn)
    assert "the result fails validation, so nothing is published: QC059: README.md" in refused(
        "dequant", source, out, "--jobs", "1"
    )
    assert published(out) == []


def test_half_a_draft_is_no_draft(tmp_path: Path) -> None:
    """Its folder is made for the draft alone, so that the source's error is no excuse. Of the model
    beside it, it is."""
    model = of_release("qwen3_5_moe_text", experts=2, inner=128)
    model.tensors = without(model.tensors, ["mtp.fc.weight"])
    source = model.write(tmp_path / "source")
    said = refused("mtp", "extract", source, tmp_path / "draft", "--jobs", "1")
    assert "the draft (MTP) layers are not sound: QC" in said
    assert "mtp.fc.weight" in said
    ran("mtp", "drop", source, tmp_path / "bare", "--jobs", "1")
    assert "mtp.fc.weight" in refused(
        "mtp", "graft", tmp_path / "bare", source, tmp_path / "out", "--jobs", "1"
    )


# --- Counts that do not match ---------------------------------------------------------------------

_GDN = "model.language_model.layers.{}.linear_attn"


def _layers_of(model: Model, *, drop: str = "", add: tuple[str, str] = ("", "")) -> Model:
    """Without tensors below a module, or with another layer's under its name."""
    model.tensors = {n: t for n, t in model.tensors.items() if not (drop and n.startswith(drop))}
    for name, held in list(model.tensors.items()):
        if add[0] and name.startswith(add[0]):
            model.tensors[add[1] + name.removeprefix(add[0])] = held
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"drop": _GDN.format(1)}, f"matched 2 of 3 .*; missing: {_GDN.format(1)}$"),
        (
            {"add": (_GDN.format(1), _GDN.format(3))},
            f"matched 4 of 3 .*; not counted by the config: {_GDN.format(3)}$",
        ),
        (
            {"drop": _GDN.format(0), "add": (_GDN.format(1), _GDN.format(7))},
            None,  # as many as expected
        ),
    ],
)
def test_a_count_names_the_module(change: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    model = _layers_of(gdn_models.model("qwen3_5_moe"), **change)
    done = run_cli("fuse", model.write(tmp_path / "s"), tmp_path / "o", "--for", "sglang")
    assert done.code == 1
    if said is not None:
        assert re.search(said, done.err.strip()), done.err


def test_experts_beyond_the_count_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pass that counts matrices by layer and expert: those of layers that the config has not."""
    from qconvert.models import experts

    source = of_release("glm4_moe", experts=2, inner=128).write(tmp_path / "source")
    monkeypatch.setattr(experts, "_draft_layers", lambda plan: [])
    done = run_cli("w4a16", "--rtn", source, tmp_path / "out")
    assert done.code == 1
    assert re.search(
        r"matched \d+ of \d+ expert matrices .*; not counted by the config: "
        r"model\.layers\.3\.mlp\.experts\.0\.down_proj, .* and 2 more",
        done.err,
    ), done.err


# --- Nothing goes past the judge ------------------------------------------------------------------


def test_every_conversion_is_prepared_in_one_place() -> None:
    """`_with_verdicts` in service/converting.py; no command, and nothing else outside of `run`, prepares
    a plan by itself. Advice judges its candidates and carries none out; `fit` keeps codes in a folder of
    its own, to measure them."""
    found: dict[str, int] = {}
    for file in (_ROOT / "qconvert").rglob("*.py"):
        name = file.relative_to(_ROOT / "qconvert").as_posix()
        text = file.read_text(encoding="utf-8")
        if name.startswith("run/") or not re.search(r"(prepare|execute|run_)\w*\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("prepare", "prepare_together", "execute", "run_prepared"):
                found[name] = found.get(name, 0) + 1
            if called == "run_together":
                assert isinstance(node, ast.Call)
                assert "judge" in {given.arg for given in node.keywords}, f"{name}: {node.lineno}"
    assert found == {"service/converting.py": 1, "advise/options.py": 1, "fit/fitting.py": 1}


# --- Examples that are shown ---------------------------------------------------------------------


def examples() -> list[tuple[str, str]]:
    """Lines of every --help that run qconvert."""
    found: list[tuple[str, str]] = []

    def walk(command: click.Command, path: str) -> None:
        for line in (command.help or "").splitlines():
            if line.strip().startswith("qconvert "):
                found.append((path, line.strip()))
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                walk(inner, f"{path} {name}")

    walk(cli, "qconvert")
    return found


@pytest.mark.parametrize(("path", "line"), examples())
def test_every_example_of_help_parses(path: str, line: str) -> None:
    import shlex

    words = shlex.split(line.partition("|")[0].partition(">")[0])[1:]
    command: click.Command = cli
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    command.make_context(line, words, parent=click.Context(cli, **cli.context_settings))


# What the sources of examples are, as far as their class matters here.
_CLASSES = {
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5-35B-A3B-FP8": "qwen3_5_moe",
    "Qwen3.5": "qwen3_5_moe",
}


@pytest.mark.parametrize("command", ["fuse", "unfuse"])
def test_examples_of_layouts_can_be_planned(command: str, tmp_path: Path) -> None:
    import shlex

    tried = 0
    for path, line in examples():
        if path != f"qconvert {command}":
            continue
        words = shlex.split(line)[2:]
        kind = next((kind for name, kind in _CLASSES.items() if name in words[0]), None)
        if words[0] == "fused-for-sglang":
            source = tmp_path / "fused"
            if not source.is_dir():
                plain = gdn_models.model("qwen3_5_moe").write(tmp_path / "plain")
                assert run_cli("fuse", plain, source, "--for", "sglang", "--jobs", "1").code == 0
        else:
            scale = "F32" if "FP8" in words[0] else None
            made = gdn_models.model(kind or "qwen3_5_moe_text", scale=scale)
            source = made.write(tmp_path / f"source-{tried}")
        # Of the small models 4 are all key heads, of a published one a rank's.
        options = ["2" if word == "4" else word for word in words[2:] if word != "--dry-run"]
        result = run_cli(command, source, tmp_path / "out", *options, "--dry-run")
        assert result.code == 0, (line, result.err)
        tried += 1
    assert tried == 3


# --- unfuse --for ---------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", ["vllm", "transformers", "sglang"])
def test_no_loader_takes_qwen3_next_apart(consumer: str, tmp_path: Path) -> None:
    source = gdn_models.model("qwen3_next").write(tmp_path / "source")
    said = refused("unfuse", source, tmp_path / "out", "--for", consumer)
    assert f"{consumer} takes interleaved (4 groups) projections of qwen3_next" in said
    assert "--for qwen3.5" in said


def test_unfuse_for_the_class_that_takes_them(tmp_path: Path) -> None:
    source, out = gdn_models.model("qwen3_next").write(tmp_path / "source"), tmp_path / "out"
    ran("unfuse", source, out, "--for", "qwen3.5", "--jobs", "1")
    made = Checkpoint.open(out)
    assert made.config["model_type"] == "qwen3_5_moe_text"
    assert (made.manifest or {})["gdn_groups"] == 0
    checked = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    assert checked.code == 0, checked.out
    shown = run_cli("unfuse", source, out, "--for", "qwen3.5", "--print-recipe").out
    assert "consumer: qwen3.5" in shown
    assert "to: qwen3_5_text" in shown


@pytest.mark.parametrize("consumer", ["vllm", "transformers", "sglang", "qwen3.5"])
def test_unfuse_of_qwen3_5_names_its_consumer(consumer: str, tmp_path: Path) -> None:
    plain = gdn_models.model("qwen3_5_moe").write(tmp_path / "plain")
    assert run_cli("fuse", plain, tmp_path / "f", "--for", "sglang", "--jobs", "1").code == 0
    ran("unfuse", tmp_path / "f", tmp_path / "out", "--for", consumer, "--dry-run")


def test_a_recipe_that_lacks_the_class_is_told_so(tmp_path: Path) -> None:
    source = gdn_models.model("qwen3_next").write(tmp_path / "source")
    with pytest.raises(PlanError, match=r"the recipe lacks `as_class: \{to: qwen3_5_text\}`"):
        planned(source, "passes: [{unfuse: {consumer: qwen3.5}}]")


def test_the_manifest_of_a_plain_unfuse_is_as_it_was(tmp_path: Path) -> None:
    plan = planned(gdn_models.model("qwen3_next").write(tmp_path / "source"), "passes: [unfuse]")
    assert [(entry.name, entry.options) for entry in plan.log] == [
        ("unfuse", {"source_groups": None, "consumer": None})
    ]
