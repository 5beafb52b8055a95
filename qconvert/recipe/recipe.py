"""Recipes: a conversion as a short YAML file, strict to the last key.

    # Who it serves, and why.
    passes:
      - dequant
      - drop: {what: mtp}
    max_shard_size: 5GB

A pass is its name, or its name with options; a pass's fields are its schema. An unknown key is an
error with its line and the most similar key: a misspelt option that is ignored is how
wrong checkpoints are made. llm-compressor's recipes are read as well (recipe/llmcompressor.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.core.errors import DataError, PlanError, RecipeError, UsageError
from qconvert.core.links import read_regular
from qconvert.core.patterns import compiled
from qconvert.core.shown import parse_size
from qconvert.plan.plan import Pass

if TYPE_CHECKING:
    from qconvert.core.int_scheme import IntScheme
    from qconvert.recipe.llmcompressor import Foreign, Group, Step

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
    options = _options(step)
    return {step.name: options} if options else step.name


def _options(of: Any) -> dict[str, Any]:
    """Fields that differ from their defaults, nested ones too."""
    found = {field.name: getattr(of, field.name) for field in fields(of)}
    return {
        field.name: _options(value) if is_dataclass(value) else value
        for field in fields(of)
        if (value := found[field.name]) != field.default
    }


def builtin_recipes() -> dict[str, str]:
    """Name -> text of every recipe that comes with qconvert."""
    from importlib.resources import files as package_files

    found = {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in package_files("qconvert.recipes").iterdir()
        if entry.name.endswith(".yaml")
    }
    return dict(sorted(found.items()))


def step_names(text: str, name: str) -> list[str]:
    """Names of a built-in recipe's passes, of which none is imported; `name` is the recipe's."""
    from qconvert.core.yaml_lines import compose, entries

    steps = next(
        (value.value for key, value in entries(compose(text, name), name) if key.value == "passes"),
        (),
    )
    return [step.value if isinstance(step.value, str) else step.value[0][0].value for step in steps]


def load_recipe(where: str, data: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe by file or built-in name; `data` as for `parse_recipe`. Raises RecipeError, with the
    line if there is one."""
    from qconvert.core.yaml_lines import MOST_BYTES, did_you_mean
    from qconvert.passes import passes

    text = None
    if os.path.lexists(where) and not Path(where).is_dir():
        with suppress(FileNotFoundError):  # a dangling link
            text = read_regular(Path(where), MOST_BYTES, error=RecipeError)
    if text is not None:
        try:
            return parse_recipe(text.decode("utf-8"), where, data)
        except UnicodeDecodeError as error:
            raise RecipeError(f"{where}: is not UTF-8 text: {error}") from error
    found = builtin_recipes()
    if where in found:
        return parse_recipe(found[where], where, data)
    if where in passes():
        raise RecipeError(
            f"{where!r} is a pass, and no recipe file or built-in recipe; write a file with `passes: "
            f"[{where}]`, or use its command"
        )
    raise RecipeError(
        f"no recipe file and no built-in recipe is named {where!r}"
        f"{did_you_mean(where, found)}; `qconvert recipes list` shows them"
    )


def parse_recipe(text: str, name: str, data: Mapping[str, Any] | None = None) -> Recipe:
    """Parse a recipe. `name` is used in error messages. `data` are fields of Calibration for an
    llm-compressor recipe that needs data, which those do not name. Raises RecipeError."""
    import yaml

    from qconvert.core.yaml_lines import compose, did_you_mean, entries, line_of
    from qconvert.recipe.llmcompressor import is_foreign

    node = compose(text, name)
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{name}: expected a mapping with the key `passes`")
    if is_foreign(node):
        return _foreign(node, name, data)
    if data:
        raise RecipeError(
            f"{name}: calibration data can only be given with an llm-compressor recipe; here it is an "
            "option of the pass"
        )
    steps: tuple[Pass, ...] | None = None
    size: int | None = None
    for key, value in entries(node, name):
        if key.value == "passes":
            if not isinstance(value, yaml.SequenceNode):
                raise RecipeError(f"{name}:{line_of(value)}: `passes` must be a list")
            steps = tuple(_pass(item, name) for item in value.value)
        elif key.value == "max_shard_size":
            try:
                size = parse_size(value.value if isinstance(value, yaml.ScalarNode) else "a list")
            except UsageError as error:
                raise RecipeError(f"{name}:{line_of(value)}: max_shard_size: {error}") from error
        else:
            raise RecipeError(
                f"{name}:{line_of(key)}: unknown key {key.value!r}{did_you_mean(key.value, _KEYS)}; "
                f"expected {', '.join(_KEYS)}"
            )
    if steps is None:
        raise RecipeError(f"{name}: the key `passes` is missing; `passes: []` is a plain copy")
    return Recipe(name, steps, size)


def _foreign(node: Any, name: str, data: Mapping[str, Any] | None) -> Recipe:
    """llm-compressor's recipe as one of ours: a pass for each scheme. That of GPTQModifier comes first:
    what other modifiers round is unquantized as long as layers are run."""
    from qconvert.recipe.llmcompressor import parse_foreign

    asked = sorted(parse_foreign(node, name), key=lambda one: one.kind)
    steps = [step for one in asked for step in _steps_of(one, name, data)]
    if data and not any(one.kind == "gptq" for one in asked):
        raise RecipeError(
            f"{name}:{asked[0].line}: QuantizationModifier rounds to nearest, which needs no data; "
            "leave it out, or write GPTQModifier"
        )
    return Recipe(name, tuple(steps))


def _steps_of(asked: Foreign, name: str, data: Mapping[str, Any] | None) -> Iterator[Pass]:
    """The passes of a modifier, one for each of its schemes."""
    from qconvert.passes import passes
    from qconvert.recipe.llmcompressor import Step, pattern_of

    ignore = [pattern_of(word) for word in asked.ignore]
    by_scheme: dict[IntScheme | Step, list[Group]] = {}
    for group in asked.groups:
        by_scheme.setdefault(group.scheme, []).append(group)
    for scheme, groups in by_scheme.items():
        targets = [pattern_of(target) for group in groups for target in group.targets]
        if any(map(_takes_head, targets)) and not any(map(_takes_head, ignore)):
            raise RecipeError(
                f"{name}:{groups[0].line}: lm_head would be quantized too, which runtimes do not load; "
                "write ignore: [lm_head]"
            )
        # The recipe itself says what is quantized.
        values: dict[str, Any] = {"targets": targets, "ignore": ignore, "shared_experts": "named"}
        if isinstance(scheme, Step):
            kind, own = scheme.name, dict(scheme.options)
        else:
            kind, own = "w4a16", {
                "bits": scheme.bits, "group_size": scheme.group, "symmetric": scheme.symmetric,
                "actorder": scheme.actorder,
            }  # fmt: skip
        values |= own
        if asked.kind == "gptq":
            if not data:
                raise RecipeError(
                    f"{name}:{asked.line}: GPTQModifier calibrates, which needs data: add --data FILE, "
                    "or --synthetic for a trial"
                )
            # The recipe means the codes that llm-compressor finds.
            solving = {"dampening_frac": asked.dampening_frac, "block_size": asked.block_size,
                       "solver": "llmcompressor"}  # fmt: skip
            values["calibrate"] = {**solving, **data}
        lines = dict.fromkeys(values, groups[0].line)
        yield _build(passes()[kind], values, lines, name, asked.line)


def _takes_head(pattern: str) -> bool:
    return pattern == "Linear" or compiled(pattern.removeprefix("re:")).match("lm_head") is not None


def _pass(node: Any, name: str) -> Pass:
    import yaml

    from qconvert.core.yaml_lines import construct, did_you_mean, entries, line_of
    from qconvert.passes import passes

    known = passes()
    key = options = None
    if isinstance(node, yaml.ScalarNode):
        key = node
    elif isinstance(node, yaml.MappingNode) and len(node.value) == 1:
        key, options = node.value[0]
    if not isinstance(key, yaml.ScalarNode):
        raise RecipeError(
            f"{name}:{line_of(node)}: expected a pass's name, or one name with its options below it"
        )
    kind = known.get(key.value)
    if kind is None:
        raise RecipeError(
            f"{name}:{line_of(key)}: unknown pass {key.value!r}{did_you_mean(key.value, known)}; "
            f"known: {', '.join(sorted(known))}"
        )
    if options is None or (isinstance(options, yaml.ScalarNode) and options.value == ""):
        return _build(kind, {}, {}, name, line_of(key))
    if not isinstance(options, yaml.MappingNode):
        raise RecipeError(f"{name}:{line_of(options)}: options of {key.value!r} must be a mapping")
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    for option, value in entries(options, name):
        lines[option.value] = line_of(option)
        values[option.value] = construct(value, name)
    return _build(kind, values, lines, name, line_of(key))


def _build(
    kind: type[Pass], values: Mapping[str, Any], lines: Mapping[str, int], name: str, line: int
) -> Pass:
    """Check options against the pass's fields with pydantic and build it."""
    from pydantic import TypeAdapter, ValidationError

    from qconvert.core.yaml_lines import did_you_mean

    allowed = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in allowed:
            what = f"it has {', '.join(allowed)}" if allowed else "it has no options"
            raise RecipeError(
                f"{name}:{lines.get(key, line)}: {kind.name!r} has no option {key!r}"
                f"{did_you_mean(key, allowed)}; {what}; `qconvert recipes passes {kind.name}` says more"
            )
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        option = ".".join(map(str, first["loc"]))
        raise RecipeError(
            f"{name}:{lines.get(key, line)}: {kind.name!r}, option {option!r}: "
            f"{first['msg']}, found {first.get('input')!r}"
        ) from error
    except (DataError, PlanError) as error:  # options that contradict one another
        raise RecipeError(f"{name}:{line}: {kind.name!r}: {error}") from error
