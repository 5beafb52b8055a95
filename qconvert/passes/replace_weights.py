"""Replacing of weights, as every pass does it that changes their form: new tensors in place of the old
ones, and what is stale is dropped.

Stale is what describes the old weights alone: the config blocks and side files of an earlier
quantization, and where none follows the scales of a KV cache. Runtimes have a place for those in layers
of attention that a quantization config is asked about: in a folder without one sglang passes
over them, and vLLM ends the load (AutoWeightsLoader looks for them in the fused projection).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import ASCEND, DESCRIPTION, HF_QUANT_CONFIG, is_description
from qconvert.checkpoint.quantization_config import complete_ignore_lists
from qconvert.core.errors import PlanError
from qconvert.core.family import without_quantization
from qconvert.core.graph import Output, Source
from qconvert.core.names import KV_SCALES
from qconvert.formats.nvfp4.format import hf_quant_config
from qconvert.plan.plan import Calibrating, LogEntry, Plan

if TYPE_CHECKING:
    from qconvert.samples.request import Calibration

OF_CACHE_RULE = "elsewhere: scales of a KV cache, which no runtime reads beside unquantized weights"
# What modelopt and GPTQ write beside config.json about the weights of a folder.
_STALE_FILES = (HF_QUANT_CONFIG, "quantize_config.json")


# What DeepSeek-V4's experts are stored in; vLLM takes FP4 where nothing is stated
# (models/deepseek_v4/quant_config.py).
_EXPERTS, _STATED_IN = "expert_dtype", "deepseek_v4"


def with_experts_in(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config that states what the experts are in, if its class asks for that."""
    asked = _EXPERTS in config or config.get("model_type") == _STATED_IN
    return {**config, **({_EXPERTS: dtype} if asked else {})}


def replace_weights(
    plan: Plan,
    entry: LogEntry,
    tensors: Mapping[str, Output],
    *,
    dropped: Mapping[str, str],
    block: Mapping[str, Any] | None = None,
    dropped_files: Mapping[str, str] | None = None,
    new_files: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
    calibrate: Calibration | None = None,
    digest: str | None = None,
    linears: bool = False,
) -> Plan:
    """The plan with these `tensors` and the quantization `block` that describes them (None: none), less
    every block and side file that described the old weights, and scales of a KV cache where no block
    follows; modelopt's own file beside a block in its dialect, and msmodelslim's description in place of
    its. `dropped` are rules by source tensor,
    `dropped_files` rules by side file, of which only those count that exist. `digest` is that of the
    calibration `calibrate`, which runs the model of `plan`, and solves `linears` beside the routed
    experts. Raises PlanError for another calibration than an earlier step's."""
    stale = f"{entry.name}: its quantization block no longer holds"
    rules = {**dict.fromkeys(_STALE_FILES, stale), **(dropped_files or {})}
    rules |= dict.fromkeys(filter(is_description, plan.side_files), stale)
    rules = {name: rule for name, rule in rules.items() if name in plan.side_files}
    config = without_quantization(plan.config)
    if block is None:
        unread = [name for name, output in tensors.items() if _is_of_cache(name, output)]
        dropped = {**dropped, **sources_of(replace(plan, tensors=tensors), unread, OF_CACHE_RULE)}
        tensors = {name: output for name, output in tensors.items() if name not in {*unread}}
    files = {**plan.new_files, **(new_files or {})}
    if block is not None and block["quant_method"] == ASCEND:
        from qconvert.formats.ascend.format import description_of

        files[f"{DESCRIPTION}.json"], block = description_of(tensors), None
    if block is not None:
        config = complete_ignore_lists({**config, "quantization_config": block}, ())
        packed = any(output.type.dtype in ("I8", "U8") for output in tensors.values())
        if block["quant_method"] == "fp8" and not packed:
            config = with_experts_in(config, "fp8")
    if block is not None and block["quant_method"] == "modelopt":
        files[HF_QUANT_CONFIG] = hf_quant_config(config["quantization_config"])
    facts = {**plan.facts, **(facts or {})}
    calibration = plan.calibration
    if calibrate is not None and digest is not None:
        calibration, stated = _calibrating(plan, calibrate, digest, linears=linears)
        facts |= stated
    return plan.logged(
        entry,
        tensors=tensors,
        config=config,
        dropped={**plan.dropped, **dropped},
        side_files=tuple(name for name in plan.side_files if name not in rules),
        dropped_files={**plan.dropped_files, **rules},
        new_files=files,
        facts=facts,
        calibration=calibration,
    )


def _is_of_cache(name: str, output: Output) -> bool:
    """Tell whether a tensor is a scale of keys or values; of several numbers it may be a gain of the
    model's own."""
    return name.endswith(KV_SCALES) and output.type.numel == 1


def _calibrating(
    plan: Plan, asked: Calibration, digest: str, *, linears: bool
) -> tuple[Calibrating, dict[str, Any]]:
    """The calibration of a plan, and the fact that states it: steps that ask for the same one have one
    together. Raises PlanError for another than an earlier step's."""
    from qconvert.samples.request import FACT, fact

    stated = {FACT: fact(asked, digest)}
    before = plan.calibration
    if before is None:
        return Calibrating(plan, asked, linears), stated
    if before.request != asked or plan.facts.get(FACT) != stated[FACT]:
        differ = [
            f"{one.name} {getattr(before.request, one.name)!r} there, {getattr(asked, one.name)!r} here"
            for one in fields(asked)
            if getattr(before.request, one.name) != getattr(asked, one.name)
        ]
        raise PlanError(
            f"an earlier step calibrates otherwise ({'; '.join(differ) or 'on other data'}), and a run "
            "has one calibration: give both steps the same one, round in one of the two, or convert the "
            "first's result"
        )
    return replace(before, linears=before.linears or linears), stated


def sources_of(plan: Plan, names: Iterable[str], rule: str) -> dict[str, str]:
    """`rule` for every source tensor behind these tensors of a plan. Raises PlanError for one that an
    earlier pass computes."""
    return {source: rule for name in names for source in source_names(name, plan.tensors[name])}


def source_names(name: str, output: Output) -> list[str]:
    """The source tensors that an output consists of. Raises PlanError where it is computed."""
    found = []
    for piece in output.pieces:
        if not isinstance(piece.origin, Source):
            raise PlanError(
                f"{name!r} is computed by an earlier pass and dropped here: put that pass later"
            )
        found.append(piece.origin.name)
    return found
