"""Base of passes whose encoder looks at a row at a time and whose result is compressed-tensors'
alone: choose matrices, encode them, state it.

Linears in block FP8 that are no target stay so, as a second group of the config. Draft (MTP) layers'
linears stay as they are; their experts are encoded with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from re import escape
from typing import Any

from qconvert.core.errors import PlanError
from qconvert.core.fused_names import with_fused_names
from qconvert.core.graph import Output, apply
from qconvert.formats.base import Stored
from qconvert.formats.fp8.config import fp8_group_config
from qconvert.models.linears import runtime_linears
from qconvert.models.unquantized import (
    Named,
    check_nothing_packed,
    experts_of_class,
    fp8_block,
    ignored,
    shared_paths,
    with_weight_scales,
)
from qconvert.ops.rowwise import Recode, RowOp
from qconvert.passes.ranks import Block, check_tp, loads_at, loads_note
from qconvert.passes.replace_weights import Selection, replace_weights, select
from qconvert.passes.shared_experts import SharedExperts, shared_notes, with_shared
from qconvert.plan.plan import Plan

Group = Callable[[Iterable[str]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ByRow:
    """Quantization of the matrices that a pass chooses: the op that encodes them, the names of its
    results, the group of the config for targets, and rows and columns of which ranks get whole ones.
    `form` is what the encoding is called."""

    form: str
    encoder: RowOp
    suffixes: tuple[str, ...]
    group: Group
    block: Block
    linears: bool
    shared_experts: SharedExperts | None
    tp: int | None

    def chosen(self, plan: Plan) -> Selection:
        """Return what the targets select of a plan; linears whose columns are no whole blocks are
        left."""
        keep = self.shared_experts == "keep"
        found, _ = select(plan, self.linears, self._fits, keep_shared=keep)
        experts = found.experts
        if not found.linears and not (experts is not None and experts.projections):
            raise PlanError(f"no linear layer found that runtimes load in {self.form}")
        drafts = experts is not None and any(p.draft for p in experts.projections)
        found = with_shared(
            plan,
            found,
            self.shared_experts,
            lambda selection: self._config(plan, selection)[0],
            drafts=drafts,
        )
        check_tp(found, self.block, self.tp)
        return found

    def _fits(self, stored: Stored) -> bool:
        return stored.columns % self.block[1] == 0

    def planned(
        self, plan: Plan, name: str, options: Mapping[str, Any], notes: Iterable[str] = ()
    ) -> Plan:
        """The plan of the pass `name` with these options."""
        chosen = self.chosen(plan)
        block, others = self._config(plan, chosen)
        made: dict[str, Output] = {}
        for module, _, stored in chosen:
            try:
                results = apply(Recode(stored.decoder, (self.encoder,)), *stored.args)
            except PlanError as error:
                raise PlanError(f"{module}: {error}") from error
            names = [f"{module}.{suffix}" for suffix in self.suffixes]
            made.update(zip(names, results, strict=True))
        sizes = loads_at(chosen, self.block)
        said = [*notes, *shared_notes(plan, chosen, block), loads_note(sizes)]
        if chosen.left:
            said.append(
                f"{len(chosen.left)} linears left as they are: no whole groups of {self.block[1]}"
            )
        return replace_weights(
            plan,
            chosen.entry(name, options, said),
            {**others, **made},
            dropped=chosen.dropped(plan),
            block=block,
            facts={"tp_sizes": sizes},
        )

    def _config(self, plan: Plan, chosen: Selection) -> tuple[dict[str, Any], Named]:
        """The config's block for what is chosen, and the tensors that stay, under their new names."""
        others: Named = chosen.others(plan)
        check_nothing_packed(others)
        fp8 = fp8_block(plan, runtime_linears(plan, others))
        if fp8 is not None:
            others = with_weight_scales(others)
        experts = chosen.experts is not None
        left = ignored(plan, others, experts=experts, shared=bool(chosen.shared))
        return compressed_block(plan, chosen, self.group, left, fp8=fp8), others


def compressed_block(
    plan: Plan,
    chosen: Selection,
    group: Group,
    left: Sequence[str],
    *,
    fp8: tuple[int, int] | None = None,
    but: str = "",
) -> dict[str, Any]:
    """compressed-tensors' block for what is chosen, in the group's own format; `left` are the modules
    that stay unquantized. Where `Linear` means those that stay in FP8, in blocks `fp8`, others go by
    name, also by that of what they are fused to: runtimes find a class before the parts. `but`: how
    patterns of experts begin, to except some."""
    targets = ["Linear"]
    if not chosen.plain or fp8 is not None:
        paths = plan.family.expert_paths if chosen.experts and chosen.experts.projections else ()
        below = [f"{path}." for path in paths] + (shared_paths(plan) if chosen.shared else [])
        targets = [rf"re:{but}.*{escape(path)}.*" for path in below]
        targets += experts_of_class(plan) if paths else []
        targets += with_fused_names(chosen.plain)
    first = group(targets)
    groups: dict[str, Mapping[str, Any]] = {"group_0": first}
    if fp8 is not None:
        groups["group_1"] = fp8_group_config(fp8)
    return {
        "quant_method": "compressed-tensors",
        "format": first["format"] if fp8 is None else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(left),
    }
