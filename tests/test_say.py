"""Foreign text on a terminal and in a CI log: every line is one line, is seen, and is no command."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import bf16_moe, convert, edit_json, fp8_moe, run_cli, tensor
from hostile_inputs import EVIL, raw_lines

import qconvert
from qconvert.cli.progress import Bar
from qconvert.core.say import say, say_error, say_json, say_report, shown_line, sign_of_life
from qconvert.core.shown import MOST_SHOWN

# The header refuses control characters in names, and lets these through.
ODD = "model.layers.0.x\u202e##vso[task.x]\u2028::error::y"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every text of it that reaches a message."""
    model = fp8_moe(model_type=EVIL)
    model.tensors[ODD] = tensor("U8", 3)
    model.config["quantization_config"]["fmt"] = EVIL
    folder = model.write(tmp_path_factory.mktemp("say") / "source")
    (folder / EVIL.replace("/", "_")).write_bytes(b"x")
    (folder / f"{EVIL}.bin").write_bytes(b"x")
    return folder


def said(*words: str | Path) -> str:
    result = run_cli(*words)
    text = result.out + result.err
    assert raw_lines(text) == []
    assert text
    return text


def test_every_command_shows_it_as_text(source: Path, tmp_path: Path) -> None:
    other = bf16_moe().write(tmp_path / "other")
    out = tmp_path / "out"
    for words in (
        ("inspect", source),
        ("inspect", source, "--tensors", "*"),
        ("plan", "copy", source),
        ("plan", "copy", source, "--dump-after", "end"),
        ("diff", source, other),
        ("validate", source),
        ("validate", source, "--format", "markdown"),
        ("dequant", source, out),
        ("inspect", f"{source}{EVIL}"),
        ("run", EVIL, source, tmp_path / "x"),
        ("dequant", source, tmp_path / "x", f"--{EVIL}"),
        ("validate", source, "--layers", EVIL),
        ("recipes", "show", EVIL),
        ("validate", "--explain", EVIL),
    ):
        assert "pwned" in said(*words) or "vso" in said(*words), words
    said("unfuse", source, tmp_path / "x")


def test_json_has_every_name_as_it_is(source: Path) -> None:
    result = run_cli("inspect", source, "--tensors", "*", "--json")
    assert ODD in json.loads(result.out)
    assert raw_lines(result.out) == []
    found = json.loads(run_cli("inspect", source, "--json").out)
    assert found["model_type"] == EVIL


def test_a_method_that_is_a_command(tmp_path: Path) -> None:
    folder = fp8_moe().write(tmp_path / "x")
    edit_json(
        folder / "config.json",
        lambda config: config["quantization_config"].update(quant_method=EVIL),
    )
    assert "pwned" in said("dequant", folder, tmp_path / "out")
    assert "pwned" in said("inspect", folder)


def test_a_message_has_an_end(tmp_path: Path) -> None:
    """What is left out is counted."""
    folder = fp8_moe().write(tmp_path / "x")
    edit_json(
        folder / "config.json",
        lambda config: config["quantization_config"].update(quant_method="m" * 100_000),
    )
    result = run_cli("dequant", folder, tmp_path / "out")
    assert result.code == 1
    assert len(result.err) < MOST_SHOWN + 100
    assert "characters left out" in result.err
    assert result.err.count("\n") == 1
    usage = run_cli("validate", folder, "--layers", "9" * 100_000)
    assert usage.code == 2
    assert len(usage.err) < MOST_SHOWN + 200


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text: a::b ü 模型", "plain text: a::b ü 模型"),
        ("::error::x", r"\x3a:error::x"),
        ("   ::error::x", r"   \x3a:error::x"),
        ("\u3000::error::x", r"\u3000::error::x"),
        ("\t::error::x", r"\t::error::x"),
        ("a ##[error]b", r"a \x23#[error]b"),
        ("##vso[task]##[b]", r"\x23#vso[task]\x23#[b]"),
        ("## a heading", "## a heading"),
        ("a\nb\r\x1b[1m\x9b\u2066\ud800", r"a\nb\r\x1b[1m\x9b\u2066\ud800"),
    ],
)
def test_a_line(text: str, shown: str) -> None:
    assert shown_line(text) == shown


def test_lines_go_where_they_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\nb", "::c")
    say("", err=True)
    say_error("x" * 5000)
    say_json({"##[a]": "\u202e"})
    say_report("a\n::b", "text")
    say_report("::error file=a::b", "github")
    out, err = capsys.readouterr()
    head, _, rest = out.partition("{")
    assert head == "a\\nb\n\\x3a:c\n"
    assert rest.endswith("}\na\n\\x3a:b\n::error file=a::b\n")
    assert "##[" not in rest
    assert json.loads("{" + rest.partition("}")[0] + "}") == {"##[a]": "\u202e"}
    assert err.startswith("\nqconvert: error: xxx")
    assert len(err) < MOST_SHOWN + 10


def test_a_log_without_letters_for_it(tmp_path: Path) -> None:
    """PYTHONIOENCODING=ascii ended in UnicodeEncodeError."""
    folder = bf16_moe(model_type="模型").write(tmp_path / "x")
    done = subprocess.run(
        [sys.executable, "-m", "qconvert", "inspect", str(folder)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\\u6a21" in done.stdout


def test_a_bar_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    with Bar() as bar:
        monkeypatch.setattr(bar._bar, "set_description", shown.append)
        bar.phase(EVIL)
    assert raw_lines(shown[0]) == []


def test_a_recipe_can_be_piped(source: Path, tmp_path: Path) -> None:
    made = run_cli("dequant", source, tmp_path / "x", "--print-recipe")
    (tmp_path / "r.yaml").write_text(made.out)
    plain = bf16_moe().write(tmp_path / "plain")
    shown = run_cli("recipes", "show", "copy")
    (tmp_path / "copy.yaml").write_text(shown.out)
    convert("copy", plain, tmp_path / "one")
    assert run_cli("run", tmp_path / "copy.yaml", plain, tmp_path / "two").code == 0
    assert made.code == 0


def test_nobody_else_prints() -> None:
    root = Path(qconvert.__file__).parent
    files = [*root.rglob("*.py")]
    for file in files:
        if file == root / "say.py" or file.parent == root / "runtimes/loader/server":
            continue  # the second prints in a runtime's process
        text = file.read_text(encoding="utf-8")
        if not re.search(r"print|echo|\.show|sys\.std", text):
            continue  # parsing takes most of the time
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            # rich's console writes into a text, which say_report shows.
            assert called not in {"print", "click.echo", "click.secho", "error.show"}, file
            assert not called.startswith(("sys.stdout.write", "sys.stderr.write")), file


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets them whole."""
    line = f"lossy   {'half a step at most, '.join(map(str, range(6)))} {'x' * 60}"
    for stream in (_Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("COLUMNS", "50")
        say(line)
        lines = stream.getvalue().splitlines()
        assert " ".join(one.strip() for one in lines) == line
        if stream.isatty():
            assert all(len(one) <= 50 or one.endswith("x" * 60) for one in lines)
            assert {one[:8] for one in lines[1:]} == {" " * 8}
        else:
            assert lines == [line]


@pytest.mark.parametrize("said", [False, True])
def test_a_sign_of_life(said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, unless something else was said by then; on a terminal alone."""
    for stream in (_Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with sign_of_life("reading", 0.01):
            if said:
                say("a result", err=True)
            time.sleep(0.03)
        shown = "a result\n" if said else "reading\n" if stream.isatty() else ""
        assert stream.getvalue() == shown
