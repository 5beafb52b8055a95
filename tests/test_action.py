"""action.yml: its steps' shell lines, run in order as GitHub runs a composite action's, against a Hub on
the loopback. Installing is done by links instead of pip, which tests/test_wheel.py tries."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from built import from_checkout
from checkpoints import convert, edit_json, tree
from light_install import EXTRAS_PACKAGES, clean, light_python
from loaders.published import published
from loopback_hub import TOKEN, LoopbackHub, loopback_hub

_ROOT = Path(__file__).parent.parent
_ACTION: dict[str, Any] = yaml.safe_load((_ROOT / "action.yml").read_text(encoding="utf-8"))
_STEPS: list[dict[str, Any]] = _ACTION["runs"]["steps"]
_REPO, _FP8 = "org/converted", "org/fp8"
# What a step that installs runs, in place of a fetch.
_INSTALL = '"$PLACE/bin/python" -I -m pip install --quiet --disable-pip-version-check "$SOURCE"\n'


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    """A sound repo, and one whose config counts a layer too many."""
    folder = tmp_path_factory.mktemp("action")
    source = published("qwen3_moe").write(folder / "source")
    convert("copy", source, folder / "made")
    with loopback_hub() as server:
        server.add(_REPO, _files(folder / "made"))
        server.add(_FP8, _files(published("qwen3_moe", fp8=True).write(folder / "fp8")))
        edit_json(folder / "made" / "config.json", lambda c: c.update(num_hidden_layers=3))
        server.add("org/broken", _files(folder / "made"))
        yield server


def _files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(folder).items() if isinstance(data, bytes)}


def _filled(text: str, values: Mapping[str, str]) -> str:
    """With its expressions replaced, each of which must be known."""
    return re.sub(r"\$\{\{ *(.+?) *\}\}", lambda match: values[match[1]], text)


def _run(tmp_path: Path, hub: LoopbackHub, **inputs: str) -> tuple[int, str, dict[str, str], str]:
    """The action's exit code, what its steps printed, its outputs and the job's summary."""
    runner = tmp_path / "runner"
    runner.mkdir()
    output, summary = runner / "output", runner / "summary"
    output.touch()
    values = {"github.action_path": str(_ROOT), "runner.temp": str(runner)}
    for name, about in _ACTION["inputs"].items():
        values[f"inputs.{name}"] = inputs.get(name, about.get("default", ""))
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(runner), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1", "GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": str(output),
        "GITHUB_STEP_SUMMARY": str(summary), "LANG": "C.UTF-8",
    }  # fmt: skip
    said, code = "", 0
    for step in _STEPS:
        if "run" not in step:
            continue
        lines = step["run"]
        if step["name"] == "Install":
            assert _INSTALL in lines
            light_python(runner / "qconvert")
            _script(runner / "qconvert")
            lines = lines.replace(_INSTALL, "").replace("python -I -m venv", "test -d")
        own = {name: _filled(value, values) for name, value in step.get("env", {}).items()}
        file = runner / "step.sh"
        file.write_text(lines)
        done = subprocess.run(  # as a runner calls `shell: bash`
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", file],
            cwd=tmp_path, env=environment | own, capture_output=True, text=True, check=False,
        )  # fmt: skip
        said, code = said + done.stdout + done.stderr, done.returncode
        if code:
            break
    pairs = (line.partition("=") for line in output.read_text().splitlines())
    outputs = {name: value for name, _, value in pairs}
    return code, said, outputs, summary.read_text() if summary.exists() else ""


def _script(place: Path) -> None:
    """The console script that pip would write."""
    script = place / "bin" / "qconvert"
    script.write_text(f"#!{place}/bin/python\nfrom qconvert.__main__ import main\nmain()\n")
    script.chmod(0o755)


def test_a_sound_repo_passes(hub: LoopbackHub, tmp_path: Path) -> None:
    code, said, outputs, summary = _run(tmp_path, hub, repo=_REPO)
    assert code == 0, said
    assert outputs == {"sarif": "qconvert.sarif", "errors": "0"}
    assert "Validation passed" in summary
    runs = json.loads((tmp_path / "qconvert.sarif").read_text())["runs"]
    assert runs[0]["results"] == []
    assert TOKEN not in said + summary
    files = hub.repos[_REPO].tree().values()
    assert max(len(blob.data) for blob in files) > 5_000_000
    assert sum(asked.sent for asked in hub.asked("GET", "/resolve/|/cdn/")) < 500_000


def test_a_broken_repo_fails_with_annotations(hub: LoopbackHub, tmp_path: Path) -> None:
    code, said, outputs, summary = _run(tmp_path, hub, repo="org/broken", sarif="a b.sarif")
    assert code == 3, said
    assert "::error " in said
    assert outputs["sarif"] == "a b.sarif"
    assert int(outputs["errors"]) > 0
    results = json.loads((tmp_path / "a b.sarif").read_text())["runs"][0]["results"]
    assert len([one for one in results if one["level"] == "error"]) == int(outputs["errors"])
    assert "Validation failed" in summary


def test_a_runtime_is_asked(hub: LoopbackHub, tmp_path: Path) -> None:
    asked = {"repo": _REPO, "for": "sglang==0.5.23", "tp": "2"}
    code, said, outputs, summary = _run(tmp_path, hub, **asked)
    assert (code, outputs["errors"]) == (0, "0"), said
    assert "sglang 0.5.23 at tp 2" in summary
    (tmp_path / "more").mkdir()
    code, said, *_ = _run(tmp_path / "more", hub, **{**asked, "repo": _FP8, "tp": "8"})
    assert code == 3
    assert "QC130" in said


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({"repo": "org/nosuch"}, 1),
        ({"repo": "--kernels"}, 1),
        ({"repo": _REPO, "tp": "2; touch pwned"}, 2),
        ({"repo": _REPO, "for": "$(touch pwned)"}, 2),
        ({"repo": "`touch pwned`/x"}, 1),
    ],
)
def test_inputs_are_no_code(
    inputs: dict[str, str], code: int, hub: LoopbackHub, tmp_path: Path
) -> None:
    found, said, outputs, _ = _run(tmp_path, hub, **inputs)
    assert found == code, said
    assert outputs == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runner"]


@pytest.mark.rest
def test_its_install_line_installs_the_light_package(tmp_path: Path) -> None:
    """For real, by pip, of a checkout."""
    (step,) = (step for step in _STEPS if step.get("name") == "Install")
    from_checkout(tmp_path / "checkout")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path, env=clean(SOURCE=str(tmp_path / "checkout"), PLACE=str(tmp_path / "place")),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("qconvert, version ")
    held = {path.name for path in tmp_path.glob("place/lib/python*/site-packages/*")}
    assert {"qconvert", "numpy"} <= held
    assert not held & EXTRAS_PACKAGES


def test_shell_lines_take_inputs_from_the_environment_alone() -> None:
    for step in _STEPS:
        assert "${{" not in step.get("run", "")
    given = {f"inputs.{name}" for name in _ACTION["inputs"]}
    used = set(re.findall(r"inputs\.[\w-]+", json.dumps(_ACTION["runs"])))
    assert used == given
    for about in _ACTION["outputs"].values():
        assert about["value"].startswith("${{ steps.validate.outputs.")


def test_the_page_shows_inputs_that_it_has() -> None:
    page = (_ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    steps = yaml.safe_load(text)["jobs"]["headers"]["steps"]
    (step,) = [step for step in steps if "qconvert@" in step["uses"]]
    assert set(step["with"]) <= set(_ACTION["inputs"])
    assert _ACTION["inputs"]["repo"]["required"] is True
    assert "repo" in step["with"]
    used = set(re.findall(r"steps\.qconvert\.outputs\.(\w+)", text))
    assert used <= set(_ACTION["outputs"])
