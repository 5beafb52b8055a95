"""What the site (mkdocs.yml) has beside the files of docs/: pages that lie elsewhere in the repository,
pages of all commands and of the API's names, which are made from the code, and links that lead from one
to the other."""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # what a test of links has no need of
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# Pages of the site, all in one folder, by the file that they are made from.
OUTSIDE = {
    "README.md": "index.md",
    "validators/RULES.md": "rules.md",
    "benchmarks/README.md": "benchmarks.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
COMMANDS, PASSES, API = "all-commands.md", "all-passes.md", "api.md"
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def links(text: str) -> Iterator[tuple[str, str]]:
    """Relative links of a page, as path and anchor ("" if there is none), outside of code; the path is
    "" for a link within the page."""
    for target in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", _FENCE.sub("", text)):
        path, _, anchor = target.partition("#")
        yield path, anchor


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.+?) *$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def moved(text: str, at: str, files: set[str] | None = None) -> str:
    """A page of the repository, `at` its path there, with its links as they are on the site. Files that
    are no page are noted in `files`: they are copied. Raises ValueError for a link to neither."""

    home = posixpath.dirname(at.removeprefix("docs/")) if at.startswith("docs/") else ""

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(at), match[1]))
        anchor = match[2] or ""
        page = OUTSIDE.get(path) or (
            path.removeprefix("docs/") if path.startswith("docs/") else None
        )
        if page is not None:
            return posixpath.relpath(page, home or ".") + anchor
        if not (ROOT / path).is_file():
            raise ValueError(f"{at}: the site has no page or file for the link to {match[1]}")
        if files is not None:
            files.add(path)
        return posixpath.relpath(f"files/{path}", home or ".")

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if n % 2 else _LINK.sub(target, part) for n, part in enumerate(parts))


def all_commands() -> str:
    """Every command's help, as --help-all shows it."""
    from qconvert.cli.command import EVERY
    from qconvert.cli.main import cli

    said = "The help of every command and all its options, written from the code."
    lines = ["# All commands", "", f"{said} [Examples of each](commands.md)."]
    root = click.Context(cli, info_name="qconvert", terminal_width=100, **cli.context_settings)
    for context in _contexts(cli, root):
        context.meta[EVERY] = True
        # A group is formatted by its context's settings, which the root's parent would hand down.
        lines += ["", f"## {context.command_path}", "", "```text", context.get_help(), "```"]
    return "\n".join(lines) + "\n"


def _contexts(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(command, click.Group):
        for name, inner in sorted(command.commands.items()):
            if not inner.hidden:
                yield from _contexts(inner, click.Context(inner, parent=context, info_name=name))


def all_passes() -> str:
    """Every pass with its options, as `qconvert recipes passes NAME` prints them."""
    from qconvert.passes import passes
    from qconvert.recipe.described import described

    said = "What a recipe's steps may be, and their options, written from the code."
    lines = ["# All passes", "", f"{said} [Recipes](commands.md#recipes)."]
    for name, kind in sorted(passes().items()):
        lines += ["", f"## {name}", "", "```text", *described(kind), "```"]
    return "\n".join(lines) + "\n"


def all_names() -> str:
    """Every name of `qconvert.api`, with its signature and its docstring."""
    from qconvert import api

    lines = [
        "# Names of qconvert.api",
        "",
        "Written from the code. [How they are used](python.md).",
    ]
    for name in api.__all__:
        found = getattr(api, name)
        documented = inspect.getdoc(found) or ""
        try:
            signature = f"{name}{inspect.signature(found)}"
        except (TypeError, ValueError):  # a type's other name, or one that takes nothing
            signature = name
        lines += ["", f"## {name}", "", "```python", _wrapped(signature), "```"]
        lines += ["", "```text", documented, "```"]
    return "\n".join(lines) + "\n"


def _wrapped(signature: str) -> str:
    """One parameter a line, where a line is too short for all."""
    if len(signature) <= 96:
        return signature
    name, _, rest = signature.partition("(")
    inner, _, result = rest.rpartition(")")
    parts, depth, part = [], 0, ""
    for letter in inner:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return "\n".join([f"{name}(", *(f"    {p}," for p in [*parts, part.strip()]), f"){result}"])


# --- What mkdocs calls ----------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that do not lie in docs/."""
    from mkdocs.structure.files import File

    def add(uri: str, **content: Any) -> None:
        files.append(File.generated(config, uri, **content))

    copied: set[str] = set()
    for source, uri in OUTSIDE.items():
        add(uri, content=moved((ROOT / source).read_text(encoding="utf-8"), source, copied))
    for page in files.documentation_pages():
        if page.abs_src_path is not None and page.generated_by is None:
            moved(
                Path(page.abs_src_path).read_text(encoding="utf-8"), f"docs/{page.src_uri}", copied
            )
    add(COMMANDS, content=all_commands())
    add(PASSES, content=all_passes())
    add(API, content=all_names())
    for name in sorted(copied):
        add(f"files/{name}", content=(ROOT / name).read_bytes())
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A page of docs/, its links as they are on the site."""
    if page.file.generated_by is not None:
        return markdown
    return moved(markdown, f"docs/{page.file.src_uri}")
