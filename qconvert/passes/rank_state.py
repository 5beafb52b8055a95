"""Folders of tensor-parallel ranks for vLLM's loader of sharded states: each holds the parameters of one
rank, cut and fused as the loader copies them."""

from __future__ import annotations

from struct import pack

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply, concat
from qconvert.core.manifest_keys import RANK
from qconvert.core.versions import VLLM
from qconvert.ops.constant import Constant, Zeros
from qconvert.ops.rowwise import Share
from qconvert.plan.plan import ELSEWHERE, LogEntry, Plan
from qconvert.runtimes.classes.record import architecture_of
from qconvert.runtimes.loading.setting import Setting
from qconvert.runtimes.vllm.rank_state import Held, Taken, rank_state

# Classes whose folders vLLM's own loader was given, at several numbers of ranks, with every parameter
# compared with a load of the checkpoint (tests/loaders/test_rank_state.py). Others may change numbers on
# loading, which no table of names shows.
COMPARED = frozenset({
    "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
})  # fmt: skip
_UNREAD = f"{ELSEWHERE} of a draft, or a table of positions, which vLLM's class reads in no rank"
_OTHERS = f"{ELSEWHERE} routed experts that other ranks hold"
_BYTES = {"F32": "<f", "F16": "<e"}


def split_ranks(plan: Plan, tp: int, ep: int = 1) -> list[Plan]:
    """A plan for each of `tp` ranks; with `ep` (1, or `tp`) ranks have whole experts.

    Raises PlanError for a class or a scheme that was not compared with vLLM's loader, for sizes that so
    many ranks cannot share, and where a row of a tensor that is read would reach no rank.
    """
    architecture = architecture_of(plan.config)
    if architecture not in COMPARED:
        raise PlanError(
            f"{architecture}: its sharded state was not compared with vLLM's loader; those of "
            f"{', '.join(sorted(COMPARED))} were"
        )
    if tp < 2 or ep not in (1, tp):
        raise PlanError(f"expected 2 ranks or more, and --ep 1 or {tp}, found --tp {tp} --ep {ep}")
    types = {name: output.type for name, output in plan.tensors.items()}
    states = [rank_state(plan.config, types, Setting(tp, rank, ep=ep)) for rank in range(tp)]
    read = _check_union(plan, states)
    for name in plan.tensors.keys() - read:
        draft = plan.family.is_mtp(name, plan.role_index.dims)
        if not draft and not name.endswith("rotary_emb.inv_freq"):
            raise PlanError(
                f"{name!r}: vLLM's {architecture} reads it in no rank; leave it out first (`drop`)"
            )
    plans = []
    for rank, state in enumerate(states):
        tensors = {name: _made(plan, held) for name, held in state.items()}
        own = {one.tensor for held in state.values() for one in held.taken}
        dropped = {
            **{name: _OTHERS for name in plan.tensors if name in read - own},
            **{name: _UNREAD for name in plan.tensors if name not in read},
        }
        for name in dropped:
            if name not in plan.checkpoint:
                raise PlanError(f"{name!r} is computed by an earlier pass and is in no rank {rank}")
        entry = LogEntry("split_ranks", {"tp": tp, "ep": ep, "rank": rank}, len(own), None)
        fact = {
            "folder": f"rank-{rank}-of-{tp}", "number": rank, "of": tp, "ep": ep,
            "runtime": f"vllm=={VLLM.version}",
        }  # fmt: skip
        plans.append(
            plan.logged(
                entry, tensors=tensors, dropped={**plan.dropped, **dropped},
                facts={**plan.facts, RANK: fact},
            )
        )  # fmt: skip
    return [one.check() for one in plans]


def _check_union(plan: Plan, states: list[dict[str, Held]]) -> set[str]:
    """The tensors that any rank reads. Raises PlanError for one of which a part reaches none."""
    spans: dict[str, set[tuple[int, int, int, int]]] = {}
    for state in states:
        for held in state.values():
            for one in held.taken:
                place = one.start, one.stop, one.share, one.of
                spans.setdefault(one.tensor, set()).add(place)
    for name, found in spans.items():
        of = {place[3] for place in found}
        every = max(of)
        for share in range(every):
            at = 0
            for start, stop, _, _ in sorted(p for p in found if p[2] == share or p[3] == 1):
                at = max(at, stop) if start <= at else at
            shape = plan.tensors[name].type.shape
            if at != (shape[0] if shape else 1) or len(of) > 1:
                raise PlanError(f"{name!r}: rows from {at} on would reach no rank")
    return set(spans)


def _made(plan: Plan, held: Held) -> Output:
    """The output of a parameter."""
    kind = held.type
    if held.number is not None:
        return apply(Constant(kind.dtype, kind.shape, _hex(kind.dtype, held.number)))[0]
    parts = [_part(plan, one) for one in held.taken]
    if not kind.shape:
        return parts[0].reshape(())
    first = parts[0].type
    rows = kind.numel // max(1, first.row_nbytes * 8 // _bits(first))
    missing = rows - sum(part.type.shape[0] for part in parts)
    if missing:
        parts.append(apply(Zeros(first.with_rows(missing)))[0])
    return concat(parts).reshape(kind.shape)


def _bits(kind: TensorType) -> int:
    return kind.nbytes * 8 // max(1, kind.numel)


def _hex(dtype: str, value: float) -> str:
    if dtype == "BF16":
        return pack("<f", value)[2:].hex()  # exact for powers of two
    return pack(_BYTES[dtype], value).hex()


def _part(plan: Plan, one: Taken) -> Output:
    output = plan.tensors[one.tensor]
    rows = output.reshape(output.type.shape or (1,)).rows(one.start, one.stop)
    return rows if one.of == 1 else apply(Share(one.share, one.of), rows)[0]
