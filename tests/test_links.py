"""Relative links and anchors of every page lead somewhere, in the repository and on the site: what
`mkdocs build --strict` finds (make docs), without mkdocs."""

from __future__ import annotations

import importlib.util
import posixpath
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from qconvert import api

_ROOT = Path(__file__).parent.parent
_OTHER = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md",
          "benchmarks/README.md", "validators/RULES.md")  # fmt: skip
PAGES = [*_OTHER, *sorted(str(file.relative_to(_ROOT)) for file in (_ROOT / "docs").rglob("*.md"))]


def _site() -> ModuleType:
    """docs/site_pages.py, which mkdocs loads by its path too."""
    spec = importlib.util.spec_from_file_location("site_pages", _ROOT / "docs" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = _site()


def _text(page: str) -> str:
    return (_ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_of_the_repository(page: str) -> None:
    for path, anchor in site.links(_text(page)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        assert (_ROOT / target).exists(), (path, anchor)
        if anchor:
            assert target.endswith(".md"), target
            assert anchor in site.anchors(_text(target)), (path, anchor)


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_site(page: str) -> None:
    """Moved to where the site has its page, a link leads to a page or a copied file of the site."""
    known = {
        *site.OUTSIDE.values(),
        site.COMMANDS,
        site.PASSES,
        *(name[5:] for name in PAGES if name[:5] == "docs/"),
    }
    copied: set[str] = set()
    home = posixpath.dirname(page[5:]) if page[:5] == "docs/" else ""
    for link, _ in site.links(site.moved(_text(page), page, copied)):
        path = posixpath.normpath(posixpath.join(home, link)) if link else ""
        local = (_ROOT / "docs" / path).is_file() and not path.startswith("..")
        assert not path or path in known or local or path.removeprefix("files/") in copied, path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](../README.md) [b](../nowhere/at/all.py)", "nowhere"),
        ("![a](../no.png)", "no.png"),
    ],
)
def test_a_broken_link_is_found(text: str, said: str) -> None:
    targets = [posixpath.normpath(posixpath.join("docs", path)) for path, _ in site.links(text)]
    assert not all((_ROOT / target).exists() for target in targets)
    if "../" in text:
        with pytest.raises(ValueError, match=said):
            site.moved(text, "docs/page.md")


def test_anchors_are_githubs() -> None:
    text = "# FP8 & `scales`: [of](x) blocks\n```\n# no heading\n```\n## QC015: a, b\n"
    assert site.anchors(text) == {"fp8--scales-of-blocks", "qc015-a-b"}


def test_code_is_left_alone() -> None:
    text = "[a](../README.md)\n```sh\n[a](../README.md)\n```\n"
    assert site.moved(text, "docs/a.md") == "[a](index.md)\n```sh\n[a](../README.md)\n```\n"


class _Settings(yaml.SafeLoader):
    """mkdocs.yml, without the Python objects that it names."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def test_the_site_has_every_page() -> None:
    settings = yaml.load((_ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Settings)
    listed = [page for part in settings["nav"] for pages in part.values() for page in pages]
    own = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(listed) == sorted(
        [*own, *site.OUTSIDE.values(), site.COMMANDS, site.PASSES, site.API]
    )
    assert settings["validation"] == dict.fromkeys(settings["validation"], "warn")
    for hook in (*settings["hooks"], *(f"docs/{name}" for name in settings["extra_css"])):
        assert (_ROOT / hook).is_file()


def test_the_page_of_commands_has_every_command_and_option() -> None:
    page = site.all_commands()
    for command in ("validate", "mtp extract", "experts stack", "prepare trtllm-gen"):
        assert f"\n## qconvert {command}\n" in page
    assert "--max-shard-size SIZE" in page
    assert page.count("```") == 2 * page.count("\n## ")


def test_the_page_of_names_has_every_name() -> None:
    page = site.all_names()
    assert [name for name in api.__all__ if f"\n## {name}\n" not in page] == []
    assert "\nvalidate(\n    folder: " in page
    assert max(map(len, page.splitlines())) < 130


def test_the_site_is_ignored_by_git() -> None:
    command = ["git", "check-ignore", "build/site/index.html", ".venv-docs/bin/mkdocs"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == command[2:]


def test_make_builds_it_strictly() -> None:
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"mkdocs build --strict$", makefile, re.MULTILINE)
    run = (_ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^make .*\bdocs\b", run, re.MULTILINE)
