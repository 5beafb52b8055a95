"""YAML read so that a complaint can name a line. A misspelt key that is ignored makes wrong files."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from qconvert.core.errors import RecipeError

Path = tuple[str | int, ...]


def compose(text: str, name: str) -> Any:
    """A document's root node. `name` stands in messages. Raises RecipeError."""
    import yaml

    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise not_yaml(error, name) from error


def not_yaml(error: Exception, name: str) -> RecipeError:
    """In one line: what YAML's own message says in five."""
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark is not None else ""
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return RecipeError(f"{name}{line}: not valid YAML: {problem}")


def line_of(node: Any) -> int:
    """A node's line, counted from 1."""
    return int(node.start_mark.line) + 1


def entries(node: Any, name: str) -> Iterable[tuple[Any, Any]]:
    """A mapping's keys and values as nodes. Raises RecipeError for a key that is no word, or that is
    given twice."""
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key.value, str):
            raise RecipeError(f"{name}:{line_of(key)}: a key must be a word")
        if key.value in seen:
            raise RecipeError(f"{name}:{line_of(key)}: {key.value!r} is given twice")
        seen.add(key.value)
        yield key, value


def construct(node: Any, name: str) -> Any:
    """A node's plain value. Raises RecipeError for a tag that safe YAML does not have."""
    import yaml

    try:
        return yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError as error:
        raise not_yaml(error, name) from error


def lines_of(node: Any, name: str) -> Mapping[Path, int]:
    """The line of every key and item below a node, by its path. Raises RecipeError as `entries` does,
    and where a node is part of itself."""
    import yaml

    found: dict[Path, int] = {(): line_of(node)}
    open_nodes: set[int] = set()

    def walk(at: Any, path: Path) -> None:
        if id(at) in open_nodes:
            raise RecipeError(f"{name}:{line_of(at)}: an alias must not stand inside what it names")
        open_nodes.add(id(at))
        if isinstance(at, yaml.MappingNode):
            for key, value in entries(at, name):
                found[(*path, key.value)] = line_of(key)
                walk(value, (*path, key.value))
        elif isinstance(at, yaml.SequenceNode):
            for number, value in enumerate(at.value):
                found[(*path, number)] = line_of(value)
                walk(value, (*path, number))
        open_nodes.discard(id(at))

    walk(node, ())
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
