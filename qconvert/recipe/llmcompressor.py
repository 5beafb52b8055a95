"""llm-compressor's recipes, read unchanged: GPTQModifier and QuantizationModifier, one or several, of
weights, and of activations that are scaled as the model runs.

    quant_stage:
      quant_modifiers:
        GPTQModifier: {targets: [Linear], ignore: [lm_head], scheme: W4A16}

Source: llm-compressor, `recipe/recipe.py`: one or more keys `*_stage`, in them `*_modifiers`, in
them modifiers by class; `modifiers/quantization/quantization/mixin.py` (fields, how a scheme resolves)
and `modifiers/gptq/base.py` (actorder); compressed-tensors, `quantization/quant_scheme.py` (presets)
and `quant_args.py` (strategies, aliases). Settings that qconvert does not support are refused with
their line; settings that only say how llm-compressor is to run are accepted and not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from qconvert.core.errors import PlanError, RecipeError
from qconvert.core.int_scheme import Actorder, Bits, IntScheme
from qconvert.core.patterns import compiled
from qconvert.core.yaml_lines import Path, construct, did_you_mean, entries, line_of, lines_of


@dataclass(frozen=True, slots=True)
class Step:
    """A pass that makes what a scheme says, and its options, which a recipe of ours would give it."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()


_DIALECT = ("dialect", "compressed-tensors")
_BY_ROW = Step("fp8", (_DIALECT, ("block", None)))
_BY_BLOCK = Step("fp8", (_DIALECT, ("block", 128)))
_NVFP4 = Step("nvfp4", (_DIALECT, ("weight_only", True)))
# Presets that are made here; others quantize activations with data, or have other widths.
_PRESETS: Mapping[str, IntScheme | Step] = {
    "W4A16": IntScheme(bits=4, group=128),
    "W8A16": IntScheme(bits=8, group=128),
    "W4A16_ASYM": IntScheme(bits=4, group=128, symmetric=False),
    "W8A8": Step("int8"),
    "INT8": Step("int8"),
    "FP8_DYNAMIC": _BY_ROW,
    "FP8_BLOCK": _BY_BLOCK,
    "NVFP4A16": _NVFP4,
}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_INT8 = {"num_bits": 8, "type": "int"}
_TOKENS = {"strategy": "token", "dynamic": True}
# The same as a group states them: of weights, and of activations.
_STATED: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], Step]] = (
    ({**_FLOAT8, "strategy": "channel"}, {**_FLOAT8, **_TOKENS}, _BY_ROW),
    (
        {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]},
        {**_FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True},
        _BY_BLOCK,
    ),
    ({**_INT8, "strategy": "channel"}, {**_INT8, **_TOKENS}, Step("int8")),
    ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, {}, _NVFP4),
)
_ACTORDERS: dict[str, Actorder] = {
    "static": "static", "weight": "static", "group": "group", "dynamic": "group",
}  # fmt: skip
# For a weight observed once these give the same scale.
_OBSERVERS = ("memoryless_minmax", "minmax", "static_minmax")
UNSET = "unset"
_DO_IT_THERE = "leave it out, or run this recipe with llm-compressor"


@dataclass(frozen=True, slots=True)
class Group:
    """Modules of one scheme: names, `re:` patterns, or Linear, as compressed-tensors matches them."""

    scheme: IntScheme | Step
    targets: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Args:
    """compressed-tensors' QuantizationArgs."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: Any = None
    dynamic: bool | str = False
    actorder: str | bool | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None  # of the zero points in memory; packed, they have the codes' width
    observer: str | None = None
    observer_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheme:
    """compressed-tensors' QuantizationScheme."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    targets: list[str]
    weights: Args | None = None
    input_activations: Any = None
    output_activations: Any = None
    format: str | None = None


@dataclass(frozen=True)
class Rtn:
    """QuantizationModifier's options."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    config_groups: dict[str, Scheme] | None = None
    targets: str | list[str] = field(default_factory=lambda: ["Linear"])
    ignore: list[str] = field(default_factory=list)
    scheme: str | dict[str, str | list[str]] | None = None
    kv_cache_scheme: Any = None
    weight_observer: str | None = None
    observer: dict[str, str] | None = None
    # A training schedule, which does not exist here.
    start: float | None = None
    end: float | None = None
    update: float | None = None
    # Options that say how llm-compressor is to run, or that concern activations, which are refused.
    input_observer: str | None = None
    output_observer: str | None = None
    bypass_divisibility_checks: bool = False  # whole groups are always required here
    requires_calibration_data: bool | None = None
    group: str | None = None
    index: int | None = None


@dataclass(frozen=True)
class Gptq(Rtn):
    """GPTQModifier's options. The last two were options of older releases."""

    block_size: int = 128
    dampening_frac: float = 0.01
    actorder: str | None = UNSET
    batched_quantization: str | int | None = "auto"
    offload_hessians: bool = False
    sequential_update: Literal[True] = True


@dataclass(frozen=True)
class Reader:
    """A modifier's options, with the lines that they are on."""

    name: str
    kind: str
    lines: Mapping[Path, int]
    line: int

    def error(self, path: Path, what: str) -> RecipeError:
        """An error at the line of a path, or of the last part of it that was written."""
        where = ".".join(map(str, (self.kind, *path)))
        while path and path not in self.lines:
            path = path[:-1]
        return RecipeError(f"{self.name}:{self.lines.get(path, self.line)}: {where}: {what}")

    def validated(self, model: type[Rtn], value: Any) -> Rtn:
        """The options in their types; unknown ones are refused."""
        from pydantic import TypeAdapter, ValidationError

        try:
            asked = TypeAdapter(model).validate_python(value)
        except ValidationError as error:
            raise self.invalid(model, error.errors()[0]) from error
        self.check(asked)
        return asked

    def invalid(self, model: type[Rtn], first: Mapping[str, Any]) -> RecipeError:
        """pydantic's first error, at its line."""
        path: Path = first["loc"]
        if path not in self.lines:  # for a union, pydantic names the type it tried
            path = path[:-1]
        if first["type"] == "unexpected_keyword_argument":
            shape: Any = {3: Scheme, 4: Args}.get(len(path), model)  # as deep as it stands
            close = did_you_mean(str(path[-1]), [option.name for option in fields(shape)])
            return self.error(path, f"unknown option{close}; {_DO_IT_THERE}")
        return self.error(path, f"{first['msg']}, found {first.get('input')!r}")

    def check(self, asked: Rtn) -> None:
        """Options that a whole modifier must not set."""
        if asked.kv_cache_scheme is not None:
            raise self.error(
                ("kv_cache_scheme",),
                "not supported: qconvert quantizes weights only; leave it out, and set the cache's "
                "type where the served",
            )
        for key in ("start", "end", "update"):
            if getattr(asked, key) is not None:
                raise self.error((key,), f"training schedules are not supported; {_DO_IT_THERE}")
        self.observer(asked.weight_observer, ("weight_observer",))
        self.observer((asked.observer or {}).get("weights"), ("observer", "weights"))
        if isinstance(asked, Gptq):
            if not 0 < asked.dampening_frac < 1:
                raise self.error(("dampening_frac",), "expected a number between 0 and 1")
            if asked.block_size < 1:
                raise self.error(("block_size",), "expected at least 1 column")

    def observer(self, found: str | None, path: Path) -> None:
        if found is not None and found.lower() not in _OBSERVERS:
            raise self.error(
                path,
                f"qconvert's scales come from the largest weights ({', '.join(_OBSERVERS)}), found "
                f"{found!r}; {_DO_IT_THERE}",
            )

    def groups(self, asked: Rtn) -> list[Group]:
        """Every group's scheme and targets, in order."""
        ordered = asked.actorder if isinstance(asked, Gptq) else UNSET
        if asked.scheme is not None and asked.config_groups is not None:
            raise self.error(("config_groups",), "scheme already states it; leave one of them out")
        if asked.config_groups:
            found = []
            for key, scheme in asked.config_groups.items():
                path = ("config_groups", key)
                targets = self.targets(scheme.targets, (*path, "targets"))
                made = _stated(scheme)
                if made is not None:
                    self.check_rounded(key, (*path, "weights"))
                found.append(
                    Group(made or self.weights(scheme, ordered, path), targets, self.lines[path])
                )
            return found
        if not asked.scheme:
            raise self.error(
                (), "it names no scheme, so nothing would be quantized; write scheme: W4A16"
            )
        if isinstance(asked.scheme, str):
            preset = self.preset(asked.scheme, ordered, ("scheme",))
            targets = self.targets(asked.targets, ("targets",))
            return [Group(preset, targets, self.lines[("scheme",)])]
        return [
            Group(
                self.preset(key, ordered, ("scheme", key)),
                self.targets(targets, ("scheme", key)),
                self.lines[("scheme", key)],
            )
            for key, targets in asked.scheme.items()
        ]

    def check_rounded(self, name: str, path: Path) -> None:
        """Refuse codes that llm-compressor would find with data, and that are rounded here."""
        if self.kind == "GPTQModifier":
            raise self.error(
                path,
                f"here GPTQ finds packed integers alone, and codes of {name} are rounded: name these "
                "modules in a QuantizationModifier, or run this recipe with llm-compressor",
            )

    def preset(self, key: str, ordered: str | None, path: Path) -> IntScheme | Step:
        scheme = _PRESETS.get(key.upper())
        if scheme is None:
            raise self.error(
                path,
                f"qconvert makes {', '.join(_PRESETS)}, found {key!r}{did_you_mean(key, _PRESETS)}; "
                "run others, with activations that need data or other widths, with llm-compressor",
            )
        if isinstance(scheme, Step):
            self.check_rounded(key, path)
            return scheme
        return replace(scheme, actorder=self.actorder(None, ordered, path))

    def weights(self, scheme: Scheme, ordered: str | None, path: Path) -> IntScheme:
        """A group's weights as a scheme."""
        for key in ("input_activations", "output_activations"):
            if getattr(scheme, key) is not None:
                raise self.error((*path, key), f"only weights can be quantized; {_DO_IT_THERE}")
        if scheme.format not in (None, "pack-quantized"):
            raise self.error(
                (*path, "format"), f"expected pack-quantized, found {scheme.format!r}; leave it out"
            )
        args, path = scheme.weights, (*path, "weights")
        if args is None:
            raise self.error(path, "no weights: list modules that stay unquantized under ignore")
        if args.type.lower() != "int":
            raise self.error((*path, "type"), f"expected int, found {args.type!r}; {_DO_IT_THERE}")
        if args.dynamic is not False:
            raise self.error((*path, "dynamic"), "weights are quantized once; leave it out")
        if args.scale_dtype is not None:
            raise self.error(
                (*path, "scale_dtype"), "scales have the weights' type here; leave it out"
            )
        self.observer(args.observer, (*path, "observer"))
        if args.observer_kwargs:
            raise self.error((*path, "observer_kwargs"), f"not supported; {_DO_IT_THERE}")
        if args.num_bits not in (4, 8):
            raise self.error(
                (*path, "num_bits"), f"expected 4 or 8 bits, found {args.num_bits}; "
                "choose one of them, or run this recipe with llm-compressor",
            )  # fmt: skip
        bits: Bits = 4 if args.num_bits == 4 else 8
        group = self.group(args, path)
        actorder = self.actorder(args.actorder, ordered, (*path, "actorder"))
        try:
            return IntScheme(bits, group, args.symmetric, actorder)
        except PlanError as error:
            raise self.error(path, str(error)) from error

    def group(self, args: Args, path: Path) -> int | None:
        """Columns per scale, None for a whole row: from strategy and group_size; either may
        be left out if the other implies it."""
        size, strategy = args.group_size, args.strategy
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = strategy.lower()
        if args.block_structure is not None or strategy not in ("group", "channel"):
            raise self.error(
                (*path, "strategy"), f"expected group (with group_size) or channel, found {strategy}; "
                f"{_DO_IT_THERE}",
            )  # fmt: skip
        if strategy == "channel":
            if size is not None and size > 0:
                raise self.error(
                    (*path, "group_size"), "a channel has no groups; write strategy: group"
                )
            return None
        if size is None or size < 1:
            raise self.error((*path, "group_size"), f"expected a number of columns, found {size}")
        return size

    def actorder(
        self, found: str | bool | None, ordered: str | None, path: Path
    ) -> Actorder | None:
        """A group's order, by its own setting and the modifier's: GPTQModifier's default is static; if
        both state one, they must agree."""
        own = self.order(found, path)
        if self.kind != "GPTQModifier":
            return own
        if ordered == UNSET:
            return own or "static"
        whole = self.order(ordered, ("actorder",))
        if own is not None and own != whole:
            raise self.error(
                path, f"the modifier's own actorder is {ordered}; leave one of them out"
            )
        return whole

    def order(self, found: str | bool | None, path: Path) -> Actorder | None:
        if found is None or found is False:
            return None
        if not isinstance(found, str) or found not in _ACTORDERS:
            raise self.error(path, f"expected {', '.join(_ACTORDERS)} or null, found {found!r}")
        return _ACTORDERS[found]

    def targets(self, found: str | list[str], path: Path) -> tuple[str, ...]:
        listed = [found] if isinstance(found, str) else found
        if not listed:
            raise self.error(path, "it has no targets; write [Linear], names, or re: patterns")
        return self.modules(listed, path, classes=("Linear",))

    def modules(
        self, found: list[str], path: Path, *, classes: tuple[str, ...] = ()
    ) -> tuple[str, ...]:
        """Modules' names and patterns, unchanged. Only the given classes are known:
        there is no model here to look others up in."""
        for number, word in enumerate(found):
            at: Path = (*path, number)
            if word.startswith("re:"):
                try:
                    compiled(word.removeprefix("re:"))
                except re.error as error:
                    what = f"{word!r} is not a valid regular expression: {error}"
                    raise self.error(at, what) from error
            elif word not in classes and (not word or (word[0].isupper() and "." not in word)):
                known = " or ".join(("a module's name", "a re: pattern", *classes))
                raise self.error(
                    at, f"expected {known}, found {word!r}, which looks like a class; write the "
                    "modules' names",
                )  # fmt: skip
        return tuple(found)


_MODIFIERS: dict[str, type[Rtn]] = {"GPTQModifier": Gptq, "QuantizationModifier": Rtn}


@dataclass(frozen=True, slots=True)
class Foreign:
    """Request of a modifier. `kind` is how codes are found: by GPTQ or rounding to nearest;
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


def parse_foreign(node: Any, name: str) -> list[Foreign]:
    """Read the modifiers of a recipe from its root node, for which `is_foreign` holds. `name` is used in
    messages.

    Raises RecipeError, with the line and what to do, for settings that qconvert does not support.
    """
    return [_foreign(key, options, name) for key, options in _modifiers(node, name)]


def _foreign(key: str, options: Any, name: str) -> Foreign:
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


def _modifiers(root: Any, name: str) -> list[tuple[str, Any]]:
    """The names and nodes of modifiers, in their order."""
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
    return [(key.value, options) for key, options in found]


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


def _stated(scheme: Scheme) -> Step | None:
    """The pass that makes what a group states, None for packed integers and what none makes."""
    asked, inputs = scheme.weights, scheme.input_activations or {}
    if asked is None or not isinstance(inputs, Mapping) or scheme.output_activations is not None:
        return None
    if not asked.symmetric or asked.dynamic or asked.actorder or asked.observer not in _UNASKED:
        return None
    for weights, activations, step in _STATED:
        same = all(_plain(getattr(asked, key)) == value for key, value in weights.items())
        alike = all(_plain(inputs.get(key)) == value for key, value in activations.items())
        if same and alike and bool(activations) == bool(inputs):
            return step
    return None


_UNASKED = (None, *_OBSERVERS)


def _plain(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value
