"""The command line as a person meets it: how much is told, what to do next, what a shell completes, what
fits in 60 columns, and colours."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import bf16_moe, fp8_moe, published, run_cli
from click.shell_completion import ShellComplete, get_completion_class
from sample_reports import RULES, large, measure

from qconvert.cli.demo import write_sample
from qconvert.cli.main import cli
from qconvert.cli.plan_report import Rates, plan_lines
from qconvert.recipe.recipe import builtin_recipes
from qconvert.validation.findings import Verdict
from qconvert.validation.reports import as_text
from qconvert.validation.runner import Report

NARROW = 60


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_moe().write(tmp_path_factory.mktemp("terminal") / "source")


# --- -q and -v -----------------------------------------------------------------------------------


def test_a_run_tells_plan_and_next_step_on_stderr(source: Path, tmp_path: Path) -> None:
    done = run_cli("dequant", source, tmp_path / "out", "--jobs", "1")
    assert done.code == 0
    assert "pass    dequant: matched" in done.err
    last = done.err.splitlines()[-1]
    assert last == f"next    qconvert validate {tmp_path / 'out'} --against {source} --level full"
    assert done.out.startswith(f"wrote {tmp_path / 'out'}: ")
    words = last.split()[2:]
    assert run_cli(*words).code == 0


def test_quiet_leaves_the_result_alone(source: Path, tmp_path: Path) -> None:
    for flag in ("-q", "--quiet"):
        done = run_cli("dequant", source, tmp_path / flag, "--jobs", "1", flag)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith("wrote ")


def test_quiet_leaves_warnings(source: Path, tmp_path: Path) -> None:
    """And errors."""
    model = fp8_moe()
    del model.tensors["lm_head.weight"]
    folder = model.write(tmp_path / "source")
    usual = run_cli("run", "copy", folder, tmp_path / "a", "--jobs", "1")
    warned = [line for line in usual.err.splitlines() if line.startswith("warning ")]
    done = run_cli("run", "copy", folder, tmp_path / "b", "--jobs", "1", "-q")
    assert warned
    assert done.err.splitlines() == warned
    assert published(tmp_path / "b")
    again = run_cli("dequant", source, folder, "-q")
    assert again.code == 1
    assert again.err.startswith("qconvert: error: ")


def test_verbose_names_each_phase(source: Path, tmp_path: Path) -> None:
    done = run_cli("dequant", source, tmp_path / "out", "--jobs", "1", "-v")
    assert re.search(r"^phase   publishing, after \d+\.\d s$", done.err, re.MULTILINE), done.err
    assert "phase " not in run_cli("dequant", source, tmp_path / "other", "--jobs", "1").err


def test_verbose_names_what_is_dropped(tmp_path: Path) -> None:
    """All draft layers' tensors, of which a plan names three."""
    write_sample(tmp_path / "sample")
    usual = run_cli("plan", "dequant-fp8-no-mtp", tmp_path / "sample").out.splitlines()
    every = run_cli("plan", "dequant-fp8-no-mtp", tmp_path / "sample", "-v").out.splitlines()
    (short,) = (line for line in usual if line.startswith("drops ") and line.endswith(" more"))
    (long,) = (line for line in every if line.startswith(short.partition("': ")[0]))
    number = int(short.split()[1])
    assert number > 3
    assert len(long.partition("': ")[2].split(", ")) == number


def test_one_of_both(source: Path, tmp_path: Path) -> None:
    done = run_cli("dequant", source, tmp_path / "out", "-q", "-v")
    assert done.code == 2
    assert "-q and -v exclude one another" in done.err
    assert not (tmp_path / "out").exists()


def test_neither_is_part_of_what_shards_do(source: Path, tmp_path: Path) -> None:
    """One shard is quiet, one is verbose, and their journals name one command."""
    out = tmp_path / "out"
    for shard, flag in (("0/2", "-q"), ("1/2", "-v")):
        done = run_cli("dequant", source, out, "--jobs", "1", "--shard", shard, flag)
        assert done.code == 0, done.err
        assert "next " not in done.err
    loud = [word for line in (out / ".qconvert").rglob("*.jsonl") for word in _words(line)]
    assert "dequant" in loud
    assert not {"-q", "-v"} & set(loud)
    done = run_cli("finish", out, "-q")
    assert (done.code, done.err) == (0, "")


def _words(journal: Path) -> list[str]:
    return re.findall(r'"([^"]+)"', journal.read_text(encoding="utf-8").partition("\n")[0])


# --- The next step -------------------------------------------------------------------------------


def test_what_was_lost_is_measured_by_a_command(tmp_path: Path) -> None:
    """Of dequantized weights none is named: they have lost less than BF16 itself."""
    source = bf16_moe().write(tmp_path / "source")
    done = run_cli("fp8", source, tmp_path / "out", "--targets", "experts", "--jobs", "1")
    assert f"cost    qconvert eval {tmp_path / 'out'} --against {source} --data TEXT" in done.err
    back = run_cli("dequant", tmp_path / "out", tmp_path / "back", "--jobs", "1")
    assert (back.code, "cost    " in back.err, "next    " in back.err) == (0, False, True)


def test_after_a_validation_the_card_is_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_cli("dequant", source, out, "--jobs", "1", "--validate", "sample")
    assert (done.code, "qconvert validate" in done.err) == (0, False)
    assert done.err.splitlines()[-1].startswith(
        f"next    {out}/README.md says which runtimes load it"
    )
    assert "## How to serve it" in (out / "README.md").read_text(encoding="utf-8")


def test_json_has_no_next_step(source: Path, tmp_path: Path) -> None:
    done = run_cli("dequant", source, tmp_path / "out", "--jobs", "1", "--json")
    assert (done.code, done.err) == (0, "")


def test_stages_are_validated_as_one(source: Path, tmp_path: Path) -> None:
    done = run_cli("split", source, tmp_path / "st ages", "--pp", "1,1", "--jobs", "1")
    last = done.err.splitlines()[-1]
    stages = tmp_path / "st ages"
    assert last == f"next    qconvert validate '{stages}' --against {source} --level full"


# --- 60 columns ----------------------------------------------------------------------------------


def test_a_plan_fits_a_narrow_terminal(source: Path) -> None:
    from qconvert import api

    (folder,) = api.plan("dequant-fp8", source).folders
    lines = plan_lines(folder.ready, None, Rates(None, None), columns=NARROW)
    head = next(n for n, line in enumerate(lines) if line.startswith("role"))
    table = lines[head : lines.index("", head)]
    assert max(map(len, table)) <= NARROW, table
    wide = plan_lines(folder.ready, None, Rates(None, None), columns=200)
    assert wide == plan_lines(folder.ready, None, Rates(None, None))
    rows = [line.split() for line in wide[head : wide.index("", head)]]
    assert [" ".join(row).split() for row in rows] == [
        f"{role} {rest}".split() for role, rest in zip(table[::2], table[1::2], strict=True)
    ]


def test_a_reason_that_is_cut_says_where_the_rest_is(source: Path) -> None:
    from qconvert import api

    (folder,) = api.plan("dequant-fp8", source).folders
    for text, more in (
        ("vllm 0.33.0 not at tp 1: a.weight: has ...", True),
        ("sglang at tp 1", False),
    ):
        lines = plan_lines(folder.ready, None, Rates(None, None), Verdict(loads=(text,)))
        at = lines.index(f"loads   {text}")
        assert lines[at + 1].strip().startswith("the whole reason: qconvert validate") is more


def test_a_report_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))
    monkeypatch.setenv("NO_COLOR", "1")
    text = as_text.render(large(3, 4), RULES, terminal=True)
    table = text.partition("measured against the source")[2].partition("SQNR: signal")[0]
    assert "gate_proj" in table
    bare = re.sub(r"\x1b\[[0-9;]*m", "", table)
    assert max(map(len, bare.splitlines())) <= NARROW, bare
    assert "unknown" not in bare  # none is
    dead = Report(measures=[measure(0, 1, "gate_proj", 0.1), measure(0, 2, "gate_proj", math.inf)])
    assert "unknown" in as_text.render(dead, RULES, terminal=True).partition("SQNR:")[0]


def test_inspect_fits_a_narrow_terminal(source: Path) -> None:
    told = run_cli("inspect", source).out.splitlines()
    table = [line for line in told if re.match(r"(role|dtype) ", line)]
    assert len(table) > 5
    assert max(map(len, table)) <= NARROW


# --- Colours -------------------------------------------------------------------------------------


def test_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = as_text.render(large(3, 4), RULES, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = as_text.render(large(3, 4), RULES, terminal=True)
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
    assert colour.search(coloured)
    assert not colour.search(plain)


# --- Completion ----------------------------------------------------------------------------------


def completed(*words: str) -> list[tuple[str, str]]:
    """Kind and value of what follows the words; the last is not whole."""
    shell = ShellComplete(cli, {}, "qconvert", "_QCONVERT_COMPLETE")
    return [(i.type, i.value) for i in shell.get_completions([*words[:-1]], words[-1])]


def test_recipes_are_completed() -> None:
    every = [("plain", name) for name in builtin_recipes()]
    assert (
        completed("run", "") == completed("plan", "") == completed("recipes", "show", "") == every
    )
    assert completed("split", "a", "b", "--recipe", "") == every
    assert completed("run", "deq") == [one for one in every if one[1].startswith("deq")]
    assert completed("run", "./mine") == [("file", "./mine")]


def test_runtimes_are_completed() -> None:
    assert completed("fuse", "a", "b", "--for", "sg") == [
        ("plain", "sglang"), ("plain", "sglang==0.5.23"), ("plain", "sglang==0.5.22"),
    ]  # fmt: skip
    for command in (["validate", "a"], ["fuse", "a", "b"], ["advise", "a"], ["split", "a", "b"]):
        for _, word in completed(*command, "--for", ""):
            done = run_cli(
                *command, "--for", word, *(["--pp", "2"] if command[0] == "split" else [])
            )
            assert done.code == 1, done.err  # there is no such folder; the word is right


def test_targets_passes_and_rules_are_completed() -> None:
    assert completed("w4a16", "a", "b", "--targets", "") == [
        ("plain", "experts"), ("plain", "Linear"), ("plain", "re:"),
    ]  # fmt: skip
    assert ("plain", "dequant") in completed("plan", "dequant-fp8", "a", "--dump-after", "")
    assert completed("validate", "--explain", "qc06")[0] == ("plain", "QC060")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("inspect", "mod"), "file"), (("dequant", "model", "o"), "dir"),
        (("validate", "out", "--against", "mod"), "file"), (("clean", "o"), "dir"),
        (("w4a16", "a", "b", "--data", "ch"), "file"), (("inspect", "a", "--family", "a"), "file"),
    ],
)  # fmt: skip
def test_files_and_folders_are_the_shells(words: tuple[str, ...], kind: str) -> None:
    assert completed(*words) == [(kind, words[-1])]


def test_a_shell_gets_it() -> None:
    """As bash asks, and without numpy or torch."""
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(sorted({'numpy', 'torch', 'pydantic'} & set(sys.modules))))\n"
        "from qconvert.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "_QCONVERT_COMPLETE": "bash_complete", "COMP_CWORD": "2",
             "COMP_WORDS": "qconvert run dequant-fp8-"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["plain,dequant-fp8-no-mtp", "[]"], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_of_the_page_install_it(shell: str) -> None:
    page = (Path(__file__).parent.parent / "docs" / "commands.md").read_text(encoding="utf-8")
    assert f"_QCONVERT_COMPLETE={shell}_source qconvert" in page
    assert get_completion_class(shell) is not None
