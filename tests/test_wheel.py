"""The wheel, installed from its requirements into an environment that has nothing else, as on a fresh
machine: fetched by pip, so these are marked `peer`. tests/test_light.py is the fast form of this."""

from __future__ import annotations

import json
import subprocess
import venv
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import light_install
import pytest
from built import ROOT, built, from_checkout
from light_install import EXTRAS_PACKAGES, REFUSED, RUNS, clean, project
from made_once import made_once

from qconvert.cli.demo import write_sample

pytestmark = pytest.mark.peer

_MOST_BYTES = 150_000_000
_NOT_OURS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, name: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """One of its console scripts."""
        return subprocess.run(
            [self.folder / "bin" / name, *words],
            cwd=folder, capture_output=True, text=True, check=False, env=clean(),
        )  # fmt: skip


@pytest.fixture
def installed() -> Installed:
    return Installed(made_once("wheel", _install) / "venv")


def _install(folder: Path) -> None:
    folder.mkdir()
    (wheel,) = built(from_checkout, folder, "--wheel")
    made = Installed(folder / "venv")
    venv.create(made.folder, symlinks=True, with_pip=True)
    pip = [str(made.python), "-m", "pip", "install", "--quiet", str(wheel)]
    subprocess.run(pip, check=True, env=clean())


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A folder that holds `fp8`."""
    write_sample(tmp_path / "fp8")
    return tmp_path


def test_it_takes_less_than_150_mb(installed: Installed) -> None:
    """146 MB in November 2026, bytecode included; numpy is half of it."""
    own = [
        path for path in installed.packages.iterdir() if path.name.split("-")[0] not in _NOT_OURS
    ]
    files = [file for path in own for file in (path, *path.rglob("*")) if file.is_file()]
    nbytes = sum(file.stat().st_size for file in files)
    assert 50_000_000 < nbytes < _MOST_BYTES
    names = {path.name for path in own}
    assert not names & EXTRAS_PACKAGES
    assert {"qconvert", "numpy", "safetensors", "huggingface_hub"} <= names


def test_what_runs_and_what_says_which_extra_it_needs(installed: Installed, tmp_path: Path) -> None:
    light = light_install.light(installed.python, tmp_path)
    assert not light.imported & EXTRAS_PACKAGES
    wrong = {name: light.said[name] for name in RUNS if light.said[name].code}
    assert wrong == {}
    full = [name for name in RUNS if "full" in RUNS[name]]
    assert len(full) > 5
    for name in full:
        assert "0 errors, 0 warnings" in light.said[name].out, name
    for line, words in REFUSED.items():
        assert light.said[line].code in (1, 2), line
        assert words in light.said[line].err, line


@pytest.mark.parametrize("script", ["qconvert", "hf-qconvert"])
def test_the_console_scripts(script: str, installed: Installed, sample: Path) -> None:
    done = installed.run(script, "dequant", "fp8", "bf16", "--validate", "full", folder=sample)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("0 errors, 0 warnings\n")
    wrong = installed.run(script, "inspect", "nosuch", folder=sample)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == "qconvert: error: nosuch: no such file or folder\n"


def test_hf_runs_it_as_an_extension(
    installed: Installed, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client starts the script that an extension's manifest names (cli/extensions.py); what it would
    fetch from GitHub, and install as the wheel is installed here, is not there."""
    folder = tmp_path / ".local/share/hf/extensions/hf-qconvert"
    folder.mkdir(parents=True)
    manifest = {
        "owner": "me", "repo": "hf-qconvert", "repo_id": "me/hf-qconvert", "type": "python",
        "short_name": "qconvert", "installed_at": "2026-01-01T00:00:00+00:00",
        "executable_path": str(installed.folder / "bin" / "hf-qconvert"),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setenv("HOME", str(tmp_path))
    done = installed.run("hf", "qconvert", "inspect", "fp8", folder=sample)
    assert done.returncode == 0, done.stderr
    assert done.stdout == installed.run("qconvert", "inspect", "fp8", folder=sample).stdout
    assert "4 layers, 4 experts" in done.stdout


def test_what_the_wheel_says_of_itself(installed: Installed) -> None:
    (wheel,) = installed.folder.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert "qconvert/py.typed" in packed.namelist()
        tables = {
            f"qconvert/runtimes/classes/{table.parent.name}/{table.name}"
            for table in (ROOT / "qconvert/runtimes/classes").glob("*/*.json")
        }
        assert tables
        assert tables <= set(packed.namelist())
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        lines = packed.read(name).decode().partition("\n\n")[0].splitlines()
    said = [tuple(line.split(": ", 1)) for line in lines]
    for classifier in project()["classifiers"]:
        assert ("Classifier", classifier) in said
    extras = project()["optional-dependencies"]
    assert {value for key, value in said if key == "Provides-Extra"} == set(extras)
    core = [value for key, value in said if key == "Requires-Dist" and "extra ==" not in value]
    assert core == project()["dependencies"]
    command = [str(installed.python), "-m", "pip", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
    assert done.returncode == 0, done.stdout


# --- The Dockerfile --------------------------------------------------------------------------------


def _instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their texts, in order."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def _is_sent(name: str) -> bool:
    """Whether .dockerignore leaves a file to the build: the last pattern that fits decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        parts = [name, *map(str, Path(name).parents)]
        if pattern.startswith("**/"):
            pattern, parts = pattern.removeprefix("**/"), list(Path(name).parts)
        if line and not line.startswith("#") and any(fnmatch(part, pattern) for part in parts):
            sent = line.startswith("!")
    return sent


def test_the_install_lines_of_the_dockerfile(sample: Path, tmp_path: Path) -> None:
    """Every RUN in order, in a fresh environment in the image's place, on what COPY finds there."""
    environment, place = Installed(tmp_path / "venv"), tmp_path / "image"
    venv.create(environment.folder, symlinks=True, with_pip=True)
    checkout = tmp_path / "checkout"
    from_checkout(checkout)
    variables, ran, entry = {"PATH": f"{environment.folder}/bin:/usr/bin:/bin"}, 0, ""
    for instruction, text in _instructions():
        match instruction:
            case "FROM":
                assert text == "python:3.11-slim"
            case "WORKDIR":
                workdir = place / text.lstrip("/")
                workdir.mkdir(parents=True, exist_ok=True)
            case "ARG":
                name, _, value = text.partition("=")
                variables[name] = value
            case "COPY":
                *sources, target = text.split()
                for source in sources:
                    _copy(checkout, source, workdir / target)
            case "RUN":
                subprocess.run(
                    ["/bin/sh", "-c", text], cwd=workdir, check=True, capture_output=True,
                    env=clean(**variables),
                )  # fmt: skip
                ran += 1
            case "ENV" | "CMD":
                continue
            case "ENTRYPOINT":
                (entry,) = json.loads(text)
            case _:
                raise AssertionError(f"{instruction}: what it does is not tried here")
    assert ran
    done = environment.run(entry, "validate", "fp8", "--level", "full", folder=sample)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("0 errors, 0 warnings\n")
    assert not {path.name for path in environment.packages.iterdir()} & EXTRAS_PACKAGES


def _copy(checkout: Path, source: str, target: Path) -> None:
    """What COPY does of what .dockerignore leaves: a folder's content, a file into a folder."""
    found = checkout / source
    files = [file for file in (found, *found.rglob("*")) if file.is_file()]
    sent = [file for file in files if _is_sent(str(file.relative_to(checkout)))]
    assert sent, source
    for file in sent:
        within = file.relative_to(found) if found.is_dir() else Path(file.name)
        (target / within).parent.mkdir(parents=True, exist_ok=True)
        (target / within).write_bytes(file.read_bytes())


def test_dockerignore_leaves_little() -> None:
    assert _is_sent("qconvert/core/extras.py")
    assert _is_sent("pyproject.toml")
    for name in ("tests/test_wheel.py", ".git/HEAD", ".venv/bin/python", "bench.json"):
        assert not _is_sent(name)
    assert not _is_sent("qconvert/core/__pycache__/extras.cpython-311.pyc")
