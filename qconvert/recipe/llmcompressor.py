"""llm-compressor's recipes, read as they are: GPTQModifier and QuantizationModifier for weights alone.

    quant_stage:
      quant_modifiers:
        GPTQModifier: {targets: [Linear], ignore: [lm_head], scheme: W4A16}

Source: llm-compressor 0.14, `recipe/recipe.py`: one or more keys `*_stage`, in them `*_modifiers`, in
them modifiers by class. What a recipe asks for and qconvert does not do is refused with its line; what
only says how llm-compressor is to run is taken and not used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from qconvert.core.errors import RecipeError
from qconvert.core.yaml_lines import construct, did_you_mean, entries, line_of, lines_of
from qconvert.recipe.llmcompressor_options import Gptq, Group, Reader, Rtn

_MODIFIERS: dict[str, type[Rtn]] = {"GPTQModifier": Gptq, "QuantizationModifier": Rtn}


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a recipe asks for. `kind` is how codes are found: by GPTQ or rounding to nearest;
    `dampening_frac` and `block_size` are GPTQ's. Lines are those of the recipe."""

    kind: Literal["gptq", "rtn"]
    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    dampening_frac: float
    block_size: int
    line: int


def is_foreign(node: Any) -> bool:
    """Whether a recipe's root node is written in llm-compressor's words."""
    keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
    return "passes" not in keys and any(
        key.endswith(("_stage", "_modifiers", "Modifier")) for key in keys
    )


def parse_foreign(node: Any, name: str) -> Foreign:
    """Read a recipe from its root node, for which `is_foreign` holds. `name` stands in messages.

    Raises RecipeError, with the line and what to do, for what qconvert does not do.
    """
    key, options = _modifier(node, name)
    reader = Reader(name, key, lines_of(options, name), line_of(options))
    asked = reader.validated(_MODIFIERS[key], construct(options, name))
    gptq = asked if isinstance(asked, Gptq) else None
    return Foreign(
        kind="rtn" if gptq is None else "gptq",
        groups=tuple(reader.groups(asked)),
        ignore=reader.modules(asked.ignore, ("ignore",)),
        dampening_frac=Gptq.dampening_frac if gptq is None else gptq.dampening_frac,
        block_size=Gptq.block_size if gptq is None else gptq.block_size,
        line=line_of(options),
    )


def pattern_of(word: str) -> str:
    """A target or ignored module so that it means here what it means there: patterns and Linear as they
    are, a name as that one module, where ours also takes ends of names."""
    return word if word == "Linear" or word.startswith("re:") else f"re:{re.escape(word)}$"


def _modifier(root: Any, name: str) -> tuple[str, Any]:
    """The one modifier's name and node, below one stage and one group."""
    stages = list(_nested(root, "_stage", "quant_stage", name))
    groups = [
        g for _, stage in stages for g in _nested(stage, "_modifiers", "quant_modifiers", name)
    ]
    found = [
        (key, options)
        for _, group in groups
        for key, options in entries(_mapping(group, name), name)
    ]
    if not found:
        raise RecipeError(f"{name}:{line_of(root)}: the recipe has no modifier; name one")
    for key, options in found:
        if key.value not in _MODIFIERS:
            raise RecipeError(
                f"{name}:{line_of(key)}: {key.value!r} is not among the modifiers that qconvert runs, "
                f"{' and '.join(_MODIFIERS)}{did_you_mean(key.value, _MODIFIERS)}; run this recipe "
                "with llm-compressor"
            )
        _mapping(options, name)
    if len(found) > 1:
        raise RecipeError(
            f"{name}:{line_of(found[1][0])}: a second modifier; qconvert quantizes in one go: write "
            "one modifier, with config_groups where schemes differ"
        )
    key, options = found[0]
    return key.value, options


def _nested(node: Any, suffix: str, example: str, name: str) -> list[tuple[Any, Any]]:
    """A mapping's entries, whose keys must end with `suffix`: llm-compressor passes others over
    without a word, and does nothing."""
    found = list(entries(_mapping(node, name), name))
    for key, _ in found:
        if not key.value.endswith(suffix):
            raise RecipeError(
                f"{name}:{line_of(key)}: expected a key that ends in {suffix}, such as {example}, "
                f"found {key.value!r}, which llm-compressor passes over; put the modifier below "
                "quant_stage: quant_modifiers:"
            )
    return found


def _mapping(node: Any, name: str) -> Any:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{name}:{line_of(node)}: expected a mapping, with options below a name")
    return node
