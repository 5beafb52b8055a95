"""The options of llm-compressor's quantization modifiers: their types, and which of them are supported.

Source: llm-compressor, `modifiers/quantization/quantization/mixin.py` (fields, how a scheme
resolves) and `modifiers/gptq/base.py` (actorder); compressed-tensors,
`quantization/quant_scheme.py` (presets) and `quant_args.py` (strategies, aliases).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from qconvert.core.errors import PlanError, RecipeError
from qconvert.core.int_scheme import Actorder, Bits, IntScheme
from qconvert.core.patterns import compiled
from qconvert.core.yaml_lines import Path, did_you_mean

# Weight-only schemes in widths that are packed here. All other presets also quantize activations, or use
# floats or other widths.
_PRESETS = {
    "W4A16": IntScheme(bits=4, group=128),
    "W8A16": IntScheme(bits=8, group=128),
    "W4A16_ASYM": IntScheme(bits=4, group=128, symmetric=False),
}
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

    scheme: IntScheme
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
                found.append(Group(self.weights(scheme, ordered, path), targets, self.lines[path]))
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

    def preset(self, key: str, ordered: str | None, path: Path) -> IntScheme:
        scheme = _PRESETS.get(key.upper())
        if scheme is None:
            raise self.error(
                path,
                f"qconvert makes {', '.join(_PRESETS)}, found {key!r}{did_you_mean(key, _PRESETS)}; "
                "run others, with quantized activations, floats or other widths, with llm-compressor",
            )
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
