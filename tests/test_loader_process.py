"""`--loader` with interpreters that are none, that crash, that hang, that have another version, and with
one that answers as a runtime's loader would. A script stands for the interpreter."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import bf16_moe, edit_json, refused, run_cli

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import LoaderError
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loader import process
from qconvert.runtimes.loader.ask import RuntimeLoader, loader_of, loaders_in, write_headers
from qconvert.runtimes.loader.process import Limits
from qconvert.runtimes.loading.setting import NotSimulated, Setting

QUICK = Limits(probing=20, importing=20, loading=20)
CONFIG = {"architectures": ["NobodysModel"], "num_hidden_layers": 2}
TENSORS = {
    "model.layers.0.mlp.weight": TensorType("BF16", (4, 4)),
    "model.layers.2.eh_proj.weight": TensorType("BF16", (4, 4)),
    "lm_head.weight": TensorType("BF16", (4, 4)),
}
WHOLE: dict[str, Any] = {
    "error": None, "step": "done", "unused": ["model.layers.2.eh_proj.weight"], "shares": {},
    "empty": [], "schemes": {}, "parameters": {"model.layers.0.mlp.weight": ["bfloat16", [4, 4]]},
    "nbytes": 32,
}  # fmt: skip
# What an interpreter does as the server of a runtime; `ANSWER` is what it says of every folder.
SERVES = """
import socket
at = sys.argv[sys.argv.index("--at") + 1]
listening = socket.socket(socket.AF_UNIX)
listening.bind(at)
listening.listen()
print("ready", flush=True)
lines = listening.accept()[0].makefile("rw")
for line in lines:
    print(line, file=open(__file__ + ".jobs", "a"), end="")
    lines.write(json.dumps(ANSWER) + "\\n")
    lines.flush()
"""


def interpreter(folder: Path, body: str = "", versions: str = '{"sglang": "0.5.23"}') -> Path:
    """A program that answers which runtimes it has, and then does as `body` says."""
    file = folder / "python"
    file.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        f"if sys.argv[2] == 'versions':\n    print({versions!r})\n    sys.exit()\n{body}"
    )
    file.chmod(0o755)
    return file


def answering(folder: Path, answer: dict[str, Any]) -> RuntimeLoader:
    body = f"ANSWER = json.loads({json.dumps(answer)!r})\n{SERVES}"
    return loaders_in(interpreter(folder, body), QUICK)["sglang"]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    process.close_all()


def test_an_answer_is_as_the_simulators(tmp_path: Path) -> None:
    said = WHOLE | {
        "unused": ["model.layers.2.eh_proj.weight", "lm_head.weight"],
        "shares": {"model.norm.weight": 1.0, "model.layers.0.mlp.weight_shape": 1.0},
    }
    load = answering(tmp_path, said).load(CONFIG, TENSORS, Setting(tp=2, rank=1))
    assert load.missing == ("model.norm.weight",)  # no kernel reads a weight_shape
    assert load.ignored == ("lm_head.weight",)  # the other is the draft's
    assert not load.whole
    (job,) = map(json.loads, (tmp_path / "python.jobs").read_text().splitlines())
    assert (job["tp"], job["rank"], job["headers"]) == (2, 1, True)


def test_a_tied_head_need_not_be_read(tmp_path: Path) -> None:
    said = WHOLE | {"unused": ["model.layers.2.eh_proj.weight", "lm_head.weight"]}
    tied = {**CONFIG, "tie_word_embeddings": True}
    assert answering(tmp_path, said).load(tied, TENSORS).ignored == ()


def test_a_draft_has_embeddings_and_head_from_its_model(tmp_path: Path) -> None:
    unread = [
        "model.layers.0.mlp.weight",
        "lm_head.weight",
        "model.layers.2.shared_head.head.weight",
    ]
    missing = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 1.0}
    loader = answering(tmp_path, WHOLE | {"unused": unread, "shares": missing})
    tensors = {**TENSORS, unread[2]: TENSORS["lm_head.weight"]}
    load = loader.load(CONFIG, tensors, draft=True)
    assert (load.missing, load.ignored) == ((), ())
    load = loader.load(CONFIG, tensors)
    assert load.missing == tuple(missing)
    assert load.ignored == ("model.layers.0.mlp.weight", "lm_head.weight")


def test_a_refusal_names_the_tensor_and_the_place(tmp_path: Path) -> None:
    error = {"error": "KeyError: 'lm_head.weight'", "step": "load", "last": "lm_head.weight",
             "at": ["model.py:7 load_weights"]}  # fmt: skip
    load = answering(tmp_path, error).load(CONFIG, TENSORS)
    assert load.refused is not None
    assert load.refused.where == "lm_head.weight"
    assert load.refused.why == "KeyError: 'lm_head.weight' (model.py:7 load_weights)"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("ValueError: set trust_remote_code=True", "never run"),
        ("RuntimeError: Tensor.item() cannot be called on meta tensors", "asks for values"),
    ],
)
def test_what_headers_cannot_answer_is_not_known(tmp_path: Path, error: str, says: str) -> None:
    with pytest.raises(NotSimulated, match=says):
        answering(tmp_path, {"error": error, "step": "build"}).load(CONFIG, TENSORS)


def test_a_version_whose_modules_moved_is_an_error(tmp_path: Path) -> None:
    error = {"error": "ModuleNotFoundError: No module named 'sglang.srt.runtime'", "step": "build"}
    with pytest.raises(LoaderError, match=r"sglang 0\.5\.23 does not load with what is prepared"):
        answering(tmp_path, error).load(CONFIG, TENSORS)


def test_modules_that_another_version_lacks_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from qconvert.runtimes.loader.server.stubs import import_ahead

    import_ahead("json", "qconvert.nowhere", "json.decoder")
    said = capsys.readouterr().err
    assert said.count("not imported ahead: ") == said.count("qconvert.nowhere: ") == 1


def test_a_crash_while_importing_shows_the_last_lines(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "sys.exit('ImportError: libfoo.so: not found')")
    with pytest.raises(LoaderError, match=r"(?s)ended with status 1.*libfoo\.so: not found"):
        loaders_in(python, QUICK)["sglang"].load(CONFIG, TENSORS)
    assert not process._OPEN


def test_a_crash_while_loading_is_an_error(tmp_path: Path) -> None:
    died = {"error": "the process ended with 11", "step": "died"}
    with pytest.raises(LoaderError, match="crashed while it loaded: the process ended with 11"):
        answering(tmp_path, died).load(CONFIG, TENSORS)


def test_one_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """Also a process that it started, which holds its standard output."""
    body = (
        f"pid = os.fork() or time.sleep(60)\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(pid))\n"
    )
    python = interpreter(tmp_path, body + "time.sleep(1000)")
    loader = loaders_in(python, Limits(importing=4))["sglang"]
    with pytest.raises(LoaderError, match="did not import it in 4 s"):
        loader.load(CONFIG, TENSORS)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):  # what has no parent left is reaped by init
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} still runs")


def test_one_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    body = SERVES.replace("for line in lines:", "time.sleep(1000)\nfor line in lines:")
    python = interpreter(tmp_path, body)
    with pytest.raises(LoaderError, match="did not load in 2 s"):
        loaders_in(python, Limits(loading=2))["sglang"].load(CONFIG, TENSORS)


def test_interpreters_without_the_runtime(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match="cannot be started: No such file"):
        loaders_in(tmp_path / "nowhere", QUICK)
    with pytest.raises(LoaderError, match="ended with status 1; name the Python"):
        loaders_in("/bin/false", QUICK)
    with pytest.raises(LoaderError, match="has neither sglang nor vllm"):
        loaders_in(interpreter(tmp_path, versions="{}"), QUICK)


def test_another_version_than_is_named_is_refused(tmp_path: Path) -> None:
    python = interpreter(tmp_path, versions='{"sglang": "0.5.22.post1"}')
    assert loader_of(python, Consumer("sglang")).version == "0.5.22.post1"
    with pytest.raises(LoaderError, match=r"has sglang 0\.5\.22\.post1, and --for names 0\.5\.22"):
        loader_of(python, Consumer("sglang", "0.5.22"))
    with pytest.raises(LoaderError, match=r"has no vllm, only sglang 0\.5\.22\.post1"):
        loader_of(python, Consumer("vllm"))


def test_no_credentials_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the environment, nor by the user's home."""
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "https_proxy", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "secret")
    note = tmp_path / "environment"
    body = f"json.dump([dict(os.environ), os.getcwd()], open({str(note)!r}, 'w'))\nsys.exit(1)"
    with pytest.raises(LoaderError):
        loaders_in(interpreter(tmp_path, body), QUICK)["sglang"].load(CONFIG, TENSORS)
    environment, folder = json.loads(note.read_text())
    assert "secret" not in environment.values()
    assert environment["HF_HUB_OFFLINE"] == "1"
    homes = {environment[name] for name in ("HOME", "TMPDIR")}
    assert homes == {folder}
    assert not Path(folder).exists()  # removed with the process
    assert os.environ["HF_TOKEN"] == "secret"


def test_the_command_says_who_answered(tmp_path: Path) -> None:
    """Of a class that no simulator knows, too."""
    origin = bf16_moe().write(tmp_path / "model")
    said = WHOLE | {"unused": []}
    python = answering(tmp_path, said).python
    edit_json(origin / "config.json", lambda config: config.update(architectures=["NobodysModel"]))
    assert run_cli("validate", origin, "--for", "sglang").code == 5
    done = run_cli("validate", origin, "--for", "sglang", "--loader", python)
    assert done.code == 0, done.err
    assert f"headers given to sglang 0.5.23, its own loader in {python}" in done.out
    assert "sglang 0.5.23 loads the folder whole" in done.out
    done = run_cli("validate", origin, "--loader", python)
    assert (done.code, "give --for NAME" in done.err) == (2, True)


def test_the_command_fails_with_one_clear_error(tmp_path: Path) -> None:
    origin = bf16_moe().write(tmp_path / "model")
    python = interpreter(tmp_path, "sys.exit('no kernels here')")
    for command, more in (("validate", ()), ("advise", ()), ("repair", ("--dry-run",))):
        error = refused(command, origin, *more, "--for", "sglang", "--loader", python)
        assert "ended with status 1" in error, command
        assert "no kernels here" in error


def test_a_file_of_headers_takes_no_disk(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_headers(file, {"huge": TensorType("BF16", (1 << 20, 1 << 14))})
    assert file.stat().st_size > 1 << 35
    assert file.stat().st_blocks * 512 < 1 << 20
