"""The process of `--loader`: a runtime's own loader, started by the interpreter of the user's serving
environment, apart from everything of this one.

It runs the runtime's code. It gets no credentials (of the environment only what `_KEPT` names, and a
home of its own), works in a folder of its own, reaches no model hub, may take so much memory and time,
and is killed with everything that it started. What it prints goes to a file, of which an error shows the
end.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qconvert.core.errors import LoaderError
from qconvert.core.shown import shortened

_SERVER = Path(__file__).parent / "server" / "__main__.py"
# Of this process's environment: where programs and libraries are found, and the language.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL", "CUDA_HOME", "CONDA_PREFIX",
         "VIRTUAL_ENV", "TZ")  # fmt: skip
_LAST_LINES = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds until an interpreter has said what it has, imported the runtime, loaded one folder; bytes
    of memory of each of its processes."""

    probing: float = 60
    importing: float = 900
    loading: float = 900
    memory: int = 24 << 30


DEFAULT = Limits()


class LoaderProcess:
    """A runtime, imported once for a GPU of a compute capability; every folder is loaded in a fork of
    it. Raises LoaderError where the interpreter has no such runtime, or its process crashes or hangs."""

    def __init__(
        self, python: Path, runtime: str, capability: tuple[int, int], limits: Limits
    ) -> None:
        self._python, self._runtime, self._limits = python, runtime, limits
        self.folder = Path(tempfile.mkdtemp(prefix="qconvert-loader-"))
        self._log = self.folder / "log"
        at = self.folder / "socket"
        major, minor = capability
        words = [
            "--capability",
            f"{major}.{minor}",
            "--at",
            str(at),
            "--memory",
            str(limits.memory),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), str(_SERVER), runtime, *words],
                env=clean_environment(self.folder), cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_until_ready()
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(limits.loading)
            self._socket.connect(str(at))
            self._lines = self._socket.makefile("rw")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the first process, and of the group of all."""
        return self._process.pid

    def asked(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The loader's report on one folder. Raises LoaderError where it crashes or hangs, and ends the
        process then."""
        try:
            self._lines.write(json.dumps(job) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except TimeoutError:
            raise self._failed(f"did not load in {self._limits.loading:.0f} s") from None
        except OSError as error:
            raise self._failed(f"ended: {error}") from None
        if not line:
            raise self._failed("ended while it loaded")
        said: dict[str, Any] = json.loads(line)
        if said.get("step") == "died":
            raise self._failed(f"crashed while it loaded: {said['error']}")
        return said

    def close(self) -> None:
        """End the process with all that it started, and remove its folder."""
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        """Until it says that it has imported the runtime."""
        assert self._process.stdout is not None
        answer = self._process.stdout
        end = time.monotonic() + self._limits.importing
        if not select.select([answer], [], [], max(0.0, end - time.monotonic()))[0]:
            raise self._failed(f"did not import it in {self._limits.importing:.0f} s")
        if answer.readline().strip() != b"ready":
            status = self._process.wait()
            raise self._failed(f"ended with status {status} while it imported it")

    def _failed(self, what: str) -> LoaderError:
        """The error, with the last lines of what the process printed. Ends it."""
        lines = self._log.read_text("utf-8", "replace").splitlines()
        said = _last(lines)
        _forget(self)
        return LoaderError(
            f"{self._python}: asked for the loader of {self._runtime}, the process {what}; try the "
            "runtime there, or leave --loader out" + said
        )


def _last(lines: list[str]) -> str:
    """The end of what a process printed, for an error."""
    said = [shortened(line, 200) for line in lines if line.strip()][-_LAST_LINES:]
    return f"; it printed last: {' | '.join(said)}" if said else ""


def clean_environment(home: Path) -> dict[str, str]:
    """The environment of a process of a runtime: no credentials, proxies or caches of the user."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    user = os.environ.get("PYTHONUSERBASE") or str(Path("~/.local").expanduser())
    return {
        **kept, "HOME": str(home), "TMPDIR": str(home), "HF_HOME": str(home / "hf"),
        "XDG_CACHE_HOME": str(home / "cache"), "XDG_CONFIG_HOME": str(home / "config"),
        "PYTHONUSERBASE": user, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        "VLLM_CACHE_ROOT": str(home / "cache" / "vllm"),
    }  # fmt: skip


def versions_in(python: Path, limits: Limits) -> dict[str, str]:
    """Versions of the runtimes that an interpreter has, by name. Raises LoaderError for one that does
    not start."""
    with tempfile.TemporaryDirectory(prefix="qconvert-loader-") as folder:
        home = Path(folder)
        try:
            process = subprocess.Popen(
                [str(python), str(_SERVER), "versions"], env=clean_environment(home), cwd=home,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LoaderError(
                f"{python}: cannot be started: {error.strerror}; name the Python of the environment "
                "that serves, such as /opt/venv/bin/python"
            ) from None
        try:
            out, said = process.communicate(timeout=limits.probing)
        except subprocess.TimeoutExpired:
            raise LoaderError(
                f"{python}: did not say in {limits.probing:.0f} s which runtimes it has; is it Python?"
            ) from None
        finally:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    try:
        found = json.loads(out)
    except ValueError:
        found = None
    if process.returncode or not isinstance(found, dict):
        text = _last(said.decode("utf-8", "replace").splitlines())
        raise LoaderError(
            f"{python}: asked which runtimes it has, it ended with status {process.returncode}; name "
            f"the Python of the environment that serves{text}"
        )
    return {str(name): str(version) for name, version in found.items()}


# One for each runtime and capability that a command asks: an import takes a minute. Ended with this
# process.
_OPEN: dict[tuple[Path, str, tuple[int, int]], LoaderProcess] = {}


def opened(
    python: Path, runtime: str, capability: tuple[int, int], limits: Limits
) -> LoaderProcess:
    """The process of this interpreter for a runtime and a capability, started if there is none."""
    key = python, runtime, capability
    if key not in _OPEN:
        if not _OPEN:
            atexit.register(close_all)
        _OPEN[key] = LoaderProcess(python, runtime, capability, limits)
    return _OPEN[key]


def close_all() -> None:
    while _OPEN:
        _OPEN.popitem()[1].close()


def _forget(process: LoaderProcess) -> None:
    for key in [key for key, one in _OPEN.items() if one is process]:
        del _OPEN[key]
    process.close()
