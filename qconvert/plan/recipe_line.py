"""A pass's repr, as manifests and journals have it, in the words of a recipe: `w4a16: {group: 32}`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from qconvert.core.discovery import PASSES, discover, is_extended, loaded
from qconvert.plan.words import words_of

# The packages of the house that hold passes.
PACKAGES = ("qconvert.passes", "qconvert.contrib.trtllm_gen")
_MOST = 4000  # characters of a repr; our longest has some 600


def recipe_line(spec: str) -> str:
    """One line of YAML, of a pass or its name alone, with the options that are not at their defaults.
    What is no repr of a known pass (another package's, another version's) stays as it is."""
    import warnings

    if len(spec) > _MOST:
        return spec
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a manifest may be anyone's, and so its escapes
            call = ast.parse(spec, mode="eval").body
        name, kind = _pass_of(_called(call))
        options = words_of(name, _options(call, kind))
    except (KeyError, ValueError, SyntaxError, RecursionError, MemoryError):
        return spec
    if not options:
        return name
    return f"{name}: {_in_a_line(options)}"


def _in_a_line(options: Mapping[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """A text of several lines is quoted, so that it stays in one."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = None if value.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    found = yaml.dump(
        dict(options), Dumper=Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True,
        width=2**31,
    )  # fmt: skip
    return str(found).strip()


def _pass_of(called: str) -> tuple[str, Any]:
    """The pass whose class has a name, with its recipe name. One that made a plan has been imported: to
    import all of them for the card took 90 ms of CPU. Raises KeyError."""
    if not is_extended():  # another package's class may have the same name
        for module in loaded(*PACKAGES):
            for kind in getattr(module, "PASSES", ()):
                if kind.__name__ == called:
                    return kind.name, kind
    return _known()[called]


@cache
def _known() -> Mapping[str, tuple[str, Any]]:
    """Passes with their recipe names, by the names of their classes."""
    return {
        kind.__name__: (kind.name, kind)
        for module in discover(*PACKAGES, group=PASSES)
        for kind in getattr(module, "PASSES", ())
    }


def _called(node: ast.expr) -> str:
    """The class of a repr. Raises ValueError for what is none."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("is no repr of a dataclass")
    return node.func.id


def _options(node: ast.expr, kind: Any) -> dict[str, Any]:
    """Keywords of a repr that differ from the defaults of its class, if that is known."""
    defaults = {f.name: f.default for f in fields(kind)} if is_dataclass(kind) else {}
    assert isinstance(node, ast.Call)
    found: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("is no repr of a dataclass")
        found[keyword.arg] = _value(keyword.value)
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in found.items()
        if key not in defaults or value != defaults[key]
    }


def _value(node: ast.expr) -> Any:
    """A literal, or the options of a dataclass within a pass, such as its calibration."""
    if isinstance(node, ast.Call) and _called(node) == "Calibration":
        from qconvert.samples.request import Calibration, unsaid

        return _options(node, Calibration) | unsaid([one.arg or "" for one in node.keywords])
    if isinstance(node, ast.Call):
        return _options(node, None)
    return ast.literal_eval(node)
