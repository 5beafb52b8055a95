"""join_ranks: files of tensor-parallel ranks (Grok-2's) as one checkpoint, for any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qconvert.checkpoint.ranks import parts_in
from qconvert.core.errors import PlanError
from qconvert.core.family import first_int, text_config
from qconvert.core.graph import Output, apply, concat
from qconvert.ops.gather import Gather, SideBySide
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

# Experts as ranks cut them: w1 (gate) and w3 (up) by rows, w2 (down) by columns.
_EXPERT = re.compile(r".*\.experts\.\d+\.(w1|w2|w3)\.weight")
# sglang's class takes experts for parts of a rank unless the config says that they are whole.
PRESHARDED = "load_presharded_moe"
_OTHERS = ("load_presharded_attn", "load_presharded_mlp", "load_presharded_embedding")


@dataclass(frozen=True, slots=True)
class JoinRanks:
    """Put the parts of all tensor-parallel ranks together, byte for byte.

    The config states that experts are whole (`load_presharded_moe`).

    Raises PlanError for a checkpoint that is in no parts, for parts of ranks that are missing or not
    alike, for a tensor of which it is not known how ranks cut it, and for sizes that are not the
    config's.
    """

    name: ClassVar[str] = "join_ranks"

    def __call__(self, plan: Plan) -> Plan:
        found = parts_in(plan.tensors)
        if not found:
            raise PlanError(
                "expected files of tensor-parallel ranks (*-TP-000.safetensors), found none"
            )
        stated = next((key for key in _OTHERS if plan.config.get(key)), None)
        if stated is not None:
            raise PlanError(
                f"config.json states {stated}, and how ranks cut those layers is not known here"
            )
        ranks = max(len(parts) for parts in found.values())
        tensors = {name: one for name, one in plan.tensors.items() if "[TP-" not in name}
        for name, parts in found.items():
            tensors[name] = _whole(plan, name, parts, ranks)
        config = {**plan.config, PRESHARDED: False}
        notes = (f"parts of {ranks} ranks",)
        entry = LogEntry(self.name, options_of(self), len(found), None, notes)
        return plan.logged(entry, tensors=tensors, config=config)


def _whole(plan: Plan, name: str, parts: Mapping[int, Output], ranks: int) -> Output:
    """A tensor of the parts of all ranks."""
    match, first = _EXPERT.fullmatch(name), parts.get(0)
    missing = next((rank for rank in range(ranks) if rank not in parts), None)
    if missing is not None or first is None:
        raise PlanError(
            f"{name!r}: expected a part in the files of each of {ranks} ranks, found none of rank "
            f"{missing}; copy its file again"
        )
    other = next((rank for rank, one in parts.items() if one.type != first.type), None)
    if other is not None:
        raise PlanError(
            f"{name!r}: expected parts alike, found {first.type} of rank 0 and "
            f"{parts[other].type} of rank {other}"
        )
    if match is None or len(first.type.shape) != 2:
        raise PlanError(
            f"{name!r}: each rank has a part ({first.type}), and of weights of experts alone is it "
            "known how ranks cut them: w1 and w3 by rows, w2 by columns"
        )
    if name in plan.tensors:
        raise PlanError(f"{name!r}: is in a common file, and in parts of ranks; remove one of them")
    inner = first_int(text_config(plan.config), "moe_intermediate_size", "intermediate_size")
    cut = first.type.shape[1 if match[1] == "w2" else 0]
    if inner and cut * ranks != inner:
        raise PlanError(
            f"{name!r}: expected {inner} for all ranks, as config.json states, found {ranks} parts of "
            f"{cut}"
        )
    ordered = [parts[rank] for rank in range(ranks)]
    if match[1] != "w2":
        return concat(ordered)
    rows, columns = first.type.shape
    (rows_in_turn,) = apply(Gather(SideBySide(ranks)), *ordered)
    return rows_in_turn.reshape((rows, ranks * columns))


PASSES = (JoinRanks,)
