"""Simulator of vLLM's loader: `simulate` builds the rank's parameters from the config and the table of
its class, offers every tensor of the headers to them, and says what is written, read, refused or
misread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.shown import count
from qconvert.runtimes.classes.build import Built, after_load, built, in_right_groups
from qconvert.runtimes.classes.names import RecordedNames, of_draft
from qconvert.runtimes.classes.record import Record, architecture_of, check_form, class_record
from qconvert.runtimes.loading.building import RankBuild, text_config
from qconvert.runtimes.loading.load_weights import SimulatedLoad, Tensors, offered
from qconvert.runtimes.loading.parameters import Experts, Linear, Parameter, Whole
from qconvert.runtimes.loading.schemes import Named, Unquantized
from qconvert.runtimes.loading.setting import HOPPER, LoadRefused, NotSimulated, Setting
from qconvert.runtimes.vllm.ignore_matching import Renames
from qconvert.runtimes.vllm.quantization import ModelFacts, quantization_of, refuse_forms
from qconvert.runtimes.vllm.schemes import LinearPart, expert_part


@dataclass
class Rank(RankBuild):
    """With vLLM's ways to put a tensor into a parameter."""

    def cache_scales(self, module: str, *, latent: bool = False) -> None:
        """Scales of attention, 1 unless given; modelopt's methods alone have those of latent attention
        (their get_quant_method)."""
        if latent and not self.quantization.name.startswith("modelopt"):
            return
        if self.quantization.name == "compressed-tensors":
            for which in ("k", "v", "q"):
                for name, dtype in (("scale", "F32"), ("zero_point", self.dtype)):
                    made = Parameter(dtype, (1,), Whole(), needed=False, default=True)
                    self.parameters[f"{module}.{which}_{name}"] = made
        elif self.quantization.cache:
            for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
                made = Parameter(self.dtype, (), Whole(), needed=False, default=True)
                self.parameters[f"{module}.{name}"] = made

    def _add(self, module: str, named: Named) -> None:
        RankBuild._add(self, module, ((name, _converted(made)) for name, made in named))


def _converted(parameter: Parameter) -> Parameter:
    """The same parameter with vLLM's way to put a tensor into it."""
    slot = parameter.slot
    if isinstance(slot, Linear) and not isinstance(slot, LinearPart):
        parameter.slot = LinearPart(slot.layout, slot.role, slot.block, slot.packed)
    elif isinstance(slot, Experts):
        parameter.slot = expert_part(parameter)
    return parameter


# Scales of a cache that a quantized model may have, and need not have a place for.
_OF_CACHES = ("q_scale", "k_scale", "v_scale", "q_zero_point", "k_zero_point", "v_zero_point")


def simulate(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    setting: Setting | None = None,
    *,
    groups: int | None = None,
    draft: bool = False,
    version: str | None = None,
) -> SimulatedLoad:
    """Load a folder on one rank: its config.json and the headers of its tensors, in the order of its
    files. `groups`: in how many groups the rows of its fused linear-attention projections are, 0 for
    split ones, as its manifest states; headers cannot show it, and without it any order is taken for
    right. `draft`: load the draft model that the folder holds. `version`: of vLLM, whose table of the
    class is asked, in forms that were compared with the loader. Raises NotSimulated for what has no rule
    here, a class among it, unless vLLM refuses the quantization of any."""
    asked = setting or Setting()
    try:
        refuse_forms(config, tensors)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused)
    record = class_record("vllm", architecture_of(config), version, draft=draft)
    own = of_draft(record, text_config(config), tensors) if draft else tensors
    check_form(record, config, own, asked)
    return by_table(record, config, tensors, asked, groups)


def _check_setting(asked: Setting) -> None:
    """Raise NotSimulated for a server that there are no rules for."""
    if asked.capability != HOPPER or asked.a2a != "none" or asked.moe_runner != "auto":
        raise NotSimulated("another GPU than an H200, or other options")
    if asked.ep not in (1, asked.tp):
        raise NotSimulated(f"ep {asked.ep}: vLLM divides all experts among its {asked.tp} ranks")


def _check_heads(rank: Rank, heads: int) -> None:
    """Raise LoadRefused where ranks cannot share heads; a config without any has 0."""
    if heads % rank.setting.tp:
        raise LoadRefused(
            "ValidationError", "must be divisible by tensor parallel size", "config.json",
            f"{heads} heads cannot be divided among {rank.setting.tp} ranks",
        )  # fmt: skip


def _check_stage(record: Record) -> None:
    """Raise LoadRefused for a stage without experts of a class that needs one."""
    if not any(module.kind == "experts" for module in record.modules):
        return
    if record.needs_experts is None:
        raise NotSimulated("a stage without experts, which some classes refuse")
    if record.needs_experts:
        why = "a stage of this class must have a layer with experts"
        raise LoadRefused("RuntimeError", "", "model.layers", why)


# Classes that give their towers no quantization config of compressed-tensors (models/kimi_k25.py,
# _maybe_ignore_quant_config), and the towers: they ask for the config's own class, which no spy is of.
_PLAIN_TOWERS = {"KimiK25ForConditionalGeneration": ("vision_tower.", "mm_projector.")}


def _with_plain_tower(record: Record) -> Record:
    towers = _PLAIN_TOWERS.get(record.architecture)
    if towers is None:
        return record
    modules = tuple(
        replace(one, unquantized=(*one.unquantized, "compressed-tensors"))
        if one.name.startswith(towers) else one
        for one in record.modules
    )  # fmt: skip
    return replace(record, modules=modules)


def by_table(
    record: Record,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    asked: Setting,
    groups: int | None = None,
) -> SimulatedLoad:
    """Load a folder on one rank by the table of its class, in whatever form."""
    try:
        refuse_forms(config, tensors)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused)
    _check_setting(asked)
    try:
        made, finder = built_rank(record, config, tensors, asked)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused)
    rank, sizes = made.build, made.sizes
    quantized = bool(rank.quantization.name)

    def after(build: RankBuild, tensors: Mapping[str, TensorType]) -> None:
        after_load(made)
        if not quantized:
            _all_written(build, draft=record.draft)

    done = offered(rank, finder, Tensors.of(tensors).by_name, asked, after=after)
    return in_right_groups(record, sizes, done, groups, tensors)


def built_rank(
    record: Record, config: Mapping[str, Any], tensors: Mapping[str, TensorType], asked: Setting
) -> tuple[Built, RecordedNames]:
    """A rank's parameters before any tensor is offered, and where the class puts which tensor. Raises
    LoadRefused as vLLM would, and NotSimulated."""
    if record.draft and asked.pp > 1:
        raise NotSimulated("a draft in pipeline stages")
    numbers = text_config(config)
    plain, sizes = Unquantized(numbers.dtype), record.sizes({**config, **numbers.values})
    renames = Renames()
    for mapper in reversed(record.mappers):
        renames = Renames(mapper.starts, mapper.parts, mapper.ends, mapper.patterns, renames)
    facts = ModelFacts(record.packed, renames, plain, tensors, record.version)
    layers = next((sizes.of(size) for size in record.layers.values()), 0)
    rank = Rank(_in_stages(asked, layers), quantization_of(config, facts), numbers.dtype)
    heads = "num_attention_heads"
    _check_heads(rank, 0 if sizes.flag(heads) is None else sizes.of(heads))
    made = built(_with_plain_tower(record), rank, sizes, tensors)
    if asked.pp > 1 and not made.experts:
        _check_stage(record)
    quantized = bool(rank.quantization.name)
    skipped = ("g_idx",) if quantized else ()
    return made, RecordedNames(made, skipped, _OF_CACHES if quantized else ())


def _in_stages(setting: Setting, layers: int) -> Setting:
    """The setting with the partition that vLLM makes where none is stated: the stages counted backwards
    from the second-last own one layer more (distributed/utils.py, get_pp_indices)."""
    if setting.pp == 1:
        return setting
    if setting.partition is not None:
        if sum(setting.partition) != layers:
            raise LoadRefused(
                "ValueError", "does not match", "model.layers",
                f"the partition {list(setting.partition)} is not of {layers} layers",
            )  # fmt: skip
        return setting
    share, rest = divmod(layers, setting.pp)
    sizes = [share] * setting.pp
    for number in range(2, rest + 2):
        sizes[-number] += 1
    return replace(setting, partition=tuple(sizes))


_NOT_WRITTEN = "Following weights were not initialized from checkpoint"


def _all_written(build: RankBuild, *, draft: bool) -> None:
    """The loader's own check, of unquantized models alone: norms and the like that no tensor came to.
    Linears, experts and embeddings are not looked at (default_loader.py, track_weights_loading). Of a
    draft some classes say it in words of their own."""
    empty = [
        name
        for name, parameter in build.parameters.items()
        if not parameter.parts and not _is_exempt(name, build)
    ]
    if empty:
        raise LoadRefused(
            "ValueError", "" if draft else _NOT_WRITTEN, empty[0],
            f"{count(len(empty), 'parameter')} have no tensor in the folder",
        )  # fmt: skip


def _is_exempt(name: str, build: RankBuild) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:number]) in build.schemes for number in range(1, len(parts)))
