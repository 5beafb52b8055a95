"""A pass as manifests, journals and cards keep it: its name, and its options as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

from qconvert.core.discovery import PASSES, discover, is_extended, loaded
from qconvert.core.shown import shortened
from qconvert.samples.request import Calibration, fact

# The packages of the house that hold passes.
PACKAGES = ("qconvert.passes", "qconvert.contrib.trtllm_gen")
_LONG = 1000  # characters of a pass's options: lists of experts by layer have 30,000
# What `targets` names beside modules: the routed experts, and every linear layer that runtimes load so.
EXPERTS, LINEAR = "experts", "Linear"


def options_of(step: Any, **instead: Any) -> dict[str, Any]:
    """All fields of a pass as JSON has them: tuples as lists, dataclasses as objects. `instead` are
    values for fields that hold what is no part of a plan, such as a path."""
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    return {name: _json(value) for name, value in {**values, **instead}.items()}


def options_with(step: Any, digest: str | None, stats: str | None = None) -> dict[str, Any]:
    """The options of a pass, with its calibration and its statistics as manifests keep them: by the
    `digest` of the one, and that of what was read of the other."""
    instead: dict[str, Any] = {} if stats is None else {"stats": stats}
    if digest is not None:
        instead["calibrate"] = fact(step.calibrate, digest)
    return options_of(step, **instead)


def _json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return options_of(value)
    if isinstance(value, Mapping):
        return {str(key): _json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json(one) for one in value]
    assert value is None or isinstance(value, str | int | float), f"no JSON for {value!r}"
    return value


def recipe_line(record: Any) -> str:
    """One line of YAML for a pass of a manifest: its name alone, or with the options that are not at
    their defaults, `w4a16: {group_size: 32}`. Of a pass that is not known here (another package's,
    another version's) all options are shown."""
    if not isinstance(record, Mapping) or not isinstance(record.get("options", {}), Mapping):
        return str(record)
    name = str(record.get("name"))
    options = _changed(record.get("options", {}), _pass_named(name))
    return f"{name}: {shortened(_in_a_line(options), _LONG)}" if options else name


def _changed(options: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Options that differ from the defaults of a dataclass, in a dataclass within it likewise."""
    defaults = {} if kind is None else {one.name: one.default for one in fields(kind)}
    found: dict[str, Any] = {}
    for name, value in options.items():
        default = defaults.get(name, MISSING)
        if default is MISSING or value != _json(default):
            calibrates = name == "calibrate" and isinstance(value, Mapping)
            found[name] = _changed(value, Calibration) if calibrates else value
    return found


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


def _pass_named(name: str) -> Any:
    """The class of a pass, None for an unknown one. One that made a plan has been imported: to import
    all of them for the card took 90 ms of CPU."""
    if not is_extended():  # another package's pass may have the same name
        for module in loaded(*PACKAGES):
            for kind in getattr(module, "PASSES", ()):
                if kind.name == name:
                    return kind
    return _known().get(name)


@cache
def _known() -> Mapping[str, Any]:
    modules = discover(*PACKAGES, group=PASSES)
    return {kind.name: kind for module in modules for kind in getattr(module, "PASSES", ())}
