"""What installs: every module of the package and the files it reads, whatever way the source came."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from built import ROOT, built, from_checkout, tracked

_DATA = (".py", ".json", ".yaml", ".css", ".js", ".typed", "RULES.md")


def _packaged() -> set[str]:
    """Files of the package that a wheel must hold."""
    return {
        name for name in tracked() if name.startswith("qconvert/") and name.endswith(_DATA)
    }  # fmt: skip


def _without_links(tree: Path) -> None:
    """A checkout with core.symlinks=false: a link is a text file that holds its target."""
    for name in tracked():
        file = tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            file.write_text(str((ROOT / name).readlink()))
        else:
            file.write_bytes((ROOT / name).read_bytes())


def _from_archive(tree: Path) -> None:
    """The zip that a forge offers of a commit, extracted by what keeps no links. It holds what is
    committed, so files that differ from the commit are written over it."""
    packed = subprocess.run(
        ["git", "archive", "--format=zip", "HEAD"], cwd=ROOT, capture_output=True, check=True
    )
    zipfile.ZipFile(io.BytesIO(packed.stdout)).extractall(tree)
    changed = subprocess.run(
        ["git", "diff", "--name-only", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    other = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in (changed.stdout + other.stdout).splitlines():
        (tree / name).unlink(missing_ok=True)
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built by way of an sdist, as a release is, from a checkout without links."""
    made = built(_without_links, tmp_path_factory.mktemp("wheel"))
    assert [file.suffix for file in made] == [".whl", ".gz"]
    return zipfile.ZipFile(made[0])


def _held(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


@pytest.mark.big
def test_a_checkout_without_links_builds_the_whole_package(wheel: zipfile.ZipFile) -> None:
    assert len(_packaged()) > 200
    assert _held(wheel) == _packaged()


@pytest.mark.big
@pytest.mark.parametrize("make", [from_checkout, _from_archive])
def test_a_checkout_and_a_zip_build_the_whole_package(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    (made,) = built(make, tmp_path, "--wheel")
    assert _held(zipfile.ZipFile(made)) == _packaged()


def test_the_package_holds_no_link() -> None:
    """Builds from a zip, and on systems without links, leave them out in silence."""
    assert [path for path in (ROOT / "qconvert").rglob("*") if path.is_symlink()] == []


@pytest.mark.parametrize("name", ["layouts", "recipes", "validators"])
def test_links_at_the_top_lead_inside(name: str) -> None:
    assert (ROOT / name).readlink() == Path("qconvert") / name


@pytest.mark.big
def test_the_wheel_works_alone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The demo converts and validates with every family, pass, recipe and validator from the wheel."""
    wheel.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import qconvert;"
        "assert qconvert.__file__.startswith(sys.argv[1]), qconvert.__file__;"
        "from qconvert.core.family import families;"
        "from qconvert.recipe.recipe import builtin_recipes;"
        "from qconvert.validation.runner import validators;"
        "print(len(families()), len(builtin_recipes()), len(validators()));"
        "from qconvert.cli.main import main; main(['demo'])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    first = done.stdout.splitlines()[0]
    assert all(int(count) >= 3 for count in first.split())
    assert "0 errors, 0 warnings" in done.stdout
    assert "equal torch's own decoding, bit for bit" in done.stdout


def test_workflows_and_citation_are_of_this_package() -> None:
    """The oldest Python is tested, steps are targets of the Makefile, and the line that compares a tag
    with the version does."""
    import qconvert

    folder = ROOT / ".github" / "workflows"
    found = {
        file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in folder.iterdir()
    }
    pythons = found["test"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={pythons[0]}"
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for job in found["test"]["jobs"].values():
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert runs
        assert all(f"\n{run.removeprefix('make ')}: " in targets for run in runs)
    steps = found["release"]["jobs"]["build"]["steps"]
    (check,) = (step["run"] for step in steps if step.get("name") == "The tag is the version")
    for tag, code in ((f"v{qconvert.__version__}", 0), ("v0.0.9", 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        words = ["bash", "-c", check.replace("python -I", f"{sys.executable} -I")]
        assert subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode == code
    assert found["release"]["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (qconvert.__version__, project["license"])
