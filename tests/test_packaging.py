"""What installs: the rooms at the top of the repository, and the command."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built by way of an sdist, as a release is. Building in the checkout would leave
    build/ behind, which then shadows sources, so a copy is built."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=_ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [name for name in listed.stdout.splitlines() if (_ROOT / name).exists()]
    subprocess.run(["tar", "-cf", str(folder / "tree.tar"), *names], cwd=_ROOT, check=True)
    tree = folder / "tree"
    tree.mkdir()
    subprocess.run(["tar", "-xf", str(folder / "tree.tar"), "-C", str(tree)], check=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)],
        check=True, capture_output=True,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_room(wheel: zipfile.ZipFile) -> None:
    """A clone with core.symlinks=false would build one without layouts, in silence."""
    packed = set(wheel.namelist())
    for room in ("layouts", "validators", "recipes"):
        files = [f for f in (_ROOT / room).iterdir() if f.suffix in (".py", ".yaml")]
        assert len(files) > 1
        assert {f"qconvert/{room}/{file.name}" for file in files} <= packed
    sources = {
        path.relative_to(_ROOT).as_posix()
        for path in (_ROOT / "qconvert").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert sources <= packed


def test_the_wheel_holds_nothing_else_at_its_top(wheel: zipfile.ZipFile) -> None:
    """PyPI's `validators` owns that import name."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qconvert"}


def test_the_wheel_works_alone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import qconvert;"
        "assert qconvert.__file__.startswith(sys.argv[1]), qconvert.__file__;"
        "from qconvert.checkpoint.family import families; from qconvert.recipe.recipe import builtin_recipes;"
        "from qconvert.validation.runner import validators;"
        "print(len(families()), len(builtin_recipes()), len(validators()))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert all(int(count) >= 3 for count in done.stdout.split())
