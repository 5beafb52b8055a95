"""fp8: weights in FP8, with scales of blocks, rows or matrices; by default those of all linear layers
that runtimes load so.

The config follows what runtimes do with it (read in sglang 0.5.23 and vLLM 0.33). Draft (MTP) layers are
quantized with the model's, as DeepSeek and Qwen publish them: sglang looks up those of Qwen3-Next under
the name of the model's first layer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from struct import pack
from typing import Any, ClassVar

from qconvert.checkpoint.quantization_config import fp8_scheme
from qconvert.core.encodings import FP8
from qconvert.core.errors import PlanError
from qconvert.core.fused_names import with_fused_names, with_vllms_name
from qconvert.core.graph import Output, apply
from qconvert.core.names import split_parameter
from qconvert.core.roles import Kind
from qconvert.formats.fp8.config import (
    fp8_config,
    fp8_group_config,
    fp8_tensor_group_config,
)
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.fp8.encode import LARGEST, Dialect, EncodeFp8
from qconvert.formats.fp8.tensor import EncodeFp8Tensor, TensorScale
from qconvert.formats.nvfp4.scales import DecodedMaxima, RowMaxima
from qconvert.formats.registry import read_matrix
from qconvert.models.unquantized import (
    Named,
    check_nothing_packed,
    ignored,
    ignored_linears,
    with_draft_names,
)
from qconvert.ops.constant import Constant
from qconvert.ops.rowwise import Recode
from qconvert.passes.by_row import compressed_block
from qconvert.passes.input_scales import InputMaxima, maxima_of
from qconvert.passes.nvfp4_groups import shared_groups
from qconvert.passes.ranks import check_size, check_tp, cut_notes, loads_at, loads_note
from qconvert.passes.replace_weights import (
    Linear,
    Selection,
    replace_weights,
    select,
    takes_linears,
)
from qconvert.passes.shared_experts import SharedExperts, shared_notes, with_shared
from qconvert.plan.pass_options import LINEAR, options_of
from qconvert.plan.plan import Plan
from qconvert.runtimes.consumers import parse_consumer
from qconvert.runtimes.misreadings import Misread, misread

BLOCK = 128
# What DeepSeek-V3 and Qwen3-Next-FP8 publish in FP8, and runtimes take in no packed form.
_PUBLISHED = (Kind.QUERY_DOWN, Kind.KV_DOWN, Kind.GDN_QKVZ)


@dataclass(frozen=True, slots=True)
class ToFp8:
    """All linear layers that runtimes load in FP8, or with `targets: [experts]` the routed experts. One
    scale for each square of `block` rows and columns, or (None) for each row, which dialect
    compressed-tensors alone has; with `tensor` for each matrix, whatever `block` says, and those that
    runtimes compute as one share it. `input_scale` is then one constant for the inputs of all that is
    quantized (their largest size / 448); `stats` a folder of a calibration's statistics, from which the
    input scales of routed experts are taken. `exponents`: scales are powers of two (ue8m0), by block in
    dialect fp8 only. `shared_experts` says whether shared experts beside routed ones are quantized too
    or kept; None: quantized only where sglang would otherwise fuse them and not read them. `tp` is a
    tensor-parallel size that the result must load at. `consumer` is the runtime that is to load it:
    where its class is known to misread dialect fp8 (`runtimes/misreadings.py`), compressed-tensors' form
    is written.

    Raises PlanError where the dialect has no such scales, where layers in another quantized form would
    stay, where a rank would cut a block, where the consumer misreads either dialect, and as
    `routed_experts` does.
    """

    name: ClassVar[str] = "fp8"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    dialect: Dialect = "fp8"
    block: int | None = BLOCK
    exponents: bool = False
    targets: tuple[str, ...] = (LINEAR,)
    shared_experts: SharedExperts | None = None
    tp: int | None = None
    tensor: bool = False
    input_scale: float | None = None
    stats: str | None = None
    consumer: str | None = None

    def __post_init__(self) -> None:
        takes_linears(self.targets)
        if self.consumer is not None:
            parse_consumer(self.consumer)
        if self.tensor and self.exponents:
            raise PlanError("scales that are powers of two are supported by block only")
        if self.input_scale is not None and not self.tensor:
            raise PlanError("runtimes take input scales beside a scale a tensor only: add tensor")
        if self.input_scale is not None and not 0 < self.input_scale < inf:
            raise PlanError(f"expected an input scale above 0, found {self.input_scale}")
        if self.stats is not None:
            self._check_stats()
        if self.block is not None and self.block < 1:
            raise PlanError(f"expected a block of 1 or more, found {self.block}")
        if self.block is None and self.dialect == "fp8" and not self.tensor:
            raise PlanError(
                "quant_method fp8 has scales by block or tensor: take dialect compressed-tensors for a "
                "scale a row"
            )
        if self.exponents and self.dialect != "fp8":
            raise PlanError("scales that are powers of two are supported in dialect fp8 only")
        check_size(self.tp)

    def _check_stats(self) -> None:
        if not self.tensor:
            raise PlanError("runtimes take input scales beside a scale a tensor only: add tensor")
        if self.input_scale is not None:
            raise PlanError("input_scale is a constant input scale, and stats says otherwise")
        if takes_linears(self.targets) or self.shared_experts == "quantize":
            others = (
                "all other layers" if takes_linears(self.targets) else "quantized shared experts"
            )
            raise PlanError(
                f"statistics are of routed experts' inputs alone, and {others} would need input scales "
                "too: target experts, keep shared experts, or leave stats out"
            )

    @property
    def encoder(self) -> EncodeFp8:
        return EncodeFp8(self.dialect, self._block_size, self.exponents)

    @property
    def _block_size(self) -> tuple[int, int] | None:
        return None if self.block is None or self.tensor else (self.block, self.block)

    @property
    def _stores_inputs(self) -> bool:
        return self.input_scale is not None or self.stats is not None

    @property
    def _by_blocks(self) -> bool:
        """Return whether the result is what DeepSeek and Qwen publish."""
        return self.dialect == "fp8" and not self.tensor

    def __call__(self, plan: Plan) -> Plan:
        if self.consumer is None:
            return self._planned(plan)
        other = self
        if self._by_blocks and not self.exponents:
            other = replace(self, dialect="compressed-tensors")
        made = (other if _misread(self.consumer, plan) else self)._planned(plan)
        if _misread(self.consumer, made):
            made = other._planned(plan)
        found = _misread(self.consumer, made)
        if found:
            raise PlanError(
                f"{self.consumer} does not read {found.first!r} as it would be stored: {found.cure}"
            )
        return made

    def _planned(self, plan: Plan) -> Plan:
        chosen = self.chosen(plan)
        others = self._others(plan, chosen)
        check_nothing_packed(others)
        self._check_left(plan, others)
        inputs, maxima = self._inputs(plan, chosen)
        made = self._tensors(chosen, inputs) if self.tensor else self._each(chosen)
        block = self._config(plan, chosen)
        sizes = loads_at(chosen, self._block_size or (1, 1))
        notes = [*shared_notes(plan, chosen, block), loads_note(sizes)]
        notes += cut_notes(chosen, self._block_size or (1, 1))
        facts: dict[str, Any] = {"tp_sizes": sizes}
        options = options_of(self)
        if maxima is not None:
            options = options_of(self, stats=maxima.digest)
            notes += maxima.notes()
            facts["input_maxima"] = maxima.recorded
        if self.input_scale is not None:
            facts["input_scale"] = self.input_scale
            notes.append(f"input scales are the constant {self.input_scale:g}, found from no data")
        return replace_weights(
            plan,
            chosen.entry(self.name, options, notes),
            {**others, **made},
            dropped=chosen.dropped(plan),
            block=block,
            facts=facts,
        )

    def _each(self, chosen: Selection) -> dict[str, Output]:
        """The tensors of each matrix, by name."""
        made: dict[str, Output] = {}
        for module, _, stored in chosen:
            try:
                results = apply(Recode(stored.decoder, (self.encoder,)), *stored.args)
            except PlanError as error:
                raise PlanError(f"{module}: {error}") from error
            names = [f"{module}.{name}" for name in FP8[self.dialect]]
            made.update(zip(names, results, strict=True))
        return made

    def _inputs(
        self, plan: Plan, chosen: Selection
    ) -> tuple[Mapping[str, float], InputMaxima | None]:
        """The input scale of each module, where they are stored; and the statistics, if those say."""
        if self.input_scale is not None:
            return {module: self.input_scale for module, _, _ in chosen}, None
        if self.stats is None:
            return {}, None
        assert chosen.experts is not None
        projections = chosen.experts.projections
        draft = next((p.module for p in projections if p.draft), None)
        if draft is not None:
            raise PlanError(
                f"{draft!r}: statistics are of the model's experts, and those of its draft layers would "
                "need input scales too: drop the layers (a recipe of `drop: {what: mtp}` and `fp8`), or "
                "leave stats out"
            )
        maxima = maxima_of(plan, self.stats, projections)
        return {
            p.module: maxima.of(p.layer, p.expert, p.kind) / LARGEST for p in projections
        }, maxima

    def _tensors(self, chosen: Selection, inputs: Mapping[str, float]) -> dict[str, Output]:
        """The same with a scale for those that are computed as one, and `inputs`."""
        matrices = {module: stored for module, _, stored in chosen}
        made: dict[str, Output] = {}
        for group in shared_groups({module: kind for module, kind, _ in chosen}):
            maxima = []
            for module in group:
                stored = matrices[module]
                op = DecodedMaxima(stored.decoder, (RowMaxima(),))
                maxima.append(apply(op if stored.decoder else RowMaxima(), *stored.args)[0])
            (scale,) = apply(TensorScale(self.dialect), *maxima)
            for module in group:
                stored = matrices[module]
                encoder = EncodeFp8Tensor(stored.decoder, self.dialect)
                made[f"{module}.weight"] = apply(encoder, *stored.args, scale)[0]
                made[f"{module}.weight_scale"] = scale
                if module in inputs:
                    constant = Constant("F32", (1,), pack("<f", inputs[module]).hex())
                    made[f"{module}.input_scale"] = apply(constant)[0]
        return made

    def chosen(self, plan: Plan) -> Selection:
        """Return what the targets select of a plan."""
        found, unwanted = select(
            plan, takes_linears(self.targets), keep_shared=self.shared_experts == "keep"
        )
        experts, linears = found.experts, dict(found.linears)
        if takes_linears(self.targets):
            taken = experts.taken if experts is not None else ()
            linears |= self._more(plan, {*linears, *unwanted, *taken})
        if not linears and experts is None:
            raise PlanError("no linear layer found that runtimes load in FP8")
        found = Selection(experts, linears, ())
        if self.stats is None or self.shared_experts is not None:
            found = with_shared(
                plan,
                found,
                self.shared_experts,
                lambda selection: self._config(plan, selection),
                drafts=experts is not None and any(p.draft for p in experts.projections),
            )
        self._check_new(plan, found)
        check_tp(found, self._block_size or (1, 1), self.tp)
        return found

    @property
    def _plain_kinds(self) -> tuple[Kind, ...]:
        """Return what stays in BF16. But for scales by block kv_b_proj does: sglang splits it after
        loading, and would round scales of rows to one (`deepseek_weight_loader.py`). With a scale a
        matrix, what sglang 0.5.23 fuses in classes of its own does too: those take no two scales
        (`deepseek_v2.py` concatenates them, `qwen3_next.py` `_make_packed_weight_loader` looks for
        four)."""
        if self._by_blocks:
            return ()
        return (Kind.KV_UP, *_PUBLISHED) if self.tensor else (Kind.KV_UP,)

    def _more(self, plan: Plan, known: Container[str]) -> dict[str, Linear]:
        """Linears that other formats leave and FP8 does not: those of `_PUBLISHED` kinds, those of draft
        layers, and all that are FP8 in the source, since a config has place for one form of it."""
        found: dict[str, Linear] = {}
        for name, output in plan.tensors.items():
            module, parameter = split_parameter(name)
            kind = plan.role_index.kind(name)
            coded = output.type.dtype in WEIGHT_DTYPES
            draft = plan.family.is_mtp(name, plan.role_index.dims)
            if name in known or module in known or parameter != "weight" or not kind.linear:
                continue
            if kind in self._plain_kinds:
                continue
            if coded or kind in _PUBLISHED or (draft and kind.quantizable):
                stored, names = read_matrix(plan, module)
                found[module] = Linear(kind, stored, names)
        return found

    def _others(self, plan: Plan, chosen: Selection) -> dict[str, Output]:
        """The tensors that stay, of `_plain_kinds` in BF16."""
        found = chosen.others(plan)
        for name, output in list(found.items()):
            module, parameter = split_parameter(name)
            coded = output.type.dtype in WEIGHT_DTYPES and parameter == "weight"
            plain = coded and plan.role_index.kind(name) in self._plain_kinds
            if plain and takes_linears(self.targets):
                stored, names = read_matrix(plan, module)
                assert stored.decoder is not None
                found |= {name: apply(stored.decoder, *stored.args)[0]}
                for scale in names[1:]:
                    del found[scale]
        return found

    def _check_new(self, plan: Plan, chosen: Selection) -> None:
        """Raises PlanError where every matrix has this form already."""
        if self._by_blocks and all(
            f"{module}.weight_scale_inv" in plan.tensors and self._is_same(plan, module)
            for module, _, _ in chosen
        ):
            raise PlanError(
                f"every matrix is FP8 in blocks of {self.block}x{self.block} already: use it as it is"
            )

    def _is_same(self, plan: Plan, module: str) -> bool:
        """Return whether an FP8 module's scales are as this pass would write them."""
        scheme = fp8_scheme(plan.checkpoint, module)
        formats = [config.block.get("scale_fmt") for config in plan.checkpoint.quantization_configs]
        return scheme.block == self._block_size and ("ue8m0" in formats) == self.exponents

    def _check_left(self, plan: Plan, others: Named) -> None:
        """Raises PlanError for layers that stay in FP8 of another form: the config has place for one."""
        for name, output in others.items():
            if output.type.dtype not in WEIGHT_DTYPES:
                continue
            module, _ = split_parameter(name)
            same = self._by_blocks and f"{module}.weight_scale_inv" in others
            if not (same and self._is_same(plan, module)):
                way = "; MXFP4 experts beside it become FP8 by `qconvert relabel --to fp8`"
                found = way if f"{module}.scale" in others else ""
                raise PlanError(
                    f"{name!r} is FP8 in another form, and stays so, for which the config has no place: "
                    f"dequantize first (a recipe of `dequant` and `fp8` is one read){found}"
                )

    def _config(self, plan: Plan, chosen: Selection) -> dict[str, Any]:
        """The config's block. In dialect fp8 every unquantized matrix is named, as in Qwen's folders:
        transformers takes all other linears for FP8."""
        others = self._others(plan, chosen)
        if self.dialect == "fp8":
            left = with_fused_names(with_draft_names(plan, ignored_linears(plan, others)))
            left = with_vllms_name(left) if self.tensor else left
            return fp8_config(
                self._block_size, left, exponents=self.exponents, inputs=self._stores_inputs
            )
        left = ignored(
            plan,
            others,
            experts=chosen.experts is not None,
            shared=bool(chosen.shared),
            drafts_too=bool(chosen.plain),
        )
        group = partial(fp8_group_config, self._block_size)
        if self.tensor:
            group = partial(fp8_tensor_group_config, inputs=self._stores_inputs)
        return compressed_block(plan, chosen, group, left)


def _misread(consumer: str, made: Plan) -> Misread:
    """Return what a runtime's class is known to misread of a plan's result."""
    types = {name: output.type for name, output in made.tensors.items()}
    return misread(parse_consumer(consumer).name, made.config, types)


PASSES = (ToFp8,)
