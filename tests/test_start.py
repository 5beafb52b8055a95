"""What a command imports before it works: only what it needs."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
import yaml
from checkpoints import run_cli

import qconvert.cli
from qconvert import api
from qconvert.cli.command import SCREEN
from qconvert.cli.demo import write_sample
from qconvert.cli.main import _MEANT, GROUPS, Commands, cli
from qconvert.hub.card import plain_yaml
from qconvert.validation.runner import NEEDED_BY, validators

_SAID = """
import sys
from qconvert.cli.main import Commands, cli
from qconvert.cli.carry_out import Started
cli.main(sys.argv[1:], standalone_mode=False, obj=Started(()))
print("MODULES", *sys.modules)
"""
# A conversion that calibrates nothing, of a folder, to a folder, asks none of these.
_UNUSED = {
    "yaml", "tqdm", "importlib.metadata", "email", "huggingface_hub", "numba", "torch",
    "qconvert.advise", "qconvert.calibrate", "qconvert.client", "qconvert.evaluate", "qconvert.repair",
    "qconvert.passes.nvfp4", "qconvert.passes.w4a16", "qconvert.recipe.llmcompressor",
    "qconvert.run.work.backend", "qconvert.run.engines.ray", "qconvert.run.engines.stream",
    "qconvert.validation.reports", "qconvert.validators.amx", "qconvert.validators.kernels",
    "qconvert.validators.weights",
}  # fmt: skip


def imported_by(*words: str | Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _SAID, *map(str, words)], capture_output=True, text=True, check=True
    )
    line = done.stdout.splitlines()[-1]
    return set(line.split()[1:])


def test_a_dry_run_imports_what_it_needs(tmp_path: Path) -> None:
    write_sample(tmp_path / "fp8")
    found = imported_by("dequant", tmp_path / "fp8", tmp_path / "out", "--dry-run", "--jobs", "1")
    assert {name for name in found if name in _UNUSED} == set()
    assert sum(name.startswith("qconvert") for name in found) < 268  # 390 once


def test_a_command_imports_no_other() -> None:
    found = imported_by("recipes", "list")
    assert "qconvert.cli.misc" in found
    assert not found & {"qconvert.cli.convert", "qconvert.cli.check", "qconvert.api"}


def test_every_command_is_there() -> None:
    """By the name that click gives it."""
    written = {
        id(value): value.name
        for info in pkgutil.iter_modules(qconvert.cli.__path__)
        if info.name != "main"
        for value in vars(import_module(f"qconvert.cli.{info.name}")).values()
        if isinstance(value, click.Command)
    }
    known = {id(command): name for name, command in cli.commands.items()}
    below = {
        id(command)
        for group in cli.commands.values()
        if isinstance(group, click.Group)
        for command in group.commands.values()
    }
    assert {key: name for key, name in written.items() if key not in below} == known


def test_commands_are_a_mapping() -> None:
    commands = Commands()
    commands["other"] = click.Command("other")
    assert "other" in commands
    assert commands["other"].name == "other"
    del commands["other"]
    assert "other" not in commands
    assert commands.get("other") is None
    assert len(commands) == len(list(commands))


def test_the_api_names_what_it_imports_later() -> None:
    assert {name for name in api.__all__ if not hasattr(api, name)} == set()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = api.nothing  # type: ignore[attr-defined]


def test_packages_need_what_they_say() -> None:
    """A planned folder's rules leave out packages by it."""
    for validator in validators():
        package = type(validator).__module__.rpartition(".")[0]
        asked = NEEDED_BY.get(package)
        assert asked is None or validator.needs & asked, validator.name


@pytest.mark.parametrize(
    "front",
    [
        {"license": "mit", "tags": ["moe", "fp8"], "base_model": "Org/Name-1.5_x"},
        {"library_name": "transformers"},
    ],
)
def test_words_are_written_as_yaml_writes_them(front: dict[str, object]) -> None:
    assert plain_yaml(front) == yaml.safe_dump(
        front, sort_keys=False, allow_unicode=True, width=1000
    )


@pytest.mark.parametrize(
    "value",
    ["no", "On", "null", "1.5", "a: b", "a b", "", "-", "x" * 200, [], ["true"], 3, True, None, {}],
)
def test_what_is_no_word_is_left_to_yaml(value: object) -> None:
    assert plain_yaml({"key": value}) is None
    assert plain_yaml({"key": ["word", value]}) is None


def test_help_is_one_screen_and_help_all_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, command in _leaves(cli):
        options = [one for one in command.params if isinstance(one, click.Option)]
        short, every = (run_cli(*words, flag).out for flag in ("--help", "--help-all"))
        assert len(short.splitlines()) <= SCREEN == 45, words
        listed = re.sub(
            r"Running: |\n", " ", " ".join(re.findall(r"^  -.*|^Running: [^.]*", short, re.M))
        )
        shown = [one for one in options if re.search(rf" {one.opts[0]}(?![\w-])", listed)]
        if len(shown) < len(options):
            assert re.search(rf"{len(options) - len(shown)} rarer\s+options: --help-all", short), (
                words
            )
        assert all(f"  {one.opts[0]}" in every or f", {one.opts[0]}" in every for one in options)


def test_the_command_line_on_one_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups, each summary whole."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = run_cli("--help").out.splitlines()
    assert len(lines) <= 60
    assert [line[:-1] for line in lines if line and line[0] != " " and line[-1] == ":"] == list(
        GROUPS
    )
    summaries = {name: one.get_short_help_str(200) for name, one in cli.commands.items()}
    assert next(iter(summaries)) == "advise"
    for name, text in summaries.items():
        assert len(text) <= 45, name
        assert f"  {name:9}  {text}" in lines
    for words, command in _leaves(cli):
        assert len(command.get_short_help_str(200)) <= 50, words
        assert "..." not in run_cli(*words[:-1], "--help").out.partition("\nCommands:")[2], words


def test_a_wrong_word_leads_to_a_command() -> None:
    assert {name for one in _MEANT.values() if (name := one.partition(" ")[0]) not in cli.commands} <= {
        "--help", "--version", "merge",
    }  # fmt: skip
    for word, meant in (("gptq", "w4a16 --gptq"), ("validat", "validate"), ("quantise", "quantize"),
                        ("help", "--help"), ("convert", "run")):  # fmt: skip
        result = run_cli(word, "SRC", "OUT")
        assert (result.code, f"did you mean `qconvert {meant}`?" in result.err) == (2, True), word
    assert "`qconvert --help` lists them" in run_cli("xyzzy").err


@pytest.mark.big
def test_nothing_follows_a_plan_that_imported_triton(tmp_path: Path) -> None:
    """nanobind lists its objects that are never freed; what a plan froze was among them."""
    pytest.importorskip("triton")
    write_sample(tmp_path / "fp8")
    words = ["w4a16", "fp8", "out", "--gptq", "--targets", "Linear", "--synthetic", "--dry-run"]
    command = [sys.executable, "-P", "-m", "qconvert", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "gptq " in done.stdout, done.stderr
    assert "nanobind" not in done.stderr


def test_help_texts_begin_with_a_sentence() -> None:
    """--help shows it alone; a point within it would cut it."""
    for _, command in _leaves(cli):
        for one in command.params:
            if isinstance(one, click.Option):
                assert "e.g." not in str(one.help), one.opts


def _leaves(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _leaves(command, *path, name)
        else:
            yield (*path, name), command
