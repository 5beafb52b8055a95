"""Versions of other projects: stated once, and the same wherever pages and requirements repeat them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from qconvert.core.versions import RELEASES, comes_before, is_of_series, is_release, is_version

_ROOT = Path(__file__).parent.parent
_PAGES = [
    *sorted((_ROOT / "docs").rglob("*.md")),
    *sorted((_ROOT / "qconvert/cli").glob("*.py")),
    *sorted((_ROOT / "qconvert/service").glob("*.py")),
    *(_ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "action.yml")),
    _ROOT / "qconvert/validators/RULES.md",
]
_NUMBER = r"(?:==|\s+(?:#\s+)?|,\s|\s\()(\d+(?:\.\d+)+)"


def _stated(text: str) -> list[tuple[str, str]]:
    """Each version that stands behind a project's name: the project as packages name it, and the
    version."""
    return [
        (package, number)
        for package, release in RELEASES.items()
        for number in re.findall(rf"(?i)(?<![\w/])(?:{release.name}|{package}){_NUMBER}", text)
    ]


# Help has examples, which state the versions of pages.
_EXAMPLES = ("cli", "service")


def test_a_version_is_stated_in_one_product_file() -> None:
    numbers = {release.version for release in RELEASES.values()}
    numbers |= {release.series for release in RELEASES.values()}
    numbers |= {one for release in RELEASES.values() for one in release.earlier}
    found = {
        path.name: hits
        for path in sorted((_ROOT / "qconvert").rglob("*.py"))
        if path.relative_to(_ROOT / "qconvert").parts[0] not in _EXAMPLES
        and (
            hits := [one for one in _stated(path.read_text(encoding="utf-8")) if one[1] in numbers]
        )
    }
    # The plug-in runs in sglang's environment, where there is no qconvert to import.
    assert found.keys() <= {"versions.py", "sglang_plugin.py"}, found


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_pages_state_the_same(page: Path) -> None:
    for package, number in _stated(page.read_text(encoding="utf-8")):
        release = RELEASES[package]
        earlier = [replace(release, version=one).series for one in release.earlier]
        known = (release.version, release.series, *release.earlier, *earlier)
        assert number in known, (package, number)


def test_what_is_installed_to_compare_with_is_the_same() -> None:
    files = [*_ROOT.glob("requirements-*.txt"), _ROOT / "pyproject.toml"]
    # vLLM's environment has the compressed-tensors that it pins; the newest transformers is for classes;
    # earlier releases are compared by hand (test_earlier_releases.py).
    texts = [
        one.read_text(encoding="utf-8")
        for one in files
        if one.name
        not in (
            "requirements-loaders-vllm.txt",
            "requirements-newest.txt",
            "requirements-older.txt",
            "requirements-older-vllm-wheel.txt",
            "requirements-served.txt",
        )
    ]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", "\n".join(texts), re.MULTILINE))
    lowest = dict(re.findall(r'"([\w-]+)>=([\d.]+)', "\n".join(texts)))
    lowest["huggingface_hub"] = lowest["huggingface-hub"]
    for package, release in RELEASES.items():
        assert is_release(pinned.get(package) or lowest[package], release.version), package


@pytest.mark.parametrize("text", ["5.17", "0.5.23rc1", "5.17.0.dev0", "0.33.0+cpu", "v1"])
def test_versions_of_packages(text: str) -> None:
    assert is_version(text)
    assert not is_version(f"{text} ")


@pytest.mark.parametrize(
    ("version", "release", "series"),
    [("0.33.0", True, True), ("0.33", True, True), ("0.33.1", False, True),
     ("0.33.0rc1", False, False), ("0.33.0+cpu", True, True), ("0.3", False, False),
     ("banana", False, False)],
)  # fmt: skip
def test_a_release_and_its_series(version: str, release: bool, series: bool) -> None:
    assert is_release(version, "0.33.0") == release
    assert is_of_series(version, "0.33") == series


@pytest.mark.parametrize(
    ("version", "release", "before"),
    [
        ("0.32.0", "0.33", True),
        ("0.33.0", "0.33", False),
        ("0.9", "0.33", True),
        ("1", "0.33", False),
    ],
)
def test_releases_in_order(version: str, release: str, before: bool) -> None:
    assert comes_before(version, release) == before
