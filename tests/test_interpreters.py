"""Commands are run inside foreign folders: no interpreter that a command starts runs Python of the
folder that it is started in, and every one is started by the same function."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import bf16_moe

import qconvert
from qconvert.core import own_process

_ROOT = Path(__file__).parent.parent
_PACKAGE = Path(qconvert.__file__).parent
_TRAP = "import os\nopen(os.environ['RAN'], 'a').write(__name__ + '\\n')\nraise SystemExit(99)\n"
# What is imported before anything else is run: a trap of that name would stop the test itself.
_BUILT_IN = {"os", "sys", "builtins", "site", *sys.builtin_module_names}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model whose folder has a module of every name that anything might import."""
    folder = bf16_moe().write(tmp_path / "model")
    others = [
        "numpy",
        "torch",
        "transformers",
        "xxhash",
        "yaml",
        "click",
        "pydantic",
        "safetensors",
        "numba",
    ]
    for name in [*sys.stdlib_module_names, *others, "qconvert", "sitecustomize", "usercustomize"]:
        if name not in _BUILT_IN:
            (folder / f"{name}.py").write_text(_TRAP)
    return folder


def _ran(
    folder: Path, *words: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What an interpreter did, and which modules of the folder that it was started in were run."""
    ran = folder.parent / "ran"
    env = {
        "PATH": os.environ["PATH"], "HOME": str(folder.parent), "RAN": str(ran), "OMP_NUM_THREADS": "1",
        **variables,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    return done, ran.read_text().split() if ran.exists() else []


# Each starts an interpreter as a command does. The class of transformers: its module is replaced, for
# what it imports takes seconds.
_STARTS = {
    "the class of transformers": (
        "from qconvert.layouts.derived import find; find._MODULE = 'qconvert.core.shown'; "
        "assert 'exit' not in str(find._run('{}')), find._run('{}')"
    ),
    "workers of a conversion": (
        "from qconvert.run.work.forkserver import ForkServer; server = ForkServer(); "
        "server.preload(['numpy', 'xxhash'], compiled=False); server.fork(1, ()); server.pids(); "
        "server.close()"
    ),
    "workers of a validation": (
        "from qconvert.cli.main import main; "
        "main(['validate', '.', '--level', 'full', '--jobs', '2', '-q'])"
    ),
}


@pytest.mark.parametrize("how", _STARTS)
def test_no_module_of_the_current_folder_is_run(foreign: Path, how: str) -> None:
    script = (
        foreign.parent / "bin" / "start"
    )  # as an installed command: its folder is imported from
    script.parent.mkdir()
    script.write_text(f"if __name__ == '__main__':\n    {_STARTS[how]}\n")
    done, ran = _ran(foreign, str(script))
    assert ran == [], done.stderr
    assert done.returncode in (0, 1, 3), done.stderr


def test_a_command_imports_nothing_from_the_current_folder_later(foreign: Path) -> None:
    """`python -m qconvert` has it in front of its path: what it imports before this package is the
    user's affair, entry points and packages are not."""
    (foreign / "qconvert.py").unlink()
    start = (
        "import os, sys; sys.path.insert(0, os.getcwd()); from qconvert.core import own_process; "
    )
    show = "own_process.declare(); print(sys.path, os.environ); import json, multiprocessing.spawn"
    done, ran = _ran(
        foreign, "-P", "-c", start.replace("sys.path.insert(0, os.getcwd()); ", "") + show
    )
    assert (done.returncode, ran) == (0, [])
    listed = [file.name for file in foreign.glob("*.py")]
    for name in listed:  # those that this package itself imports first
        if name not in ("wave.py", "numpy.py"):
            (foreign / name).unlink()
    code = start + "own_process.declare(); import wave, numpy"
    done, ran = _ran(foreign, "-P", "-c", code, PYTHONPATH=f":{foreign.parent}:.")
    assert (done.returncode, ran) == (0, []), done.stderr


def test_the_environment_of_what_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of PYTHONPATH an empty entry, and a relative one, mean the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/elsewhere", "more", "."]))
    monkeypatch.setattr(
        sys, "path", ["", str(tmp_path), "/elsewhere", str(tmp_path / "more"), str(_ROOT)]
    )
    start = own_process.python("-c", "pass", MINE="1")
    assert start["args"] == [sys.executable, "-P", "-c", "pass"]
    assert start["env"]["PYTHONPATH"].split(os.pathsep) == ["/elsewhere", str(_ROOT)]
    assert (start["env"]["PYTHONSAFEPATH"], start["env"]["MINE"]) == ("1", "1")
    with own_process.without_current_folder():
        assert os.environ["PYTHONPATH"] == "/elsewhere"
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ["PYTHONPATH"].startswith(os.pathsep)
    assert "PYTHONSAFEPATH" not in os.environ or os.environ["PYTHONSAFEPATH"] != "1"
    monkeypatch.chdir(_ROOT)  # a checkout that is not installed
    assert str(_ROOT) in own_process.python()["env"]["PYTHONPATH"].split(os.pathsep)


def test_numba_takes_no_settings_of_the_current_folder(tmp_path: Path) -> None:
    """It reads `.numba_config.yaml` there when it is imported."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".numba_config.yaml").write_text("disable_jit: 1\n")
    code = (
        "import sys; from qconvert.compiled.choice import numba_or_none as n; "
        "print(n(), 'numba' in sys.modules)"
    )
    done, _ = _ran(tmp_path / "model", "-P", "-c", code)
    assert done.stdout.split() == ["None", "False"], done.stderr


# --- every start is one of these ------------------------------------------------------------------

_STARTERS = re.compile(
    r"^(subprocess\.(run|Popen|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|os\.(system|popen|exec\w+|spawn\w+|posix_spawnp?)|pty\.spawn|runpy\.\w+"
    r"|asyncio\.create_subprocess_\w+|(\w+\.)?(get_context|ProcessPoolExecutor)|ray\.init"
    r"|(multiprocessing|mp|context)\.(Process|Pool|Manager|Queue|Lock|Value|Array))$"
)
# A file without any of these starts nothing.
_ASKED = re.compile(
    r"subprocess|multiprocessing|concurrent|executable|\bos\.(sys|pop|ex|sp|po)|ray\.init"
)


def _calls(
    node: ast.AST, within: tuple[str, ...] = ()
) -> Iterator[tuple[ast.Call, tuple[str, ...]]]:
    """Calls, each with the context managers that it stands in."""
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.With):
            inner = (*within, *(ast.unparse(item.context_expr) for item in child.items))
        if isinstance(child, ast.Call):
            yield child, within
        yield from _calls(child, inner)


def _is_safe(call: ast.Call, within: tuple[str, ...]) -> bool:
    name = ast.unparse(call.func)
    if any("without_current_folder()" in context for context in within):
        return True
    if name == "get_context":  # what it makes is named `context`, and looked for
        return True
    if call.args and "_SERVER" in ast.unparse(call.args[0]):
        return True  # a file of ours by another interpreter: its folder stands for the current one
    given = [ast.unparse(one.value) for one in call.keywords if one.arg is None]
    return not call.args and any("own_process.python(" in one or one == "start" for one in given)


def test_every_interpreter_is_started_by_one_function() -> None:
    wrong: list[str] = []
    found = 0
    for file in sorted({path.resolve() for path in _PACKAGE.rglob("*.py")}):
        if file.name == "own_process.py":
            continue
        text = file.read_text(encoding="utf-8")
        if not _ASKED.search(text):
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in (
                "subprocess",
                "multiprocessing",
            ):
                wrong += [
                    f"{file.name}:{node.lineno} imports {one.name}"
                    for one in node.names
                    if one.name not in ("get_context", "AuthenticationError")
                ]
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
                wrong.append(f"{file.name}:{node.lineno} names sys.executable")
        for call, within in _calls(tree):
            if _STARTERS.match(ast.unparse(call.func)):
                found += 1
                if not _is_safe(call, within):
                    wrong.append(f"{file.name}:{call.lineno} starts {ast.unparse(call)[:80]}")
    assert wrong == []
    assert found >= 6, "the pattern finds what there is"


@pytest.mark.parametrize(
    "file",
    [
        "action.yml", "Makefile", "Dockerfile", ".ci/run", ".pre-commit-hooks.yaml",
        ".pre-commit-config.yaml", "examples/validate-converted-repo.yml", "docs/ci.md",
    ],
)  # fmt: skip
def test_lines_of_shells_start_python_isolated(file: str) -> None:
    """`-I`: neither the current folder nor PYTHONPATH. The file of a script may stand in its place."""
    text = (_ROOT / file).read_text(encoding="utf-8")
    starts = re.findall(r'(?:python3?|\$\(PYTHON\)|\$PY)"? +(-\S+)(?= )', text)
    assert [option for option in starts if option != "-I"] == []
