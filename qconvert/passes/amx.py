"""amx: the routed experts as KTransformers' CPU kernels load them, and nothing else.

Experts are read in BF16, FP16, FP32, FP8 with scales, or packed INT4 and INT8, one matrix each or
stacked, in one pass over the source. The runtime reads all other layers from the folder on its GPU side,
so they are dropped here, by a named rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from qconvert.core.errors import PlanError
from qconvert.core.family import text_config
from qconvert.core.graph import Output, apply, concat
from qconvert.formats.amx.encode import Amx, AmxCodes, Rounding
from qconvert.formats.amx.format import RUNTIME_NAME, Method, check_dims
from qconvert.models.experts import STALE_RULE, Experts, Projection, calibrated, routed_experts
from qconvert.models.skip_reasons import check_not_pruned, check_runs
from qconvert.ops.rowwise import Recode, RowOp
from qconvert.passes.replace_weights import replace_weights, source_names, sources_of
from qconvert.plan.pass_options import options_with
from qconvert.plan.plan import ELSEWHERE, LogEntry, Plan
from qconvert.runtimes.ktransformers import readme, reads_as_it_is
from qconvert.samples.request import Calibration, digest_of

FACT = "amx"
_OTHER_LAYERS = f"{ELSEWHERE} no routed expert; the runtime reads it from its GPU side"
_DRAFT = "amx: mtp=drop"
_README = {"README.md": "amx: replaced by how to serve this folder"}
_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@dataclass(frozen=True, slots=True)
class ExpertsToAmx:
    """Quantize routed experts to AMX tiles for KTransformers.

    `method` is int4 or int8, for `numa` NUMA nodes; `rounding` reference (kt-kernel's own bytes) or
    search (smaller weight errors); `mtp` keep (experts of draft layers follow the model's, numbered on)
    or drop. With `calibrate` GPTQ finds the codes, but not of draft layers, for which transformers has
    no class: those are rounded.

    Raises PlanError for sizes that the kernels cannot hold, with supported NUMA counts, for an
    activation other than SiLU, and as `routed_experts` does.
    """

    name: ClassVar[str] = "amx"

    method: Method
    numa: int
    rounding: Rounding = "reference"
    mtp: Literal["keep", "drop"] = "keep"
    calibrate: Calibration | None = None

    def __call__(self, plan: Plan) -> Plan:
        check_not_pruned(plan)
        experts = self.experts(plan)
        digest = None
        if self.calibrate is not None:
            check_runs(plan)
            digest = digest_of(self.calibrate, plan.checkpoint.root)
        tensors: dict[str, Output] = {}
        for projection in self.kept(experts):
            if digest is None or projection.draft:
                tensors.update(self.shards(projection)[0])
            else:
                (made,) = calibrated(projection, (self.packer(projection),), digest)
                tensors.update(self.named(projection, made))
        return self.with_shards(plan, experts, tensors, "the repo this was made from", digest)

    def experts(self, plan: Plan) -> Experts:
        """The plan's experts, if the kernels can hold and compute them."""
        _check_activation(plan)
        dims = plan.role_index.dims
        if dims.num_experts and dims.hidden_size and dims.moe_intermediate_size:
            check_dims(self.method, dims.hidden_size, dims.moe_intermediate_size, self.numa)
        return routed_experts(plan)

    def kept(self, experts: Experts) -> list[Projection]:
        return [p for p in experts.projections if not (p.draft and self.mtp == "drop")]

    def shards(
        self, projection: Projection, beside: tuple[RowOp, ...] = ()
    ) -> tuple[dict[str, Output], list[Output]]:
        """The shards of one matrix by name (gate and up are cut by rows, down by columns), and the
        results of the encoders `beside`, which take the whole matrix: it is read and decoded once."""
        stored, numa = projection.weight, self.numa
        down = projection.kind == "down_proj"
        cuts = numa if down else 1
        own = 2 * cuts
        height = stored.rows if down else stored.rows // numa
        results: list[Output] = []
        others: list[tuple[Output, ...]] = []
        try:
            for start in range(0, stored.rows, height):
                part = stored.cut(start, start + height)
                op = _recode(part.decoder, self.method, cuts, self.rounding, beside)
                made = apply(op, *part.args)
                results += made[:own]
                others.append(made[own:])
        except PlanError as error:
            raise PlanError(f"{projection.module}: {error}") from error
        return self.named(projection, results), [
            concat(parts) for parts in zip(*others, strict=True)
        ]

    def named(self, projection: Projection, results: Sequence[Output]) -> dict[str, Output]:
        """Weight and scale of each shard, by name."""
        base = f"blk.{projection.layer}.ffn_{_KINDS[projection.kind]}_exps.{projection.expert}"
        found: dict[str, Output] = {}
        for shard in range(self.numa):
            found[f"{base}.numa.{shard}.scale"] = results[2 * shard + 1]
            found[f"{base}.numa.{shard}.weight"] = results[2 * shard]
        return found

    def packer(self, projection: Projection) -> AmxCodes:
        """The packer of a matrix's calibrated codes."""
        return AmxCodes(self.method, self.numa, projection.kind == "down_proj")

    def with_shards(
        self,
        plan: Plan,
        experts: Experts,
        tensors: Mapping[str, Output],
        gpu: str,
        digest: str | None = None,
    ) -> Plan:
        """The plan of the CPU folder; `gpu` says in its README what the GPU side is, `digest` what a
        calibration was asked for."""
        dims = plan.role_index.dims
        drafts = sorted({p.layer for p in experts.projections if p.draft})
        done = {"keep": "kept", "drop": "dropped"}[self.mtp]
        notes = [f"MTP experts of layer {', '.join(map(str, drafts))} {done}"] if drafts else []
        known = reads_as_it_is(plan.checkpoint)
        if known is not None:
            again = ", a second lossy step" if known == "RAWINT4" else ""
            notes.append(f"kt-kernel reads the source itself as {known}{again}")
        if digest is None and (self.rounding, self.method) == ("search", "int4"):
            notes.append(
                "searched scales clip, and were measured worse than the reference's (KL 1.03 against "
                "0.42, docs/ktransformers.md): compare both by eval, or calibrate (--gptq)"
            )
        if digest is not None and drafts and self.mtp == "keep":
            notes.append(f"MTP experts are not calibrated: rounded ({self.rounding})")
        fact = {
            "method": RUNTIME_NAME[self.method],
            "numa": self.numa,
            "rounding": self.rounding if digest is None else "gptq",
            "hidden_size": dims.hidden_size,
            "intermediate_size": dims.moe_intermediate_size,
            "experts": dims.num_experts,
            "layers": sorted({p.layer for p in self.kept(experts)}),
        }
        matched = len(experts.projections), experts.expected
        entry = LogEntry(
            self.name, options_with(self, digest), *matched, tuple(notes), "expert matrices",
            extra=experts.extra,
        )  # fmt: skip
        return replace_weights(
            plan,
            entry,
            tensors,
            dropped=self._dropped(plan, experts),
            dropped_files=_README,
            new_files={"README.md": readme(fact, gpu)},
            facts={FACT: fact},
            calibrate=self.calibrate,
            digest=digest,
        )

    def _dropped(self, plan: Plan, experts: Experts) -> dict[str, str]:
        """A rule for every source that leaves: other layers, stale tensors, draft experts."""
        others = [name for name in plan.tensors if name not in experts.taken]
        found = sources_of(plan, others, _OTHER_LAYERS)
        found |= sources_of(plan, sorted(experts.stale), STALE_RULE)
        for projection in experts.projections:
            if projection.draft and self.mtp == "drop":
                for arg in projection.weight.args:
                    found |= dict.fromkeys(source_names(projection.module, arg), _DRAFT)
        return found


@lru_cache(maxsize=256)  # of tens of thousands of matrices, few are not alike
def _recode(
    decoder: RowOp | None, method: Method, cuts: int, rounding: Rounding, beside: tuple[RowOp, ...]
) -> Recode:
    """Decoded, then encoded for so many shards cut by columns, and by the encoders `beside`."""
    return Recode(decoder, (Amx(method, cuts, rounding), *beside))


def _check_activation(plan: Plan) -> None:
    """kt-kernel's AMX kernels compute silu(gate) * up, without biases."""
    text = text_config(plan.config)
    kind = plan.config.get("model_type")
    if kind == "gpt_oss" or text.get("model_type") == "gpt_oss":
        raise PlanError(
            "gpt-oss experts have biases and a clamped activation; kt-kernel's AMX kernels compute "
            "SiLU without biases only, so the result would load without error and generate garbage"
        )
    # A dense model of the family has no experts: that is what it is refused for.
    if plan.family.not_on_cpus and plan.role_index.dims.num_experts:
        raise PlanError(
            f"{kind}: {plan.family.not_on_cpus}; kt-kernel's AMX kernels compute down(silu(gate) * up) "
            "only, so the result would load without error and generate garbage"
        )
    act = text.get("hidden_act", "silu")
    if act not in ("silu", "swish") or text.get("swiglu_limit"):
        what = f"hidden_act {act!r}" if act not in ("silu", "swish") else "a swiglu_limit"
        raise PlanError(
            f"the config states {what}; kt-kernel's AMX kernels compute plain SiLU only"
        )


PASSES = (ExpertsToAmx,)
