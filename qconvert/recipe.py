"""Recipes: a conversion as a short YAML file, strict to the last key.

    # For whom, and why.
    passes:
      - dequant
      - drop: {what: mtp}
    max_shard_size: 5GB

A pass is its name, or its name with options; a pass's fields are its schema. An unknown key is an
error with its line and the key that was probably meant: a misspelt option that is ignored is how
wrong checkpoints are made.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from qconvert.errors import RecipeError
from qconvert.passes import passes
from qconvert.plan import Pass

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")
_KEYS = ("passes", "max_shard_size")


@dataclass(frozen=True)
class Recipe:
    """Passes in order, and the largest shard in bytes (None: the default). `name` is for people."""

    name: str
    passes: tuple[Pass, ...]
    max_shard_size: int | None = None

    def to_yaml(self) -> str:
        """The recipe as a file for `qconvert run`. Options at their defaults are left out."""
        import yaml

        body: dict[str, Any] = {"passes": [_spell(step) for step in self.passes]}
        if self.max_shard_size is not None:
            body["max_shard_size"] = self.max_shard_size
        return yaml.safe_dump(body, sort_keys=False)


def _spell(step: Pass) -> Any:
    options = {
        field.name: getattr(step, field.name)
        for field in fields(step)  # type: ignore[arg-type]
        if getattr(step, field.name) != field.default
    }
    return {step.name: options} if options else step.name


def parse_size(text: str | int) -> int:
    """`5GB` (10^9), `512MiB` (2^20), `4096` -> bytes. Raises RecipeError for anything else."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or match[2].upper() not in _UNITS:
        raise RecipeError(f"{text!r} is not a size; write 5GB, 512MiB or a number of bytes")
    size = int(Fraction(match[1]) * _UNITS[match[2].upper()])  # exact, where a float is not
    if size < 1:
        raise RecipeError(f"{text!r} is not a size: it must be at least one byte")
    return size


def format_size(size: float) -> str:
    """Bytes in decimal units with three figures or so, as disks and repos are sold: `688.6 GB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def builtin_recipes() -> dict[str, str]:
    """Name -> text of every recipe that comes with qconvert."""
    found = {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in package_files("qconvert.recipes").iterdir()
        if entry.name.endswith(".yaml")
    }
    return dict(sorted(found.items()))


def load_recipe(where: str) -> Recipe:
    """A recipe by file or built-in name. Raises RecipeError, with the line where there is one."""
    try:
        text = Path(where).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where}: is not UTF-8 text: {error}") from error
    except PermissionError as error:
        raise RecipeError(f"{where}: cannot be read: {error.strerror}") from error
    except (OSError, ValueError):  # no such file, or no name a file can have
        pass
    else:
        return parse_recipe(text, where)
    found = builtin_recipes()
    if where in found:
        return parse_recipe(found[where], where)
    raise RecipeError(
        f"there is no recipe file {where!r} and no built-in one of that name"
        f"{_did_you_mean(where, found)}; `qconvert recipes list` shows them"
    )


def parse_recipe(text: str, name: str) -> Recipe:
    """Parse a recipe. `name` stands in error messages. Raises RecipeError."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _not_yaml(error, name) from error
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{name}: a recipe is a mapping with the key `passes`")
    steps: tuple[Pass, ...] | None = None
    size: int | None = None
    for key, value in _entries(node, name):
        if key.value == "passes":
            if not isinstance(value, yaml.SequenceNode):
                raise RecipeError(f"{name}:{_line(value)}: `passes` must be a list")
            steps = tuple(_pass(item, name) for item in value.value)
        elif key.value == "max_shard_size":
            try:
                size = parse_size(value.value if isinstance(value, yaml.ScalarNode) else "a list")
            except RecipeError as error:
                raise RecipeError(f"{name}:{_line(value)}: max_shard_size: {error}") from error
        else:
            raise RecipeError(
                f"{name}:{_line(key)}: unknown key {key.value!r}{_did_you_mean(key.value, _KEYS)}; "
                f"a recipe has {', '.join(_KEYS)}"
            )
    if steps is None:
        raise RecipeError(f"{name}: the key `passes` is missing; `passes: []` is a plain copy")
    return Recipe(name, steps, size)


def _not_yaml(error: Exception, name: str) -> RecipeError:
    """In one line: what YAML's own message says in five."""
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark is not None else ""
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return RecipeError(f"{name}{line}: not valid YAML: {problem}")


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _entries(node: Any, name: str) -> Iterable[tuple[Any, Any]]:
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key.value, str):
            raise RecipeError(f"{name}:{_line(key)}: a key must be a word")
        if key.value in seen:
            raise RecipeError(f"{name}:{_line(key)}: {key.value!r} is given twice")
        seen.add(key.value)
        yield key, value


def _pass(node: Any, name: str) -> Pass:
    import yaml

    known = passes()
    key = options = None
    if isinstance(node, yaml.ScalarNode):
        key = node
    elif isinstance(node, yaml.MappingNode) and len(node.value) == 1:
        key, options = node.value[0]
    if not isinstance(key, yaml.ScalarNode):
        raise RecipeError(
            f"{name}:{_line(node)}: a pass is its name, or one name with its options below it"
        )
    kind = known.get(key.value)
    if kind is None:
        raise RecipeError(
            f"{name}:{_line(key)}: unknown pass {key.value!r}{_did_you_mean(key.value, known)}; "
            f"known are {', '.join(sorted(known))}"
        )
    if options is None or (isinstance(options, yaml.ScalarNode) and options.value == ""):
        return _build(kind, {}, {}, name, _line(key))
    if not isinstance(options, yaml.MappingNode):
        raise RecipeError(f"{name}:{_line(options)}: options of {key.value!r} must be a mapping")
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    for option, value in _entries(options, name):
        lines[option.value] = _line(option)
        try:
            values[option.value] = yaml.SafeLoader("").construct_document(value)
        except yaml.YAMLError as error:  # a tag that safe YAML does not have
            raise _not_yaml(error, name) from error
    return _build(kind, values, lines, name, _line(key))


def _build(
    kind: type[Pass], values: Mapping[str, Any], lines: Mapping[str, int], name: str, line: int
) -> Pass:
    """Check options against the pass's fields with pydantic and build it."""
    from pydantic import TypeAdapter, ValidationError

    allowed = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in allowed:
            what = f"it has {', '.join(allowed)}" if allowed else "it has no options"
            raise RecipeError(
                f"{name}:{lines.get(key, line)}: {kind.name!r} has no option {key!r}"
                f"{_did_you_mean(key, allowed)}; {what}"
            )
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        raise RecipeError(
            f"{name}:{lines.get(key, line)}: {kind.name!r}, option {key!r}: {first['msg']}, "
            f"found {first.get('input')!r}"
        ) from error


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
