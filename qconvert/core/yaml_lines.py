"""The only reader of YAML. It keeps line numbers, so that a message can name one: a misspelt key that is
ignored makes wrong files. Depth, numbers and alias expansion are bounded, whoever wrote the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qconvert.core.errors import QConvertError, RecipeError

Path = tuple[str | int, ...]

MOST_BYTES = 1 << 20  # of a recipe, or of a card's front matter
MOST_DEEP = 64
MOST_NODES = 50_000  # with aliases expanded
_LARGEST = 10**100
# Errors that PyYAML raises for invalid values: dates in month 13, `!!int x`, `!!bool maybe`,
# integers of more digits than Python converts.
_OF_VALUES = (ValueError, OverflowError, LookupError, AttributeError)


def compose(
    text: str, name: str, *, loader: Any = None, error: type[QConvertError] = RecipeError
) -> Any:
    """A document's root node, None if it is empty. `name` is used in messages, `loader` may replace
    PyYAML's safe one. Raises `error` for invalid YAML, or beyond the bounds above."""
    import yaml

    if len(text) > MOST_BYTES:
        raise error(f"{name}: expected at most {MOST_BYTES} characters of YAML, found {len(text)}")

    class Bounded(loader or yaml.SafeLoader):  # type: ignore[misc]
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            # The scanner's work grows with the square of the depth, so it is stopped while it runs.
            self.depth += 1
            if self.depth > MOST_DEEP:
                line = self.peek_event().start_mark.line + 1
                raise error(f"{name}:{line}: nested too deep; expected at most {MOST_DEEP} levels")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        reader = Bounded(text)
        try:
            root = reader.get_single_node()
        finally:
            reader.dispose()
    except yaml.YAMLError as failure:
        raise not_yaml(failure, name, error) from failure
    except _OF_VALUES as failure:  # a tag with an invalid escape, a version of 5,000 digits
        raise error(f"{name}: not valid YAML: {_first_line(failure)}") from failure
    if root is not None:
        _weigh(root, name, {}, set(), error)
    return root


def load(
    text: str, name: str, *, loader: Any = None, error: type[QConvertError] = RecipeError
) -> Any:
    """A document's plain value. Raises as `compose` and `construct` do."""
    node = compose(text, name, loader=loader, error=error)
    return None if node is None else construct(node, name, loader=loader, error=error)


def _weigh(
    node: Any,
    name: str,
    known: dict[int, tuple[int, int]],
    above: set[int],
    error: type[QConvertError],
) -> tuple[int, int]:
    """Return how many nodes a node is and how deep, with aliases expanded. An anchor comes before its
    aliases, so the target of an alias is already measured and this recurses no deeper than the text."""
    if id(node) in known:
        return known[id(node)]
    if id(node) in above:
        raise error(f"{name}:{line_of(node)}: an alias must not be inside its own anchor")
    above.add(id(node))
    size, depth = 1, 1
    if isinstance(node.value, list):
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                more, below = _weigh(part, name, known, above, error)
                size, depth = size + more, max(depth, below + 1)
    above.discard(id(node))
    if size > MOST_NODES or depth > MOST_DEEP:
        what = (
            f"is more than {MOST_NODES} values with its aliases expanded; write fewer"
            if size > MOST_NODES
            else f"is nested too deep with its aliases expanded; expected at most {MOST_DEEP} levels"
        )
        raise error(f"{name}:{line_of(node)}: {what}")
    known[id(node)] = size, depth
    return size, depth


def not_yaml(
    failure: Exception, name: str, error: type[QConvertError] = RecipeError
) -> QConvertError:
    """PyYAML's five-line message in one line."""
    mark = getattr(failure, "problem_mark", None)
    line = f":{mark.line + 1}" if mark is not None else ""
    problem = getattr(failure, "problem", None) or _first_line(failure)
    return error(f"{name}{line}: not valid YAML: {problem}")


def _first_line(failure: Exception) -> str:
    said = str(failure).partition("\n")[0]
    if said.startswith("Exceeds the limit"):  # Python's advice is for programmers
        return "an integer of thousands of digits"
    return said or type(failure).__name__


def line_of(node: Any) -> int:
    """A node's line, counted from 1."""
    return int(node.start_mark.line) + 1


def entries(node: Any, name: str) -> Iterable[tuple[Any, Any]]:
    """A mapping's keys and values as nodes. Raises RecipeError for a key that is not a string, or that
    is given twice."""
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key.value, str):
            raise RecipeError(f"{name}:{line_of(key)}: a key must be a string")
        if key.value in seen:
            raise RecipeError(f"{name}:{line_of(key)}: {key.value!r} is given twice")
        seen.add(key.value)
        yield key, value


def construct(
    node: Any, name: str, *, loader: Any = None, error: type[QConvertError] = RecipeError
) -> Any:
    """A node's plain value. Raises `error` for a tag that safe YAML does not have, a value that is
    invalid for its type, and integers of more than 100 digits."""
    import yaml

    try:
        value = (loader or yaml.SafeLoader)("").construct_document(node)
    except yaml.YAMLError as failure:
        raise not_yaml(failure, name, error) from failure
    except _OF_VALUES as failure:
        said = _first_line(failure)
        raise error(f"{name}:{line_of(node)}: not valid YAML: {said}") from failure
    _check_integers(value, f"{name}:{line_of(node)}", error)
    return value


def _check_integers(value: Any, where: str, error: type[QConvertError]) -> None:
    """The value is as deep and as large as its nodes, which are bounded."""
    if type(value) is int and not -_LARGEST < value < _LARGEST:
        raise error(f"{where}: expected integers of at most 100 digits, found a longer one")
    if isinstance(value, dict):
        for key, one in value.items():
            _check_integers(key, where, error)
            _check_integers(one, where, error)
    elif isinstance(value, list | tuple | set):
        for one in value:
            _check_integers(one, where, error)


def lines_of(node: Any, name: str) -> Mapping[Path, int]:
    """The line of every key and item below a node, by its path. Raises RecipeError as `entries` does."""
    import yaml

    found: dict[Path, int] = {(): line_of(node)}

    def walk(at: Any, path: Path) -> None:
        if isinstance(at, yaml.MappingNode):
            for key, value in entries(at, name):
                found[(*path, key.value)] = line_of(key)
                walk(value, (*path, key.value))
        elif isinstance(at, yaml.SequenceNode):
            for number, value in enumerate(at.value):
                found[(*path, number)] = line_of(value)
                walk(value, (*path, number))

    walk(node, ())
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing if no known word is close."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
