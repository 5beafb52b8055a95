"""Every argument that is wrong by its own text ends with exit code 2, before a file is opened; what
depends on files and folders ends with 1. An option that nobody listed here fails the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import bf16_moe, run_cli

from qconvert.checkpoint.hub_cache import parse_repo
from qconvert.cli.main import cli
from qconvert.core.errors import QConvertError, UsageError
from qconvert.core.sizes import parse_size
from qconvert.runtimes.pipeline import check_runtime, parse_partition
from qconvert.validation.reports import suffix_format

_SIZES = ["", "lots", "0", "-1", "5PB", "1,5GB", "1e9", "9" * 5000]
_COUNTS = ["", "0", "-1", "1.5", "many", "9" * 5000]
_CHOICES = ["", "nope", "INT 4"]
_PATHS = ["", "a\0b"]
_SOURCES = ["", "hf://", "hf://model", "hf://datasets/a/b", "hf://a/b/file.txt", "hf://a/b@"]
# Values that an option refuses by their text, for each that takes a value.
_BAD: dict[str, list[str]] = {
    "memory": _SIZES, "max_shard_size": _SIZES, "jobs": _COUNTS, "groups": _COUNTS,
    "source_groups": _COUNTS, "numa": _COUNTS, "tp": _COUNTS, "logits": _COUNTS, "samples": _COUNTS,
    "length": ["1", *_COUNTS], "min_tokens": _COUNTS, "seed": ["", "-1", "x", str(2**32)],
    "dampening": ["", "0", "1", "-0.1", "nan", "x"],
    "base_model": ["", "model", "a/b/c", "a b/c", "/etc"],
    "dump_after": ["nope"], "explain": ["nope", "QC999"],
    "consumer": ["", "tgi", "sglang=0.5", "sglang==", "transformers;rm"],
    "pp": ["", "two", "0", "-1", "1,", "1,0", "1.5", "1,-1", "9" * 5000],
    "method": _CHOICES, "rounding": _CHOICES, "mtp": _CHOICES, "gpu": _CHOICES, "bits": _CHOICES,
    "group": _CHOICES, "packing": _CHOICES, "actorder": _CHOICES, "what": _CHOICES,
    "dialect": _CHOICES, "targets_nvfp4": _CHOICES, "level": _CHOICES, "form": _CHOICES,
    "experts": _CHOICES, "few": _CHOICES,
    "targets": ["", "re:", "re:(", "re:["], "ignore": ["", "re:", "re:*"],
    "data": ["", "chats", "chats.csv", "hf-dataset:", "hf-dataset:a:b:c:d"],
    "devices": ["", "gpu", "cuda:x", "cuda:-1", "mps"],
    "save_stats": _PATHS, "stats": _PATHS, "cpu_out": _PATHS, "gpu_out": _PATHS,
    "against": _SOURCES, "pair": _SOURCES,
    "layers": ["", "a", "3-1", "1-", "-1", "99999999", "1,,2", "\u0663"],
    "files": ["report", "report.doc"],
    "revision": ["", "a b", "a..b", "/a", "a~1"],
    # Arguments
    "source": _SOURCES, "a": _SOURCES, "b": _SOURCES, "out": _PATHS, "folder": _PATHS,
    "stages": _PATHS, "repo": ["", "model", "a/b/c", "hf://", "hf://datasets/a/b", "a b/c"],
    "name": ["", "nope"],
}  # fmt: skip
# Any text says something: a pattern, a message, a column, a file that may or may not be there.
_FREE = {"tensors", "commit_message", "column", "recipe"}
# What a command line must have beside the value that is tried.
_REST: dict[tuple[str, ...], tuple[str, ...]] = {
    ("amx",): ("--method", "int4", "--numa", "1"),
    ("kt",): ("--cpu", "int4", "--numa", "1", "--cpu-out", "cpu"),
    ("w4a16",): ("--rtn",), ("gptq4",): ("--rtn",),
    ("nvfp4",): ("--dialect", "modelopt"),
    ("split",): ("--pp", "1,1"),
    ("fuse",): ("--for", "sglang"),
}  # fmt: skip
# The options of --gptq say nothing without it, which is another refusal.
_OF_GPTQ = {"data", "samples", "length", "seed", "dampening", "experts", "min_tokens", "few",
            "save_stats", "devices", "actorder"}  # fmt: skip


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
        if words == ("nvfp4",) and key == "targets":
            key = "targets_nvfp4"
        values = _BAD[key]
        if words == ("validate",) and key == "out":
            values = _SOURCES
        for value in values:
            given = [value if p is param else p.name for p in arguments if p.required or p is param]
            rest = _REST.get(words, ())
            if isinstance(param, click.Option):
                if words in (("w4a16",), ("gptq4",)) and key in _OF_GPTQ - {"data"}:
                    rest = ("--gptq", "--synthetic")
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
        "w4a16 s o --gptq",
        "w4a16 s o --gptq --synthetic --data x.txt",
        "w4a16 s o --gptq --synthetic --column text",
        "w4a16 s o --rtn --samples 3",
        "run dequant-fp8 s o --samples 3",
        "run dequant-fp8 s o --synthetic --data x.txt",
        "plan dequant-fp8 s --synthetic --column text",
        "nvfp4 s o --dialect modelopt --weight-only --stats d",
        "nvfp4 s o --dialect modelopt --targets all --stats d",
        "kt s --cpu-out c --cpu int4 --numa 1 --gpu w4a16",
        "kt s --cpu-out c --cpu int4 --numa 1 --gpu-out g",
        "amx s o --method int4 --numa 1 --dump-after dequant",
        "dequant s o --dump-after drop",
        "upload d me/m --create-pr --revision x",
        "upload d me/m@a --revision b",
        "validate o --logits 1",
        "validate o --attribute",
        "validate o --json --format text",
        "validate --level full",
        "validate",
        "recipes show nope",
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
        "w4a16 s o --rtn --target nothing", "fuse s o --for sglang", "join gone o",
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
