"""llm-compressor's recipes, read unchanged: GPTQModifier and QuantizationModifier, weights only.

    quant_stage:
      quant_modifiers:
        GPTQModifier: {targets: [Linear], ignore: [lm_head], scheme: W4A16}

Source: llm-compressor, `recipe/recipe.py`: one or more keys `*_stage`, in them `*_modifiers`, in
them modifiers by class. Settings that qconvert does not support are refused with their line; settings
that only say how llm-compressor is to run are accepted and not used.
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
    """Request of a recipe. `kind` is how codes are found: by GPTQ or rounding to nearest;
    `dampening_frac` and `block_size` are GPTQ's. Lines are those of the recipe."""

    kind: Literal["gptq", "rtn"]
    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    dampening_frac: float
    block_size: int
    line: int


def is_foreign(node: Any) -> bool:
    """Return whether a recipe's root node has llm-compressor's keys."""
    keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
    return "passes" not in keys and any(
        key.endswith(("_stage", "_modifiers", "Modifier")) for key in keys
    )


def parse_foreign(node: Any, name: str) -> Foreign:
    """Read a recipe from its root node, for which `is_foreign` holds. `name` is used in messages.

    Raises RecipeError, with the line and what to do, for settings that qconvert does not support.
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
    """A target or ignored module, rewritten to mean here what it means there: patterns and Linear
    unchanged, a name as that one module, because ours also match the ends of names."""
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
                f"{name}:{line_of(key)}: modifier {key.value!r} is not supported; qconvert runs "
                f"{' and '.join(_MODIFIERS)}{did_you_mean(key.value, _MODIFIERS)}; run this recipe "
                "with llm-compressor"
            )
        _mapping(options, name)
    if len(found) > 1:
        raise RecipeError(
            f"{name}:{line_of(found[1][0])}: a second modifier is not supported; write "
            "one modifier, with config_groups if schemes differ"
        )
    key, options = found[0]
    return key.value, options


def _nested(node: Any, suffix: str, example: str, name: str) -> list[tuple[Any, Any]]:
    """A mapping's entries, whose keys must end with `suffix`: llm-compressor silently ignores others
    and does nothing."""
    found = list(entries(_mapping(node, name), name))
    for key, _ in found:
        if not key.value.endswith(suffix):
            raise RecipeError(
                f"{name}:{line_of(key)}: expected a key that ends in {suffix}, such as {example}, "
                f"found {key.value!r}, which llm-compressor ignores; put the modifier below "
                "quant_stage: quant_modifiers:"
            )
    return found


def _mapping(node: Any, name: str) -> Any:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{name}:{line_of(node)}: expected a mapping, with options below a name")
    return node
