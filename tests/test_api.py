"""The API for Python programs: its names, what they return, that they are judged, and that importing
qconvert is light."""

from __future__ import annotations

import doctest
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gdn_models
import golden
import pytest
import torch
from checkpoints import bf16_moe, convert, fp8_moe, published, run_cli, tree, watched_reads

import qconvert
from qconvert import api
from qconvert.cli.convert import CommandOptions, plan_options
from qconvert.cli.demo import write_sample
from qconvert.core.errors import QConvertError, UsageError
from qconvert.passes.dequant import Dequant
from qconvert.passes.drop import Drop
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.samples.request import Calibration
from qconvert.service.converting import _step
from qconvert.validation.options import ValidateOptions

NAMES = api.__all__


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_moe().write(tmp_path_factory.mktemp("api") / "source")


# --- Names ---------------------------------------------------------------------------------------


def test_the_names_are_these() -> None:
    """A name that goes, or changes its meaning, breaks programs of others: CHANGELOG says so."""
    assert set(golden.sections("api.txt")) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_these(name: str) -> None:
    """Of classes, their methods too."""
    value = getattr(api, name)
    methods = sorted(vars(value).items()) if inspect.isclass(value) else ()
    lines = [f"{name}{_signature(value)}"]
    for method, member in methods:
        if not method.startswith("_"):
            member = getattr(member, "fget", member)
            lines.append(f".{method}{_signature(member) if callable(member) else ''}")
    golden.same("api.txt", name, lines)


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except ValueError:
        return ""


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(api, name))


def test_the_package_says_where_its_names_are() -> None:
    """`import qconvert` alone is light, and has the API as an attribute."""
    code = (
        "import sys, qconvert\n"
        "print('qconvert.api' in sys.modules, 'api' in dir(qconvert))\n"
        "print(qconvert.api.plan.__name__, qconvert.__version__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"False True\nplan {qconvert.__version__}\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qconvert.nothing  # noqa: B018


@pytest.mark.parametrize("statement", ["import qconvert", "import qconvert.api"])
def test_importing_is_light(statement: str) -> None:
    heavy = (
        "torch",
        "numpy",
        "pydantic",
        "yaml",
        "click",
        "huggingface_hub",
        "transformers",
        "tqdm",
    )
    code = f"import sys; {statement}\nprint([name for name in {heavy!r} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_examples(tmp_path: Path) -> None:
    """Of the docstrings, on the demo's sample."""
    write_sample(tmp_path / "sample")
    names: dict[str, Any] = {
        "api": api, "sample": tmp_path / "sample", "folder": tmp_path,
    }  # fmt: skip
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(optionflags=flags)
    finder = doctest.DocTestFinder()
    found = finder.find(api, "api")  # its own, which makes what others look at
    functions = [
        api.run,
        *(getattr(api, name) for name in NAMES if name[0].islower() and name != "run"),
    ]
    found += [test for one in functions for test in finder.find(one, one.__name__)]
    found = [test for test in found if test.examples]
    said: list[str] = []
    for test in found:
        test.globs.update(names)
        runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
    assert len(found) == 19


# What commands take from elsewhere than the API, beside how things are shown, checked as text and
# completed: a pass or recipe that is an argument of the API, and names of types.
_SHOWN = (
    "qconvert.cli", "qconvert.core", "qconvert.validation.reports", "qconvert.validation.diff",
    "qconvert.passes", "qconvert.contrib", "qconvert.recipe", "qconvert.plan", "qconvert.samples",
    "qconvert.evaluate", "qconvert.advise.advice", "qconvert.formats", "qconvert.runtimes",
    "qconvert.checkpoint", "qconvert.validation.runner", "qconvert.validation.findings",
)  # fmt: skip
_OF_RUNS = {
    "qconvert.fit": "names of formats, stated once",
    "qconvert.fit.fitting": "types of api.fitting's results",
    "qconvert.fit.groups": "a choice in lines",
    "qconvert.calibrate.gpu_workers": "imports ahead of planning: faster, no other result",
    "qconvert.calibrate.backend": "how much disk a plan needs",
    "qconvert.hub.card.front": "the name of a source in a card",
    "qconvert.hub.readme": "the same",
    "qconvert.hub.destination": "whether an OUT is a repo, as text",
    "qconvert.hub.headers": "api.headers_of, with what was fetched",
    "qconvert.hub.upload": "types of api.upload's result",
    "qconvert.validators.headers.structure": "which names that a family requires are in no form: shown",
    "qconvert.validation.judgement": "a planned folder, asked whether kt-kernel reads it",
    "qconvert.run.work.forkserver": "imports ahead of planning: faster, no other result",
    "qconvert.run.work.options": "options, stated once for commands and the API",
    "qconvert.run.folder": "the demo's process that is killed",
    "qconvert.run.folder.prepare": "types of Planned",
    "qconvert.run.dry_run": "api.DryRun",
    "qconvert.run.work.estimate": "time left, of Events; this machine's speed, for a plan's time",
    "qconvert.run.profile": "api.profiled",
    "qconvert.run.engines.shard": "options of a command line",
    "qconvert.run.folder.status": "the command that a journal names; api.status",
    "qconvert.service": "imported for --profile to measure, which the API does by name",
    "qconvert.validation.options": "options, stated once for commands and the API",
}


def test_commands_have_nothing_that_the_api_lacks() -> None:
    """What else a command imports would be work that a program cannot ask for."""
    package = Path(api.__file__).parent
    found = {
        module
        for file in (package / "cli").glob("*.py")
        for module in re.findall(
            r"^ *(?:from|import) (qconvert\.[a-z_.0-9]+)",
            file.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        if not module.startswith((*_SHOWN, "qconvert.api"))
    }
    assert found <= set(_OF_RUNS), found - set(_OF_RUNS)
    assert set(_OF_RUNS) <= found, set(_OF_RUNS) - found


# --- The same as the command line ----------------------------------------------------------------


def test_a_run_is_the_commands(source: Path, tmp_path: Path) -> None:
    """Byte for byte, the model card among it; and it is told of the progress."""
    told: list[tuple[int, int]] = []
    made = api.run(
        "dequant-fp8", source, tmp_path / "ours", jobs=1,
        events=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    convert("dequant", source, tmp_path / "theirs")
    assert tree(made.folder) == tree(tmp_path / "theirs")
    assert "README.md" in made.files
    assert told[-1][0] == told[-1][1] == api.open_checkpoint(made.folder).nbytes
    assert (made.already_done, made.dry_run, made.resumed_units) == (False, False, 0)
    assert made.tensors == len(api.open_checkpoint(made.folder))
    assert api.diff(made.folder, tmp_path / "theirs") == []


@pytest.mark.parametrize("steps", [Dequant(), (Dequant(),), [Dequant()], "dequant-fp8"])
def test_what_a_recipe_may_be(steps: Any, source: Path) -> None:
    folder = api.plan(steps, source).folders[0]
    assert folder.fingerprint == api.plan("dequant-fp8", source).folders[0].fingerprint
    assert folder.out is None


def test_a_file_is_a_recipe_too(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("passes: [dequant]\n")
    assert api.plan(file, source).tensors == api.plan("dequant-fp8", source).tensors


def test_a_plan_says_what_a_user_wants(source: Path, tmp_path: Path) -> None:
    planned = api.plan("dequant-fp8", str(source), str(tmp_path / "out"), memory="512MiB", jobs=1)
    told = json.loads(
        run_cli("dequant", source, tmp_path / "out", "--memory", "512MiB", "--jobs", "1",
                "--dry-run", "--json").out
    )  # fmt: skip
    (folder,) = planned.folders
    assert folder.fingerprint == told["fingerprint"]
    assert (planned.tensors, planned.nbytes) == (len(told["tensors"]), told["bytes"]["out"])
    assert (planned.memory, planned.losses) == (told["memory"], told["lossy_steps"])
    assert folder.disk >= told["disk"]
    (look,) = planned.dry_run()
    assert (look.out, look.state, look.refusals) == (tmp_path / "out", "new", ())
    assert not (tmp_path / "out").exists()


def test_the_defaults_are_the_command_lines(source: Path) -> None:
    """Options of a command that were not given are what a function takes by itself."""
    given = plan_options(CommandOptions(dry_run=True))
    assert set(given) == set(api.PlanOptions.__annotations__)
    asked, plainly = api.plan("copy", source, **given), api.plan("copy", source)
    assert asked.folders[0].ready.options == plainly.folders[0].ready.options
    assert asked.folders[0].fingerprint == plainly.folders[0].fingerprint
    assert inspect.signature(api.validate).parameters["level"].default == "headers"
    assert set(ValidateOptions().keywords()) == set(api.ValidateKeywords.__annotations__)
    told = {name: p.default for name, p in inspect.signature(api.evaluate).parameters.items()}
    assert (told["samples"], told["length"], told["seed"], told["write"]) == (None, 2048, 0, False)


def test_an_option_is_one_field() -> None:
    """It is in every conversion's command, and in the API where a program may ask for it."""
    from qconvert.cli.main import cli
    from qconvert.core.options import options_in

    fields = options_in(CommandOptions)
    shown = {param.name for param in cli.commands["dequant"].params}
    assert {name for name, (_, one) in fields.items() if one.command} <= shown
    of_validate = {param.name for param in cli.commands["validate"].params} | {"runtime"}
    assert set(options_in(ValidateOptions)) <= of_validate
    of_w4a16 = {param.name for param in cli.commands["w4a16"].params}
    fields = options_in(api.Calibration)
    assert {name for name, (_, one) in fields.items() if not one.setting} <= of_w4a16
    for function, options in ((api.plan, api.PlanOptions), (api.validate, api.ValidateKeywords)):
        assert set(options.__annotations__) < set(inspect.signature(function).parameters)
        assert all(f"`{name}`: " in str(options.__doc__) for name in options.__annotations__)


# --- Judged and refused --------------------------------------------------------------------------


def test_a_result_that_would_not_validate_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = gdn_models.model("qwen3_next").write(tmp_path / "source")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("passes: [unfuse]\n")
    reads = watched_reads(monkeypatch)
    calls = (
        lambda: api.plan(recipe, source),
        lambda: api.run(recipe, source, tmp_path / "out"),
        lambda: api.run(recipe, source, tmp_path / "out", dry_run=True),
        lambda: api.plan_stages(recipe, source, tmp_path / "out", (2, 2), "vllm"),
    )
    for call in calls:
        with pytest.raises(api.PlanError, match="QC052"):
            call()
    assert (reads, (tmp_path / "out").exists()) == ([], False)


def test_errors_are_types(source: Path, tmp_path: Path) -> None:
    for error, call in (
        (api.RecipeError, lambda: api.load_recipe("gone")),
        (api.CheckpointError, lambda: api.open_checkpoint(tmp_path / "gone")),
        (api.CheckpointError, lambda: api.validate(tmp_path / "gone")),
        (api.PlanError, lambda: api.plan(Drop(match="no.such.*", why="a test"), source)),
        (api.UsageError, lambda: api.plan("copy", source, memory="lots")),
        (api.UsageError, lambda: api.carry_out(api.plan("copy", source))),
        (api.UsageError, lambda: api.evaluate(source, source, None)),
        (api.UsageError, lambda: api.plan_after("copy", source, "dequant")),
        (api.UsageError, lambda: api.plan("copy", source, base_model="a/b/c")),
        (api.UsageError, lambda: api.plan("copy", source, jobs=0)),
        (api.UsageError, lambda: api.validate(source, layers="3-1")),
        (api.UsageError, lambda: api.validate(source, level="all")),  # type: ignore[arg-type]
        (api.UsageError, lambda: api.validate(source, tp=2)),
        (api.OutputError, lambda: api.run("copy", source, source / "out")),
    ):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        assert isinstance(caught.value, QConvertError)
    assert not (source / "out").exists()
    with pytest.raises(TypeError, match="no option 'memroy'"):
        api.plan("copy", source, memroy="1GB")  # type: ignore[call-arg]


def test_a_dry_run_refuses_what_the_run_would(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(api.OutputError):
        api.run("copy", source, tmp_path / "full", dry_run=True)
    would = api.run("copy", source, tmp_path / "out", dry_run=True)
    assert (would.dry_run, would.already_done, would.files) == (True, False, ())
    assert not (tmp_path / "out").exists()
    made = api.run("copy", source, tmp_path / "out", jobs=1)
    again = api.run("copy", source, tmp_path / "out", dry_run=True)
    assert again.already_done
    assert (again.tensors, again.nbytes) == (made.tensors, made.nbytes)


def test_warnings_are_the_plans(tmp_path: Path) -> None:
    source = gdn_models.model("qwen3_5_moe_text").write(tmp_path / "source")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("passes: [{fuse: {groups: 2}}]\n")
    made = api.run(recipe, source, tmp_path / "out", jobs=1)
    assert [text for text in made.warnings if text.startswith("QC052 of the result: ")]


# --- Several folders -----------------------------------------------------------------------------


def test_stages_and_back(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "stages"
    planned = api.plan_stages("copy", source, out, [1, 1], "sglang==0.5.23", link=False, jobs=1)
    assert planned.partition == (1, 1)
    assert planned.environment == ("SGLANG_PP_LAYER_PARTITION=1,1",)
    assert [look.state for look in planned.dry_run()] == [None, "new", "new"]
    made = api.carry_out(planned)
    assert [one.folder.name for one in made] == ["stage-00-of-02", "stage-01-of-02"]
    assert api.validate(out, source, level="full").errors == 0
    joined = api.run("copy", out, tmp_path / "joined", jobs=1)
    assert api.diff(joined.folder, source) == []
    (out / "mine").mkdir()
    with pytest.raises(api.OutputError, match="holds mine"):
        api.carry_out(planned)
    with pytest.raises(api.OutputError, match="holds mine"):
        api.check_dry_run(planned.dry_run())


def test_a_pair_from_one_read(tmp_path: Path) -> None:
    from checkpoints import tensor

    from qconvert.passes.amx import ExpertsToAmx

    model = bf16_moe(hidden_size=128, moe_intermediate_size=128)
    for name, held in list(model.tensors.items()):
        if ".experts." in name:
            model.tensors[name] = tensor(held.dtype, 128, 128)
    source = model.write(tmp_path / "source")
    outs = tmp_path / "cpu", tmp_path / "gpu"
    planned = api.plan_pair(ExpertsToAmx("int8", 1), source, *outs, jobs=1)
    assert (planned.together, len(planned.parts)) == (True, 1)
    made = api.carry_out(planned)
    assert tuple(one.folder for one in made) == outs
    assert all("README.md" in published(out) for out in outs)
    assert api.validate(outs[0], source, pair=outs[1]).errors == 0


def test_a_repo_or_folder_of_stages_takes_no_pair(source: Path, tmp_path: Path) -> None:
    api.carry_out(api.plan_stages("copy", source, tmp_path / "s", "1,1", jobs=1))
    with pytest.raises(api.UsageError, match="--pair goes with"):
        api.validate(tmp_path / "s", pair=source)


# --- Documents -----------------------------------------------------------------------------------


def test_the_page_shows_a_program_that_runs(source: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
    first, program, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    write_sample(tmp_path / "sample")
    paths = repr((str(tmp_path / "sample"), str(tmp_path / "int4")))[1:-1]
    exec(first.replace('"GLM-4.5-Air", "out"', paths).replace("tp=4", "tp=1"), {})
    assert (tmp_path / "int4" / "config.json").exists()
    for name, path in (("DeepSeek-V3-bf16", tmp_path / "out"), ("DeepSeek-V3", source)):
        program = program.replace(f'"{name}"', repr(str(path)))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program.replace("jobs=8", "jobs=1"), names)
    assert names["made"].folder == tmp_path / "out"
    assert names["report"].errors == 0


# --- Uploads -------------------------------------------------------------------------------------


def test_what_would_be_uploaded_is_refused_or_listed(source: Path, tmp_path: Path) -> None:
    """Without the Hub; with it: test_hub_upload.py."""
    made = api.run("dequant-fp8", source, tmp_path / "out", jobs=1).folder
    before = tree(made)
    checked = api.check_upload(made, source, level="full", dry_run=True)
    assert checked.report.errors == 0
    files = checked.files(base_model="org/model")
    assert set(files) == set(before)
    assert files["README.md"] != (made / "README.md").stat().st_size
    assert tree(made) == before
    with pytest.raises(api.OutputError, match="dry run"):
        api.upload(checked, "me/model")
    (made / "config.json").write_text("{}")
    broken = api.check_upload(made, level="headers")
    with pytest.raises(api.OutputError, match="not uploaded: "):
        api.upload(broken, "me/model")
    for repo, revision in (("model", None), ("me/model@a", "b")):
        with pytest.raises(api.UsageError):
            api.destination(repo, revision)
    with pytest.raises(api.UsageError, match="--create-pr"):
        api.destination("me/model", "x", create_pr=True)


def test_quantize_takes_the_words_of_the_commands(tmp_path: Path) -> None:
    """The same bytes as the command's; what no part has is refused before a file is opened."""
    write_sample(tmp_path / "sample")
    made = qconvert.quantize(tmp_path / "sample", tmp_path / "a", "w4a16", group_size=32, jobs=1)
    words = ("w4a16", tmp_path / "sample", tmp_path / "b", "--rtn", "--group-size", "32")
    assert run_cli(*words).code == 0
    (shard,) = (name for name in made.files if name.endswith(".safetensors"))
    assert (tmp_path / "a" / shard).read_bytes() == (tmp_path / "b" / shard).read_bytes()
    assert dir(qconvert) == ["__version__", "api", "open", "quantize"]
    assert "open" not in qconvert.__all__  # `import *` leaves Python's own
    for form, options, said in (
        ("w4a16", {"gruop_size": 32}, "has no option 'gruop_size'"),
        ("fp8", {"data": "a.jsonl"}, "fp8 is rounded, without data"),
    ):
        with pytest.raises(UsageError, match=said):
            qconvert.quantize("missing", tmp_path / "c", form, **options)


@pytest.mark.parametrize(("form", "name"), [("nvfp4", "nvfp4"), ("mxfp8", "quantize")])
def test_a_format_is_a_pass(form: str, name: str) -> None:
    step, rest = _step(form, None, {"targets": ("Linear",), "memory": "1GiB"})
    assert (step.name, rest) == (name, {"memory": "1GiB"})
    step, rest = _step("w4a16", "a.jsonl", {"samples": 8, "bits": 8, "jobs": 2})
    assert step == ExpertsToW4A16(bits=8, calibrate=Calibration(data="a.jsonl", samples=8))
    assert rest == {"jobs": 2}


# --- Weights of a checkpoint -----------------------------------------------------------------------


@pytest.mark.parametrize("words", ["w4a16 --rtn --group-size 32", "nvfp4 --dialect modelopt"])
def test_opened_weights_are_those_of_dequant(words: str, tmp_path: Path) -> None:
    """Under the names of the model, whatever holds them; and by ranges of the file: no other is read."""
    from safetensors.torch import load_file

    write_sample(tmp_path / "sample")
    command, *options = words.split()
    made, plain = tmp_path / "made", tmp_path / "plain"
    assert run_cli(command, tmp_path / "sample", made, *options, "--jobs", "1").code == 0
    assert run_cli("dequant", made, plain, "--jobs", "1").code == 0
    wanted: dict[str, Any] = {}
    for file in plain.glob("*.safetensors"):
        wanted |= load_file(file)
    with qconvert.open(made) as weights:
        assert set(weights) == set(wanted)
        assert len(weights) == len(wanted)
        for name in [*weights][::7]:
            one, tensor = weights[name], wanted[name]
            assert (one.shape, one.dtype) == (tuple(tensor.shape), _NAMES[tensor.dtype])
            assert bool((one.dequantize("torch") == tensor).all())
            assert (one.dequantize() == tensor.float().numpy()).all()
        packed = weights["model.layers.1.mlp.experts.2.up_proj.weight"]
        assert len(packed.tensors) > 1
        assert packed.stored != "BF16"
        with pytest.raises(UsageError, match="expected numpy or torch, found 'jax'"):
            packed.dequantize("jax")  # type: ignore[arg-type]
        assert "nothing.weight" not in weights


_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def test_opened_fp8_is_code_times_scale(tmp_path: Path) -> None:
    """By torch's own FP8, in float32, rounded once; of a source that nothing was converted of."""
    from safetensors.torch import load_file

    fp8_moe().write(tmp_path / "source")
    stored: dict[str, Any] = {}
    for file in (tmp_path / "source").glob("*.safetensors"):
        stored |= load_file(file)
    (name, scale), *_ = (
        (name, stored[f"{name}_scale_inv"]) for name in stored if f"{name}_scale_inv" in stored
    )
    code = stored[name].float()
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    high, wide = config["quantization_config"]["weight_block_size"]
    spread = scale.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)
    with qconvert.open(tmp_path / "source") as weights:
        found = weights[name].dequantize("torch")
        assert weights[name].tensors == (name, f"{name}_scale_inv")
    assert bool((found == (code * spread[: code.shape[0], : code.shape[1]]).bfloat16()).all())


def test_the_example_compares_two_checkpoints(tmp_path: Path) -> None:
    write_sample(tmp_path / "sample")
    assert (
        run_cli("w4a16", tmp_path / "sample", tmp_path / "made", "--rtn", "--jobs", "1").code == 0
    )
    script = Path(api.__file__).parent.parent / "examples" / "compare_weights.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "sample", tmp_path / "made"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(rows) > 10
    assert all(0.05 < float(row[0]) < 0.3 for row in rows)
    assert rows == sorted(rows, key=lambda row: -float(row[0]))
