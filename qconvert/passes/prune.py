"""prune: the routed experts that stay, under new numbers. Their bytes are moved, never requantized.

Whatever holds a number for each expert of a layer loses those of the experts that go: tensors of one
expert each, stacks [E, ...], the router's rows [E, H], its bias, and what corrects the choice (a bias
[E] or [1, E]). Configs that transformers, sglang and vLLM read have one count for all layers, draft
layers too (`n_routed_experts` and its like: `models/deepseek_nextn.py`, `glm4_moe_nextn.py`,
`qwen3_5_mtp.py` in sglang, `models/deepseek_mtp.py`, `qwen3_next_mtp.py` in vLLM), so all lose as many.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qconvert.checkpoint.checkpoint import HF_QUANT_CONFIG, is_description
from qconvert.core.errors import DataError, PlanError
from qconvert.core.family import QUANTIZATION_KEYS, first_int, text_config
from qconvert.core.graph import Output, Source, concat
from qconvert.core.json_text import parse_object
from qconvert.core.links import read_regular
from qconvert.core.names import apart_experts, is_number, parse
from qconvert.core.roles import EXPERT_COUNTS, Kind
from qconvert.core.shown import count, shortened
from qconvert.models.skip_reasons import check_has_experts
from qconvert.passes.expert_choice import By, Choice, chosen
from qconvert.passes.replace_weights import source_names
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import EXPERTS_OUT, ROWS_OUT, LogEntry, Plan

Kept = Mapping[int, tuple[int, ...]]  # by layer, ascending

# Keys of transformers' configs for how many experts a token has.
_TOP_K = (
    "num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "moe_top_k", "experts_per_token",
)  # fmt: skip
# Nested blocks of a language model.
_LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config")
_GROUPS, _TOP_GROUPS = "n_group", "topk_group"
# Parts of keys with `expert` in them that count no routed experts.
_NO_COUNTS = ("size", "dim", "shared", "layer", "tok", "topk", "capacity")
# Names, below a layer's experts, of what chooses them.
_CHOOSES = re.compile(r"gate|router|classifier|expert|correction|balanc|moe_statics")
_MAY_CHOOSE = (Kind.ROUTER, Kind.BUFFER, Kind.UNKNOWN, Kind.LINEAR)
_FLOATS = ("BF16", "F16", "F32", "F64")
# An expert named in a list or a map of a quantization block, and one that a pattern names.
_NAMED = re.compile(r"(?P<base>[\w.]*\bexperts)\.(?P<expert>[0-9]+)(?P<rest>(\.[\w.]*)?)")
_BY_PATTERN = re.compile(r"experts(\\?\.|\[\.\])\(?[0-9]")
_LISTS = ("quantize_config.json", HF_QUANT_CONFIG)


@dataclass(frozen=True, slots=True)
class Prune:
    """Leave routed experts out.

    Some of each layer stay: those that `keep` lists by layer (or that its JSON
    file does, as `read_keep` says), draft layers numbered on from the model's own, or the `experts` (how
    many) that the statistics of a calibration, the folder `stats`, rank first `by` REAP's saliency or by
    how many tokens chose them. Lists come before statistics, of which draft layers have none. Where a
    router chooses among groups of experts first, each group keeps as many.

    Raises PlanError for layers without a list, or with lists of several lengths, for a count that the
    router's settings do not allow, and for tensors, settings and patterns that depend on experts in a
    way that is not known here.
    """

    name: ClassVar[str] = "prune"

    experts: int | None = None
    keep: Mapping[int, tuple[int, ...]] | str | None = None
    stats: str | None = None
    by: By = "reap"

    def __call__(self, plan: Plan) -> Plan:
        if self.keep is None and (self.stats is None or self.experts is None):
            raise PlanError("say which experts stay: `keep`, or `stats` and how many `experts`")
        check_has_experts(plan, "there is nothing to prune")
        blocks = _blocks(plan)
        keep = read_keep(self.keep) if isinstance(self.keep, str) else self.keep or {}
        listed = {layer: tuple(sorted(numbers)) for layer, numbers in keep.items()}
        experts = self.experts or len(next(iter(listed.values()), ()))
        _check_count(plan, experts)
        found = self._choice(plan, blocks, listed, experts)
        _check_lists(plan, found.kept, blocks, experts)
        stay = {base: found.kept[layer] for base, layer in blocks.items()}
        tensors, gone = _moved(plan, stay)
        left = {source.name for output in tensors.values() for source in _sources(output)}
        rules = {source: ROWS_OUT if source in left else EXPERTS_OUT for source in gone}
        rename = _Renamed(stay)
        files = _files(plan, rename)
        before = plan.role_index.dims.num_experts
        note = f"{experts} of {before} experts stay in each of {count(len(blocks), 'layer')}"
        options = options_of(self, keep=found.kept, stats=found.digest, experts=experts)
        notes = (note, *found.notes)
        return plan.logged(
            LogEntry(
                self.name,
                options,
                len(blocks),
                len(blocks),
                notes,
                what="layers",
                loss=_loss(before, experts, found, self.by),
            ),
            tensors=tensors,
            dropped={**plan.dropped, **rules},
            config=_config(plan, experts, rename),
            side_files=tuple(name for name in plan.side_files if name not in files),
            new_files={**plan.new_files, **files},
        )

    def _choice(self, plan: Plan, blocks: Mapping[str, int], listed: Kept, experts: int) -> Choice:
        """The experts that stay in each layer."""
        if self.stats is None:
            return Choice(listed)
        dims = plan.role_index.dims
        layers = sorted(set(blocks.values()) - listed.keys())
        if layers and layers[-1] >= dims.num_layers:
            raise PlanError(
                f"layer {layers[-1]} is a draft (MTP) layer, of which there are no statistics, and "
                "runtimes read one number of experts from the config: list those of it that stay in "
                "`keep`, or leave the draft out first (`qconvert mtp drop`, or the step `drop: {what: "
                "mtp}` before this one)"
            )
        groups = first_int(text_config(plan.config), _GROUPS) or 1
        made = chosen(self.stats, self.by, layers, dims.num_experts, experts, groups)
        return Choice({**made.kept, **listed}, made.notes, made.digest, made.share)


def _loss(before: int, experts: int, choice: Choice, by: By) -> str:
    """Text of what each layer loses; of a choice by statistics, by which, and its share
    of what routers chose."""
    said = f"leaves out {before - experts} of a layer's {before} experts"
    if choice.share is None:
        return said
    return f"{said}, by {by}, which had {choice.share:.3g} % of what routers chose"


def read_keep(file: str) -> dict[int, tuple[int, ...]]:
    """The lists of a JSON file {"layers": {"3": [0, 5, ...], ...}}. Raises DataError."""
    try:
        found = parse_object(read_regular(Path(file), error=DataError), file, error=DataError)
    except FileNotFoundError as error:
        raise DataError(f"{file}: there is no such file") from error
    layers = found.get("layers")
    for layer, numbers in layers.items() if isinstance(layers, Mapping) else [("layers", layers)]:
        of_numbers = isinstance(numbers, list) and all(type(n) is int for n in numbers)
        if not is_number(layer) or not of_numbers:
            raise DataError(
                f'{file}: expected {{"layers": {{"3": [0, 5, ...]}}}}, experts by layer, found '
                f"{shortened(repr({layer: numbers}), 80)}"
            )
    return {int(layer): tuple(numbers) for layer, numbers in found["layers"].items()}


# --- Layers and their experts --------------------------------------------------------------------


def _blocks(plan: Plan) -> dict[str, int]:
    """The modules that hold routed experts (`model.layers.3.mlp`), each with its layer; draft layers are
    numbered on. Raises PlanError for experts that are not those that the config counts."""
    index, dims = plan.role_index, plan.role_index.dims
    found: dict[str, int] = {}
    numbers: dict[str, set[int]] = {}
    for name in plan.tensors:
        if not index.kind(name).routed:
            continue
        base = _base(name)
        _, layer, expert = parse(name)
        if layer is None:
            raise PlanError(f"{name!r}: belongs to experts, and its layer is not known")
        if base not in found:
            draft = plan.family.is_mtp(name, dims) and layer < dims.num_layers
            found[base] = layer + dims.num_layers if draft else layer
        if expert is not None:
            numbers.setdefault(base, set()).add(expert)
    if len(set(found.values())) < len(found):
        raise PlanError("a layer has several sets of routed experts, which are not told apart here")
    for base, experts in numbers.items():
        if experts != set(range(dims.num_experts)):
            raise PlanError(
                f"{base}: expected the {dims.num_experts} experts that the config counts, found "
                f"{len(experts)} with numbers up to {max(experts)}"
            )
    missing = sorted(set(dims.groups.get("moe", ())) - set(found.values()))
    if missing:
        raise PlanError(f"layer {missing[0]}: its experts are missing")
    return dict(sorted(found.items(), key=lambda one: one[1]))


def _base(name: str) -> str:
    return apart_experts(name).rpartition(".")[0]


def _check_count(plan: Plan, experts: int) -> None:
    """Raise PlanError for a number of experts that the model's router cannot choose among."""
    before, text = plan.role_index.dims.num_experts, text_config(plan.config)
    if not 0 < experts < before:
        raise PlanError(
            f"expected to keep fewer than the model's {before} experts, found {experts}"
        )
    top, groups = first_int(text, *_TOP_K), first_int(text, _GROUPS) or 1
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise PlanError(
            f"the router chooses among {groups} groups first ({_GROUPS}), by the two best of each: "
            f"expected a multiple of {groups}, and 2 or more for each, found {experts} experts"
        )
    most = experts // groups * (first_int(text, _TOP_GROUPS) or groups)
    if top > most:
        raise PlanError(
            f"a token has {top} experts, and could choose among {most} alone; keep more"
        )


def _check_lists(plan: Plan, kept: Kept, blocks: Mapping[str, int], experts: int) -> None:
    """Raise PlanError for lists that do not fit the model."""
    layers, before = set(blocks.values()), plan.role_index.dims.num_experts
    groups = first_int(text_config(plan.config), _GROUPS) or 1
    missing, extra = sorted(layers - kept.keys()), sorted(kept.keys() - layers)
    if missing or extra:
        where = f"no list for layer {missing[0]}" if missing else f"a list for layer {extra[0]}"
        raise PlanError(
            f"found {where}; expected one for each of the {len(layers)} layers with routed experts, "
            f"{min(layers)} to {max(layers)} (draft layers are numbered on from the model's own)"
        )
    for layer, numbers in sorted(kept.items()):
        wrong = [n for n in numbers if not 0 <= n < before]
        if wrong:
            raise PlanError(
                f"layer {layer}: expected experts from 0 to {before - 1}, found {wrong[0]}"
            )
        if len(numbers) != experts or len(set(numbers)) != experts:
            raise PlanError(
                f"layer {layer}: expected a list of {experts} different experts, found "
                f"{len(set(numbers))}; configs of models have one count for all layers"
            )
        by_group = [sum(n * groups // before == group for n in numbers) for group in range(groups)]
        if len(set(by_group)) > 1:
            raise PlanError(
                f"layer {layer}: expected {experts // groups} experts of each of the {groups} groups "
                f"among which the router chooses first ({_GROUPS}), found {by_group}"
            )


# --- Tensors -------------------------------------------------------------------------------------


def _moved(
    plan: Plan, keep: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Output], dict[str, None]]:
    """The tensors that stay, and the sources of which something goes. Raises PlanError for one that
    depends on the experts in a way that is not known."""
    tensors: dict[str, Output] = {}
    gone: dict[str, None] = {}
    places = {base: {old: new for new, old in enumerate(kept)} for base, kept in keep.items()}
    routers: set[str] = set()
    for name, output in plan.tensors.items():
        if plan.role_index.kind(name).routed:
            base, expert = _base(name), parse(name).expert
            if expert is None:
                taken = _of_stack(plan, name, output, keep[base])
                if ".router." in name:  # JetMoE's
                    routers.add(base)
            elif expert in places[base]:
                before, _, after = name.partition(f".experts.{expert}.")
                tensors[f"{before}.experts.{places[base][expert]}.{after}"] = output
                continue
            else:
                gone.update(dict.fromkeys(source_names(name, output)))
                continue
        else:
            found = _block_of(name, keep)
            taken = output if found is None else _of_router(plan, name, output, found, keep[found])
            if found is not None and taken is not output and len(output.type.shape) > 1:
                routers.add(found)
        tensors[name] = taken
        if taken is not output:
            gone.update((source.name, None) for source in _sources(output))
    alone = next((base for base in keep if base not in routers), None)
    if alone is not None:
        raise PlanError(
            f"{alone}: no router [{plan.role_index.dims.num_experts} experts, ...] is known beside its "
            "experts, whose rows would have to go"
        )
    return tensors, gone


def _sources(output: Output) -> Iterable[Source]:
    """Sources of which it has bytes. Those that an op reads stay, whatever is taken of its result."""
    return (source for source, _, _ in output.sources)


def _block_of(name: str, keep: Mapping[str, Any]) -> str | None:
    """The module with experts that a tensor is in."""
    module = name.rpartition(".")[0]
    while module and module not in keep:
        module = module.rpartition(".")[0]
    return module or None


def _of_stack(plan: Plan, name: str, output: Output, numbers: Sequence[int]) -> Output:
    """Some experts of a stack [E, ...]; one number for all experts as it is."""
    if output.type.numel == 1:
        return output
    if output.type.shape[:1] != (plan.role_index.dims.num_experts,) or name.endswith("_shape"):
        raise PlanError(
            f"{name!r}: belongs to routed experts, and is no stack of "
            f"{plan.role_index.dims.num_experts}, but {output.type}; take the experts apart or "
            "dequantize them first"
        )
    return _rows(output, numbers)


def _of_router(plan: Plan, name: str, output: Output, base: str, numbers: Sequence[int]) -> Output:
    """Rest of a tensor beside the experts. Raises PlanError where it has to do with them in a
    way that is not known."""
    kind, shape = plan.role_index.kind(name), output.type.shape
    below, experts = name.removeprefix(f"{base}."), plan.role_index.dims.num_experts
    if kind not in _MAY_CHOOSE or "share" in below:
        return output
    chooses = kind is Kind.ROUTER or _CHOOSES.search(below) is not None
    if chooses and output.type.dtype not in _FLOATS and output.type.numel > 1:
        why = "sends tokens to experts by their numbers" if "tid2eid" in below else "is quantized"
        fix = "keep all experts" if "tid2eid" in below else "dequantize it first"
        raise PlanError(
            f"{name!r}: {why} ({output.type}), so that no expert can be left out; {fix}"
        )
    if chooses and shape[:1] == (experts,):
        return _rows(output, numbers)
    if chooses and shape == (1, experts):
        return _rows(output.reshape((experts,)), numbers).reshape((1, len(numbers)))
    of_each = shape[:1] == (experts,) or shape == (1, experts)
    if (
        (kind is Kind.ROUTER and output.type.numel > 1)
        or (chooses and experts in shape)
        or (of_each and kind is not Kind.LINEAR)
    ):
        raise PlanError(
            f"{name!r}: {output.type} beside {experts} experts, and which part of it belongs to which "
            "is not known; expected a row for each"
        )
    return output


def _rows(output: Output, numbers: Sequence[int]) -> Output:
    return concat([output.rows(number, number + 1) for number in numbers])


# --- Config and lists ----------------------------------------------------------------------------


def _config(plan: Plan, experts: int, rename: Callable[[str], str | None]) -> dict[str, Any]:
    """The config with the new count, and with quantization blocks that name experts by their new
    numbers. Raises PlanError for other settings that count experts."""
    before = plan.role_index.dims.num_experts
    found = _counted(plan.config, before, experts, rename)
    made = plan.family.dims(found).num_experts
    if made != experts:
        raise PlanError(f"the config would count {made} experts where {experts} stay")
    return found


def _counted(
    config: Mapping[str, Any], before: int, experts: int, rename: Callable[[str], str | None]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in QUANTIZATION_KEYS:
            found[key] = _renamed(value, rename)
        elif isinstance(value, Mapping) and key in _LANGUAGE:
            found[key] = _counted(value, before, experts, rename)
        elif key in EXPERT_COUNTS and value == before:
            found[key] = experts
        elif (
            "expert" in key
            and not any(word in key for word in _NO_COUNTS)
            and _counts(value, before)
        ):
            raise PlanError(
                f"config.json: {key} is {value!r} for {before} experts, and what it would be for fewer "
                "is not known"
            )
        else:
            found[key] = value
    return found


def _counts(value: Any, experts: int) -> bool:
    """Return whether a setting may be of each expert, or count them."""
    if isinstance(value, list):
        return len(value) == experts or experts in value
    return type(value) is int and value == experts


@dataclass(frozen=True)
class _Renamed:
    """New name of an entry in a list: an expert's with its new number, None for one that goes. Raises
    PlanError for a pattern that names experts by their numbers, and for experts of an unknown module."""

    keep: Mapping[str, tuple[int, ...]]

    def __call__(self, text: str) -> str | None:
        named = _NAMED.fullmatch(text)
        if named is None:
            if _BY_PATTERN.search(text):
                raise PlanError(
                    f"{text!r} names experts by numbers, which will be others; write the list of the "
                    "quantization config without it (`qconvert repair`), or with names"
                )
            return text
        base = named["base"].removesuffix("experts").removesuffix(".")
        fits = [
            one for one in self.keep
            if one == base or f".{one}".endswith(f".{base}") or f".{base}".endswith(f".{one}")
        ]  # fmt: skip
        if len(fits) != 1:
            raise PlanError(f"{text!r} names an expert, and of which layer is not known")
        kept, old = self.keep[fits[0]], int(named["expert"])
        return f"{named['base']}.{kept.index(old)}{named['rest']}" if old in kept else None


def _renamed(value: Any, rename: Callable[[str], str | None]) -> Any:
    """JSON with every text in it renamed; entries and keys of which nothing is left go."""
    if isinstance(value, Mapping):
        names = {key: rename(key) for key in value}
        return {new: _renamed(value[key], rename) for key, new in names.items() if new is not None}
    if isinstance(value, list):
        kept = [one for one in value if not isinstance(one, str) or rename(one) is not None]
        return [_renamed(one, rename) for one in kept]
    return rename(value) if isinstance(value, str) else value


def _files(plan: Plan, rename: Callable[[str], str | None]) -> dict[str, str]:
    """Side files that describe quantized modules by name, with new numbers, where they name experts."""
    found: dict[str, str] = {}
    for name in plan.side_files:
        if name not in _LISTS and not is_description(name):
            continue
        data = plan.checkpoint.read(name)
        old = {} if data is None else parse_object(data, name)
        new = _renamed(old, rename)
        if new != old:
            found[name] = json.dumps(new, indent=4) + "\n"
    return found


PASSES = (Prune,)
