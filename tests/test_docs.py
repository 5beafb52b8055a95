"""Documents rot; these cannot: every command and option that README and the pages of docs/ show exists,
and the run that they show is what the demo prints."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import chdir
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from advice_table import MODELS, head, row, table
from checkpoints import run_cli

from qconvert.cli.main import cli
from qconvert.recipe.recipe import parse_recipe
from qconvert.validation.runner import rules

_ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(_ROOT / "docs"))
import terminal  # noqa: E402

_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_TEXT = "\n".join(page.read_text(encoding="utf-8") for page in _PAGES)
_MODELS_PAGE = _ROOT / "docs" / "models.md"
_UPDATE = bool(os.environ.get("QCONVERT_UPDATE_TABLE"))
# What a machine measures, or chooses, is its own.
_MEASURED = re.compile(r"[0-9][0-9.,]*( [KMG]?B| units?)?")


def commands() -> list[str]:
    """Lines of the pages' shell blocks that run qconvert, without their comments; each once."""
    blocks = re.findall(r"```sh\n(.*?)```", _TEXT, re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    tasks = (_ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    lines += re.findall(r"`(qconvert [^`]+)` \|$", tasks, re.MULTILINE)
    return list(dict.fromkeys(line for line in lines if line.startswith("qconvert ")))


@pytest.mark.parametrize("line", commands())
def test_every_command_shown_parses(line: str) -> None:
    """Parsed by click, not run: unknown commands, options and missing arguments fail."""
    words = shlex.split(line)[1:]
    command: click.Command = cli
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    # With the settings commands inherit: click keeps the help option it makes here for later tests.
    command.make_context(line, words, parent=click.Context(cli, **cli.context_settings))


def test_the_pages_have_commands() -> None:
    assert len(commands()) > 40


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert [page.name for page in _PAGES[1:] if f"](docs/{page.name})" not in text] == []


def test_the_table_of_advice() -> None:
    """Its head, its models, and rows that take next to nothing to make."""
    found = _table()
    assert found[:2] == head()
    assert [row.split(" | ")[0].removeprefix("| ") for row in found[2:]] == [*MODELS.values()]
    assert found[-1] == row("gpt-oss-120b")


@pytest.mark.big
@pytest.mark.parametrize("model", ["qwen3.5-35b-a3b-fp8", "glm-4.5-air"])
def test_rows_of_the_table(model: str) -> None:
    assert row(model) in _table()


@pytest.mark.rest
@pytest.mark.skipif(os.environ.get("QCONVERT_ALL") != "1" and not _UPDATE, reason="4 CPU minutes")
def test_all_of_the_table() -> None:
    """`QCONVERT_UPDATE_TABLE=1 pytest -m rest tests/test_docs.py` writes it."""
    text = _MODELS_PAGE.read_text(encoding="utf-8")
    made = "\n".join(table())
    if _UPDATE:
        text = text.replace("\n".join(_table()), made)
        _MODELS_PAGE.write_text(text, encoding="utf-8")
    assert made in text


def _table() -> list[str]:
    """The lines of the table of advice."""
    lines = _MODELS_PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(head()[0])
    return lines[first : first + 2 + len(MODELS)]


def test_the_picture_is_small() -> None:
    """`make picture` makes it."""
    data = (_ROOT / "docs" / "validation.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < 150_000
    assert "](docs/validation.png)" in (_ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    with chdir(tmp_path_factory.mktemp("demo")):
        return run_cli("demo", "here").out


def test_the_demo_fits_a_screen_and_ends_with_what_is_next(demo: str) -> None:
    lines = demo.splitlines()
    assert len(lines) <= 40
    assert lines[-2].startswith("next ")
    assert next(line for line in lines if line == "Killed" or "from before" in line) == "Killed"


def test_the_run_shown_is_the_demos(demo: str) -> None:
    page = (_ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    assert _MEASURED.sub("", shown).strip() == _MEASURED.sub("", demo).strip()


def test_the_picture_of_a_terminal_shows_the_demo(demo: str) -> None:
    """`make picture` makes it."""
    texts = ElementTree.fromstring(terminal.FILE.read_text(encoding="utf-8")).itertext()
    here = ElementTree.fromstring(terminal.svg(terminal.shown(demo))).itertext()
    words = [" ".join(_MEASURED.sub("", " ".join(one)).split()) for one in (texts, here)]
    assert words[0] == words[1]
    assert "](docs/terminal.svg)" in (_ROOT / "README.md").read_text(encoding="utf-8")


def test_the_recipe_shown_is_one() -> None:
    page = (_ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert [step.name for step in parse_recipe(text, "docs").passes] == ["dequant", "fuse"]


def test_rules_are_checked_where_the_page_says() -> None:
    page = (_ROOT / "validators" / "RULES.md").read_text(encoding="utf-8")
    sections = re.findall(
        r"^## (QC\d{3}): .*?^Checked in: `(\S+)`$", page, re.MULTILINE | re.DOTALL
    )
    assert (
        [rule for rule, _ in sections] == sorted(rules()) == re.findall(r"^## (\S+):", page, re.M)
    )
    for rule, file in sections:
        assert rule in (_ROOT / "qconvert" / file).read_text(encoding="utf-8"), rule


def test_every_rule_raised_has_its_cause_and_fix() -> None:
    known = rules()
    for rule in known.values():
        for text in (rule.cause, rule.fix):
            assert text.rstrip().endswith((".", "`", ")")), (rule.id, text)
        assert not rule.title.endswith("."), rule.id
    package = _ROOT / "qconvert"
    files = [*(package / "validators").rglob("*.py"), *(package / "contrib").rglob("*.py")]
    files.append(package / "validation" / "runner.py")
    raised = {id for f in files for id in re.findall(r'"(QC\d{3})"', f.read_text("utf-8"))}
    assert raised == set(known)


def test_a_rule_is_explained() -> None:
    result = run_cli("validate", "--explain", "qc015")
    rule = rules()["QC015"]
    assert result == (0, f"QC015: {rule.title}\ncause: {rule.cause}\nfix:   {rule.fix}\n", "")
    assert run_cli("validate", "--explain", "QC999").code == 2
