"""The oracle: a command that does wrong is judged wrong, each in its own way, a good one good."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import faults as faults_of
import pytest

from hostile import case as cases_of
from hostile import play
from hostile.bases import Bases
from hostile.case import Case, Ground, Mutation, Scene, Verdict
from hostile.oracle import faults
from hostile.play import Stage
from hostile.zygote import waited

_REFUSE = "import sys; sys.stderr.write('qconvert: error: victim.txt: {}\\n'); sys.exit(1)"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(Bases(tmp_path_factory.getbasetemp() / "oracle-bases")) as made:
        yield made


def _nothing(_ground: Ground) -> None:
    return


def _kinds(stage: Stage, code: str, *, verdict: Verdict = Verdict.REFUSED) -> set[str]:
    """The kinds of faults that are found in what some Python does in a case's folder."""
    scene = Scene("fake", (), (), "", frozenset(), writes=("out",))
    mutation = Mutation(
        "fake", "fake", _nothing, ("victim.txt",), verdict, arguments=("--fake", code)
    )
    made = Case("fake/fake/fake", mutation, scene, 1)
    return {fault.kind for fault in faults(made, stage.play(made).played)}


def test_a_good_refusal_is_good(stage: Stage) -> None:
    assert _kinds(stage, _REFUSE.format("is not what was expected")) == set()


def test_click_s_usage_error_is_good(stage: Stage) -> None:
    said = "Usage: qconvert x\nTry 'qconvert x --help' for help.\n\nError: victim.txt is no size\n"
    assert _kinds(stage, f"import sys; sys.stderr.write({said!r}); sys.exit(2)") == set()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("pass", "accepted"),
        ("raise SystemExit(1)", "no error line"),
        ("raise SystemExit(70)", "exit code"),
        ("raise ValueError('victim.txt')", "traceback"),
        ("print('\\x1b[2J')\n" + _REFUSE.format(""), "control characters"),
        ("print('a\\u202eb')\n" + _REFUSE.format(""), "control characters"),
        ("import sys; sys.stderr.buffer.write(b'\\xff\\n')\n" + _REFUSE.format(""),
            "control characters"),
        ("print('  ::error::x')\n" + _REFUSE.format(""), "workflow command"),
        ("print('##[error]x')\n" + _REFUSE.format(""), "workflow command"),
        (_REFUSE.format("a\\nsecond line"), "message of several lines"),
        (_REFUSE.format("a\\nqconvert: error: victim.txt"), "several error lines"),
        (_REFUSE.format("x" * 1600), "message too long"),
        (_REFUSE.replace("victim.txt", "something"), "culprit not named"),
        ("open('victim.txt', 'w').close()\n" + _REFUSE.format(""), "outside touched"),
        ("open('../beside.txt', 'w').close()\n" + _REFUSE.format(""), "outside touched"),
        ("import os; os.remove('beside/config.json')\n" + _REFUSE.format(""), "outside touched"),
        ("import os; os.chmod('victim.txt', 0o777)\n" + _REFUSE.format(""), "outside touched"),
        ("import tempfile; tempfile.mkstemp()\n" + _REFUSE.format(""), "outside touched"),
        ("import os; os.mkdir('out'); open('out/config.json', 'w').close()\n" + _REFUSE.format(""),
            "published"),
        ("import os; os.mkdir('out'); open('out/a.safetensors', 'w').close()\n" + _REFUSE.format(""),
         "published"),
        ("print(open('../secret.txt').read())\n" + _REFUSE.format(""), "leak"),
        ("import os; os.kill(os.getpid(), 11)", "signal"),
        ("import subprocess; subprocess.Popen(['sleep', '60'])\n" + _REFUSE.format(""),
            "processes"),
        ("import socket\ntry:\n  socket.create_connection(('192.0.2.1', 80))\nexcept OSError: pass\n"
         + _REFUSE.format(""), "network"),
        ("b = bytearray(900 << 20)\nb[::4096] = b'x' * len(b[::4096])\n" + _REFUSE.format(""),
            "memory"),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', "
         "'b = bytearray(900 << 20); b[::4096] = bytes(len(b[::4096]))'])\n" + _REFUSE.format(""),
         "memory"),
    ],
)  # fmt: skip
def test_wrong_is_found(code: str, kind: str, stage: Stage) -> None:
    assert kind in _kinds(stage, code)


def test_a_hang_is_ended_and_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "DEADLINE_SECONDS", 0.5)
    assert cases_of.DEADLINE_SECONDS == 20
    assert "hang" in _kinds(stage, "import time; time.sleep(60)")
    waits = "import os; os.mkfifo('out'); open('out').read()"
    assert "hang" in _kinds(stage, waits)


def test_waiting_for_a_cpu_is_no_hang() -> None:
    def spin() -> None:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        while True:
            pass

    pids = [faults_of.started(spin), faults_of.started(spin), faults_of.started(signal.pause)]
    try:
        time.sleep(1)
        assert waited(pids[:2]) > 0.2
        assert waited(pids[2:]) < 0.2
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_what_a_scene_may_write_is_no_fault(stage: Stage) -> None:
    code = "import os; os.mkdir('out'); open('out/model.safetensors', 'w').close()"
    assert _kinds(stage, code, verdict=Verdict.ACCEPTED) == set()


def test_a_sound_input_that_is_refused_is_found(stage: Stage) -> None:
    assert "refused" in _kinds(stage, _REFUSE.format(""), verdict=Verdict.ACCEPTED)
    assert "error and exit 0" in _kinds(
        stage, "import sys; sys.stderr.write('qconvert: error: x\\n')", verdict=Verdict.EITHER
    )


def test_names_that_are_no_text_are_compared(stage: Stage, tmp_path: Path) -> None:
    made = "open(b'out-\\xff', 'w').close()\n" + _REFUSE.format("")
    assert _kinds(stage, made) == {"outside touched"}
    assert os.listdir(tmp_path) == []
