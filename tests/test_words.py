"""Counts are spelled by one function, so that nothing is `1 files`; options that texts name exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from checkpoints import bf16_moe, run_cli

from qconvert.cli.main import cli
from qconvert.core.shown import count

_THINGS = (
    "files", "tensors", "shards", "errors", "warnings", "differences", "requests", "stages", "units",
    "steps", "jobs", "times", "matrices", "samples", "findings", "links",
)  # fmt: skip
# A number that is spelled out, and a plural behind it that it does not change.
_COUNTED = re.compile(r"\{(?!count\()[^{}]*\} (?:" + "|".join(_THINGS) + r")\b")
# Numbers that are never one, and texts that other programs read.
_NEVER_ONE = (
    "{self.shards} shards", "{TRIES} times", "{halves} matrices", "{text} stages", "{parts} matrices",
    "{self.common} tensors", "{len(found)} matrices", "{found['samples']} samples",
    "{MOST_OBJECTS} files", "{_MOST_LOSSES} times",
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (0, ("file",), "0 files"), (1, ("file",), "1 file"), (2, ("file",), "2 files"),
        (1536, ("tensor",), "1,536 tensors"), (1, ("matrix", "matrices"), "1 matrix"),
        (3, ("matrix", "matrices"), "3 matrices"),
    ],
)  # fmt: skip
def test_count(number: int, words: tuple[str, ...], text: str) -> None:
    assert count(number, *words) == text


def test_no_module_spells_a_count_of_its_own() -> None:
    found = []
    for path in sorted((Path(__file__).parent.parent / "qconvert").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for hit in _COUNTED.findall(line):
                if hit not in _NEVER_ONE:
                    found.append(f"{path.name}:{number}: {hit}")
    assert found == []


def test_one_of_each(tmp_path: Path) -> None:
    """One layer, one shard; then one difference, one warning."""
    model = bf16_moe(num_hidden_layers=1)
    model.tensors = {n: t for n, t in model.tensors.items() if ".layers.1." not in n}
    source = model.write(tmp_path / "one", 1)
    told = run_cli("inspect", source).out
    assert told.startswith("qwen3_moe: 1 layer, 2 experts")
    assert f"{source}: 1 file, {len(model.tensors)} tensors" in told
    plan = run_cli("plan", "copy", source)
    assert "1 file, " in plan.out
    assert not re.search(r"\b1 (?:files|tensors|layers|units|jobs|steps|shards)\b", plan.out)
    del model.tensors["lm_head.weight"]
    other = model.write(tmp_path / "other", 1)
    assert run_cli("diff", source, other).out.splitlines()[-1].startswith("1 difference; ")
    report = run_cli("validate", other).out.splitlines()[-1]
    assert re.fullmatch(r"(1 error|\d+ errors), (1 warning|\d+ warnings)", report), report


# --- Options -------------------------------------------------------------------------------------

# Of other programs: servers' launch lines, pip, ray.
_OTHERS = {
    "--nnodes", "--node-rank", "--dist-init-addr", "--ep-size",  # sglang's
    "--master-addr", "--headless",  # vLLM's, beside two of these
    "--enable-expert-parallel", "--load-format", "--log_samples", "--model-loader-extra-config",
    "--help-all",  # of commands that have more options than a screen
    "--disable-shared-experts-fusion", "--disaggregation-mode", "--head", "--init-expert-location",
    "--kt-cpuinfer", "--kt-expert-placement-strategy", "--kt-max-deferred-experts-per-token",
    "--kt-method", "--max-logprobs",
    "--model-checksum", "--kt-num-gpu-experts", "--kt-threadpool-count", "--kt-weight-path",
    "--kv-cache-dtype", "--model", "--model-path", "--moe-runner-backend", "--no-deps",
    "--pipeline-parallel-size", "--pp-size", "--speculative-algorithm", "--speculative-config",
    "--speculative-draft-model-path", "--tensor-parallel-size", "--tp-size", "--at", "--capability",
}  # fmt: skip
_OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")


def _options(command: click.Command) -> set[str]:
    """What a command, or any of a group, takes today: not the spellings of before."""
    found = {"--help"}
    for one in command.params:
        if isinstance(one, click.Option):
            found |= {*one.opts, *one.secondary_opts} - {*getattr(one, "old", ())}
    if isinstance(command, click.Group):
        found |= {name for part in command.commands.values() for name in _options(part)}
    return found


def _literals() -> Iterator[tuple[str, str]]:
    """The product's texts, docstrings too, and where they stand; not earlier spellings of options."""
    package = Path(__file__).parent.parent / "qconvert"
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        old = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.keyword) and node.arg == "old"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in old
            ):
                yield f"{path.relative_to(package)}:{node.lineno}", node.value


def test_options_that_texts_name_exist() -> None:
    """`--target` was renamed, and refusals went on to ask for it."""
    known = _options(cli) | _OTHERS
    assert "--target" not in known
    found = [
        f"{where}: {option}"
        for where, text in _literals()
        for option in _OPTION.findall(text)
        if option not in known
    ]
    assert found == []
