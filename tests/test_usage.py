"""Every argument that is wrong by its own text ends with exit code 2, before a file is opened; what
depends on files and folders ends with 1. An option of a type that nobody listed here fails the test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import bf16_moe, run_cli

from qconvert.checkpoint.hub_cache import parse_repo
from qconvert.cli.main import cli
from qconvert.core.errors import QConvertError, RecipeError, UsageError
from qconvert.core.shown import parse_size
from qconvert.recipe.recipe import parse_recipe
from qconvert.runtimes.pipeline import check_runtime, parse_partition
from qconvert.samples.request import SETTINGS
from qconvert.validation.reports import suffix_format

_SIZES = ["", "lots", "0", "-1", "5PB", "1,5GB", "1e9", "9" * 5000]
_COUNTS = ["", "0", "-1", "1.5", "many", "9" * 5000]
_CHOICES = ["", "nope", "INT 4"]
_PATHS = ["", "a\0b"]
_SOURCES = [
    "", "a\0b", "hf://", "hf://model", "hf://datasets/a/b", "hf://a/b/file.txt", "hf://a/b@",
    "s3://", "s3://b/../c", "s3://b/a.safetensors", "https://h/model",
]  # fmt: skip
# Of a folder of this machine; and of one that may be in a store.
_FOLDERS = [*_PATHS, "s3://b/model"]
_OUTS = [*_PATHS, "s3://", "s3://b/../c", "https://h/model"]
_SCALES = ["", "0", "-1", "inf", "nan", "x"]
# Values that an option refuses by their text, by the name of its type; and by the option's own name,
# where a type says too little.
_BAD_OF_TYPE: dict[str, list[str]] = {
    "size": _SIZES, "integer range": _COUNTS, "choice": _CHOICES, "float range": _SCALES,
    "float": ["", "one", "nan", "inf"],
    "source": _SOURCES, "path": _FOLDERS, "file": ["", "a\0b"],
    "shard": ["", "1", "4/4", "-1/2", "0/0", "a/2", "auto/0", "1/" + "9" * 5000],
    "server": ["", "head:8000", "ftp://head", "http://", "http://h:x", "http://h/?a=b"],
    "address": ["", "head", "ray://head:10001", "head:", "he ad:6379", "h:1;rm"],
    "time": ["", "0", "90", "0h", "m", "-3h", "3h50", "3.5h", "50:00", "1:60:00", "h3", "9" * 5000],
    "capability": ["", "9", "nine.0", "9.0.0", "-9.0"],
    "profile": ["", "report", "out", "a\0b.json"],
    "id": ["", "model", "a/b/c", "a b/c", "/etc"],
    "pass": ["nope"],
    "consumer": ["", "tgi", "sglang=0.5", "sglang==", "transformers;rm"],
    "partition": ["", "two", "0", "-1", "1,", "1,0", "1.5", "1,-1", "9" * 5000],
    "pattern": ["", "re:", "re:(", "re:["],
    "data": ["", "chats", "chats.csv", "hf-dataset:", "hf-dataset:a:b:c:d"],
    "setting": ["", "refit", "refit=", "refit=x", "refit=-1", "order=x", "nope=1"],
    "device": ["", "gpu", "cuda:x", "cuda:-1", "mps"],
    "layers": ["", "a", "3-1", "1-", "-1", "99999999", "1,,2", "\u0663"],
    "branch": ["", "a b", "a..b", "/a", "a~1"],
}  # fmt: skip
_BAD: dict[str, list[str]] = {
    "length": ["1", *_COUNTS], "seed": ["", "-1", "x", str(2**32)],
    "targets_of_two": _CHOICES, "form": _CHOICES,
    "architecture": ["", "nope", "../qwen3_moe"], "scheme": ["", "nope", "gptq"],
    "family": ["", "a\0b", "nowhere.py"],
    "explain": ["nope", "QC999"], "files": ["report", "report.doc"],
    # Arguments
    "out": _OUTS, "repo": ["", "model", "a/b/c", "hf://", "hf://datasets/a/b", "a b/c"],
    "name": ["", "nope"],
}  # fmt: skip
# Any text says something: a pattern, a message, a column, a file that may or may not be there.
_FREE = {"tensors", "commit_message", "column", "recipe", "hotness", "loader"}
# What a command line must have beside the value that is tried.
_REST: dict[tuple[str, ...], tuple[str, ...]] = {
    ("amx",): ("--method", "int4", "--numa", "1"),
    ("kt",): ("--cpu", "int4", "--numa", "1", "--cpu-out", "cpu"),
    ("w4a16",): ("--rtn",), ("fit",): ("--rtn", "--bits", "5"),
    ("nvfp4",): ("--dialect", "modelopt"), ("quantize",): ("--format", "mxfp4"),
    ("split",): ("--pp", "1,1"),
    ("eval",): ("--against", "src", "--data", "x.txt"),
    ("ask",): ("--server", "http://h:1", "--data", "x.txt"),
    ("sign",): ("--key", "key.pem"), ("verify",): ("--key", "key.pem"),
    ("fuse",): ("--for", "sglang"), ("advise",): ("--for", "sglang"),
}  # fmt: skip
# The options of --gptq say nothing without it, which is another refusal.
_OF_GPTQ = {"data", "samples", "length", "seed", "column", "settings", "save_stats", "devices",
            "actorder", "solver"}  # fmt: skip


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


def lines(words: tuple[str, ...], command: Any) -> Iterator[list[str]]:
    """A command line for every bad value of every option and argument of a command."""
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    for param in command.params:
        key = str(param.name)
        if isinstance(param, click.Option) and param.is_flag:
            continue
        if key in _FREE:
            continue
        if words in (("nvfp4",), ("fp8",)) and key == "targets":
            key = "targets_of_two"
        values = _BAD.get(key) or _BAD_OF_TYPE[param.type.name]
        if words == ("validate",) and key == "out":
            values = _SOURCES
        for value in values:
            given = [value if p is param else p.name for p in arguments if p.required or p is param]
            rest = _REST.get(words, ())
            if isinstance(param, click.Option):
                if words == ("w4a16",) and key in _OF_GPTQ - {"data"}:
                    rest = ("--gptq", "--synthetic")
                elif words == ("nvfp4",) and key in _OF_GPTQ - {"data"}:
                    rest += ("--gptq", "--synthetic")
                given += [*rest, f"{param.opts[0]}={value}"]
            else:
                given += rest
            given = ["dequant-fp8" if word == "recipe" else str(word) for word in given]
            given = ["me/model" if word == "repo" else word for word in given]
            yield [*words, *given]


@pytest.mark.parametrize(
    ("words", "command"),
    list(commands(cli)),
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
)
def test_a_bad_value_is_a_usage_error(
    words: tuple[str, ...], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of these names exists, so 2 says that none was looked for."""
    monkeypatch.chdir(tmp_path)
    for line in lines(words, command):
        result = run_cli(*line)
        assert (result.code, result.out) == (2, ""), (line, result.err)
        assert "Error: " in result.err, line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "fuse s o",
        "fuse s o --what qkv",
        "fuse s o --what gate_up",
        "split s o --pp 2",
        "split s o --pp 1,1 --for transformers",
        "split s o --pp 1,1 --data x.txt",
        "w4a16 s o",
        "w4a16 s o --rtn --gptq --synthetic",
        "w4a16 s o --rtn --actorder group",
        "w4a16 s o --rtn --set order=stored",
        "w4a16 s o --rtn --set refit=0",
        "w4a16 s o --rtn --set descent=0",
        "w4a16 s o --gptq --synthetic --solver llmcompressor --scales search",
        "w4a16 s o --gptq --synthetic --solver llmcompressor --scales amax",
        "w4a16 s o --gptq --synthetic --solver llmcompressor --set signs=both",
        "w4a16 s o --gptq --synthetic --solver llmcompressor --set order=importance",
        "w4a16 s o --gptq --synthetic --solver llmcompressor --set refit=0",
        "w4a16 s o --gptq --synthetic --solver llmcompressor --set descent=2",
        "w4a16 s o --gptq --synthetic --asymmetric --scales search",
        "w4a16 s o --gptq --synthetic --asymmetric --set signs=both",
        "w4a16 s o --gptq --synthetic --asymmetric --set refit=0",
        "w4a16 s o --gptq --synthetic --actorder static --set order=stored",
        "w4a16 s o --rtn --set signs=both",
        "w4a16 s o --gptq",
        "w4a16 s o --rtn --set propagated_error=correct",
        "w4a16 s o --gptq --synthetic --solver llmcompressor --set propagated_error=correct",
        "w4a16 s o --gptq --synthetic --data x.txt",
        "w4a16 s o --gptq --synthetic --column text",
        "nvfp4 s o --dialect modelopt --gptq",
        "nvfp4 s o --dialect modelopt --samples 3",
        "nvfp4 s o --dialect modelopt --set refit=0",
        "nvfp4 s o --dialect modelopt --set order=stored",
        "nvfp4 s o --dialect modelopt --gptq --synthetic --set signs=positive",
        "amx s o --method int4 --numa 1 --scales search",
        "amx s o --method int4 --numa 1 --set descent=0",
        "amx s o --method int4 --numa 1 --gptq --synthetic --set signs=positive",
        "amx s o --method int4 --numa 1 --gptq --synthetic --solver llmcompressor --set refit=1",
        "kt s --cpu-out c --cpu int4 --numa 1 --set order=stored",
        "nvfp4 s o --dialect modelopt --gptq --synthetic --solver llmcompressor",
        "nvfp4 s o --dialect modelopt --gptq --synthetic --targets Linear",
        "nvfp4 s o --dialect modelopt --gptq --synthetic --shared-experts quantize",
        "w4a16 s o --rtn --samples 3",
        "run dequant-fp8 s o --samples 3",
        "run dequant-fp8 s o --synthetic --data x.txt",
        "plan dequant-fp8 s --synthetic --column text",
        "nvfp4 s o --dialect modelopt --weight-only --stats d",
        "fp8 s o --channel --block 128",
        "fp8 s o --channel --ue8m0",
        "relabel s o",
        "relabel s o --to hqq",
        "relabel s o --to fp8 --nearest",
        "relabel s o --to nvfp4",
        "relabel s o --to fp8 --dialect modelopt",
        "relabel s o --to fp8 --input-scale 1.0",
        "relabel s o --to nvfp4 --dialect modelopt --input-scale 0",
        "fp8 s o --tensor --channel",
        "fp8 s o --tensor --block 128",
        "fp8 s o --tensor --ue8m0",
        "fp8 s o --input-scale 1",
        "nvfp4 s o --dialect modelopt --input-scale 1 --weight-only",
        "nvfp4 s o --dialect modelopt --input-scale 1 --stats x",
        "nvfp4 s o --dialect modelopt --targets Linear --stats d",
        "kt s --cpu-out c --cpu int4 --numa 1 --gpu w4a16",
        "kt s --cpu-out c --cpu int4 --numa 1 --gpu-out g",
        "amx s o --method int4 --numa 1 --dump-after dequant",
        "dequant s o --dump-after drop",
        "upload d me/m --create-pr --revision x",
        "upload d me/m@a --revision b",
        "eval o --against s",
        "eval o --against s --synthetic",
        "eval o --against s --data d.txt --synthetic --first-layers 1",
        "ask o --server http://h:1 --samples 3",
        "validate o --json --format text",
        "validate --level full",
        "validate",
        "dequant s o --engine ray --shard 0/2",
        "dequant s o --address head:6379",
        "split s o --pp 1,1 --engine local --address auto",
        "recipes show nope",
        "advise s --gpu-memory 24",
        "inspect",
        "inspect a b",
    ],
)
def test_options_that_exclude_one_another(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_cli(*line.split())
    assert (result.code, "Error: " in result.err, result.out) == (2, True, ""), result.err


@pytest.mark.parametrize(
    "line",
    [
        "inspect gone", "dequant gone o", "plan gone s", "plan gone.yaml s", "run gone s o",
        "split s o --pp 3,3", "split s o --pp 9 --for vllm", "diff s gone", "validate gone",
        "validate s --against gone", "validate s --report gone/r.html", "upload gone me/m",
        "w4a16 s o --rtn --targets nothing", "fuse s o --for sglang", "join gone o",
        "split s o --pp 1,1 --recipe gone.yaml", "demo s", "dequant s o --memory 1KB",
        "amx s o --method int4 --numa 7", "nvfp4 s o --dialect modelopt --stats gone",
        "w4a16 s o --gptq --data gone.txt",
    ],
)  # fmt: skip
def test_what_depends_on_files_is_one(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bf16_moe().write(tmp_path / "s")
    monkeypatch.chdir(tmp_path)
    result = run_cli(*line.split())
    assert (result.code, result.out) == (1, ""), result.err
    assert "qconvert: error: " in result.err


def test_a_library_meets_the_type() -> None:
    for call in (
        lambda: parse_size("lots"), lambda: parse_repo("hf://"), lambda: parse_partition("two"),
        lambda: check_runtime("transformers"), lambda: suffix_format("report.doc"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as error:
            call()
        assert isinstance(error.value, QConvertError)


@pytest.mark.parametrize("given", ["1KB", "3 KiB", "700 KB", "1MiB"])
def test_a_refused_budget_is_echoed_as_given(given: str, tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "s")
    result = run_cli("run", "copy", source, tmp_path / "o", "--memory", given)
    number = "".join(c for c in given if c.isdigit())
    unit = given.removeprefix(number).strip()
    assert (result.code, f"(given: {number} {unit})" in result.err) == (1, True), result.err


# --- One name, one meaning -----------------------------------------------------------------------


def _options() -> dict[str, list[tuple[str, click.Option]]]:
    """Every option of every command by each of its spellings that is shown."""
    found: dict[str, list[tuple[str, click.Option]]] = {}
    for words, command in commands(cli):
        for param in command.params:
            if isinstance(param, click.Option):
                for spelling in set(param.opts) - set(getattr(param, "old", ())):
                    found.setdefault(spelling, []).append((" ".join(words), param))
    return found


def _meaning(option: click.Option) -> tuple[Any, ...]:
    """The first words of its help, which a default in brackets may follow, and what it takes."""
    text = str(option.help).partition(" [")[0]
    return text, type(option.type), option.is_flag, option.multiple, option.name


# Of what is printed, and of what `quantize` writes; bits of a code, or of a weight with its scales
# (`fit`); of ranks that a result is checked for, and those that `split` makes folders of: what a user
# would type; and of `fit`, which rounds samples' model too where --data is given.
_MEANINGS = {"--format": 2, "--bits": 2, "--tp": 2, "--rtn": 2}


@pytest.mark.parametrize("spelling", sorted(_options()))
def test_an_option_means_one_thing_in_every_command(spelling: str) -> None:
    meanings = {_meaning(option) for _, option in _options()[spelling]}
    assert len(meanings) == _MEANINGS.get(spelling, 1), meanings


def _step(line: str, *more: str) -> Any:
    """The pass that a command line is."""
    (step,) = parse_recipe(_printed(line, *more), "printed").passes
    return step


def _set(name: str, value: str) -> tuple[str, str]:
    return ("--set", f"{name}={value}") if name in SETTINGS else (f"--{name}", value)


@pytest.mark.parametrize("command", [
    "w4a16 s o", "amx s o --method int4 --numa 1", "nvfp4 s o --dialect modelopt",
])  # fmt: skip
@pytest.mark.parametrize(
    ("option", "value", "default"),
    [("scales", "amax", "search"), ("order", "stored", "importance"), ("refit", "0", "2"),
     ("descent", "0", "2"), ("propagated_error", "ignore", "correct"),
     ("experts", "all", "routed"), ("min_tokens", "7", "128"), ("undersampled", "rtn", "all"),
     ("dampening_frac", "0.5", "0.01")],
)  # fmt: skip
def test_a_step_of_the_solver_is_an_option(
    command: str, option: str, value: str, default: str
) -> None:
    """What is given goes into the recipe's `calibrate`, 0 too; the default is what is there without."""
    plain = _step(f"{command} --gptq --synthetic")
    given, same = (
        _step(f"{command} --gptq --synthetic", *_set(option, text)) for text in (value, default)
    )
    assert same == plain
    words = {f.name: getattr(given.calibrate, f.name) for f in fields(given.calibrate)}
    before = {f.name: getattr(plain.calibrate, f.name) for f in fields(plain.calibrate)}
    changed = {name: str(words[name]) for name in words if words[name] != before[name]}
    assert changed == {option: value}


def test_scales_of_rounding_are_not_those_of_a_calibration() -> None:
    for command in ("w4a16 s o --rtn", "nvfp4 s o --dialect modelopt"):
        step = _step(command, "--scales", "search")
        assert (step.scales, step.calibrate) == ("search", None)
    for command in ("w4a16 s o", "nvfp4 s o --dialect modelopt"):
        line = f"{command} --gptq --synthetic"
        step = _step(line, "--scales", "search")
        assert (step.scales, step.calibrate.scales) == ("amax", "search")


def _printed(line: str, *more: str) -> str:
    result = run_cli(*line.split(), *more, "--print-recipe")
    assert result.code == 0, result.err
    return result.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("w4a16: {calibrate: {synthetic: true, few: rtn}}", "calibrate.few"),
        ("w4a16: {calibrate: {synthetic: true, undersampled: some}}", "'calibrate.undersampled'"),
        ("w4a16: {calibrate: {synthetic: true, solver: gptq}}", "'calibrate.solver'"),
        ("w4a16: {calibrate: {synthetic: true, scales: mse}}", "'calibrate.scales'"),
        ("w4a16: {calibrate: {synthetic: true, order: natural}}", "'calibrate.order'"),
        (
            "w4a16: {calibrate: {synthetic: true, propagated_error: half}}",
            "'calibrate.propagated_error'",
        ),
        (
            "w4a16: {calibrate: {synthetic: true, solver: llmcompressor, propagated_error: ignore}}",
            "propagated_error: solver llmcompressor has no such option, found 'ignore'",
        ),
        ("w4a16: {calibrate: {synthetic: true, signs: some}}", "'calibrate.signs'"),
        ("w4a16: {scales: search, signs: negative}", "'signs'"),
        ("w4a16: {signs: positive}", "scales of amax are never below 0: leave it out"),
        ("w4a16: {calibrate: {synthetic: true, refit: -1}}", "refit: expected 0 to 1000, found -1"),
        (
            "w4a16: {calibrate: {synthetic: true, descent: 1001}}",
            "descent: expected 0 to 1000, found 1001",
        ),
        ("w4a16: {calibrate: {synthetic: true, descent: -1}}", "descent: expected 0 to 1000"),
        (
            "w4a16: {calibrate: {synthetic: true, solver: llmcompressor, descent: 4}}",
            "descent: solver llmcompressor has no such option, found 4",
        ),
        (
            "nvfp4: {calibrate: {synthetic: true, solver: llmcompressor}}",
            "only integers are solved so here",
        ),
        ("nvfp4: {scales: search, calibrate: {synthetic: true}}", "a calibration's stand in"),
        ("nvfp4: {targets: [Linear], calibrate: {synthetic: true}}", "solves routed experts alone"),
        ("fp8: {targets: [lm_head]}", "'lm_head'; modules by name need `dialect: "),
        ("nvfp4: {targets: [lm_head]}", "'lm_head'; modules by name need `dialect: "),
        ("nvfp4: {targets: [1]}", "'targets"),
        ("nvfp4: {targets: []}", "targets: expected 'experts', 'Linear' or modules, found none"),
        ("amx: {method: int4, numa: 1, rounding: nearest}", "'rounding'"),
        ("w4a16: {targets: experts}", "'targets"),
    ],
)
def test_words_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=r"^r:1: ") as error:
        parse_recipe(f"passes: [{{{text}}}]", "r")
    assert said in str(error.value)
