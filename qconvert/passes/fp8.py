"""fp8: weights in FP8, with scales of blocks, rows or matrices; by default those of all linear layers
that runtimes load so.

The config follows what runtimes do with it (read in sglang and vLLM). Draft (MTP) layers are
quantized with the model's, as DeepSeek and Qwen publish them: sglang looks up those of Qwen3-Next under
the name of the model's first layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from qconvert.checkpoint.quantization_config import fp8_scheme
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.names import split_parameter, with_fused_names, with_vllms_name
from qconvert.core.parameter_names import FP8
from qconvert.core.roles import Kind
from qconvert.formats.base import Stored, activations_note
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.fp8.encode import LARGEST, Dialect, EncodeFp8, EncodeFp8Tensor, TensorScale
from qconvert.formats.fp8.format import fp8_config, fp8_group_config, fp8_tensor_group_config
from qconvert.formats.registry import read_matrix
from qconvert.models.linears import matches
from qconvert.models.unquantized import (
    OutputsByName,
    check_nothing_packed,
    ignored,
    ignored_linears,
    with_draft_names,
)
from qconvert.ops.constant import constant_f32
from qconvert.passes.input_scales import InputScales
from qconvert.passes.quantize import Quantizing, compressed_block
from qconvert.passes.ranks import Grid, check_tp, cut_notes, loads_at, loads_note
from qconvert.passes.selection import Linear, Selection, check_targets, shared_notes
from qconvert.passes.shared_scales import encoded_together
from qconvert.plan.pass_options import LINEAR
from qconvert.plan.plan import Plan
from qconvert.runtimes.consumers import parse_consumer
from qconvert.runtimes.misreadings import Misread, misread

BLOCK = 128
# What DeepSeek and Qwen3-Next-FP8 publish in FP8, and runtimes take in no packed form.
_PUBLISHED = (
    Kind.QUERY_DOWN, Kind.KV_DOWN, Kind.OUTPUT_DOWN, Kind.INDEXER_QUERY, Kind.GDN_QKVZ,
)  # fmt: skip
# Whose weights sglang's classes read themselves: kv_b_proj, of which they split the rows and would round
# scales to one (`deepseek_weight_loader.py`), and wo_a (`deepseek_v4.py`).
_READ = (Kind.KV_UP, Kind.OUTPUT_DOWN)


@dataclass(frozen=True, slots=True)
class ToFp8(Quantizing):
    """Quantize linear layers to FP8.

    All that runtimes load so, or with `targets: [experts]` the routed experts. There is one scale for
    each square of `block` rows and columns; with `block: null` and `dialect: compressed-tensors` for
    each row (`--channel` of the command); with `tensor` for each matrix, whatever `block` says, and
    those that runtimes compute as one share it. `input_scale` (their largest size / 448) and `stats`, of
    routed experts, are for such. `exponents`: scales are powers of two (ue8m0), by block in dialect fp8
    only. `consumer` is the runtime that is to load it: where its class is known to misread dialect fp8,
    compressed-tensors' form is written.

    Raises PlanError where the dialect has no such scales, where the consumer misreads either dialect,
    and as `Quantizing` does.
    """

    name: ClassVar[str] = "fp8"

    dialect: Dialect = "fp8"
    block: int | None = BLOCK
    exponents: bool = False
    targets: tuple[str, ...] = field(default=(LINEAR,), kw_only=True)
    tensor: bool = False
    input_scale: float | None = None
    stats: str | None = None
    consumer: str | None = None

    def __post_init__(self) -> None:
        check_targets(self.targets, self.dialect)
        if self.consumer is not None:
            parse_consumer(self.consumer)
        if self.tensor and self.exponents:
            raise PlanError("scales that are powers of two are supported by block only")
        if self.stores_inputs and not self.tensor:
            raise PlanError("runtimes take input scales beside a scale a tensor only: add tensor")
        self.check_options()
        if self.block is not None and self.block < 1:
            raise PlanError(f"expected a block of 1 or more, found {self.block}")
        if self.block is None and self.dialect == "fp8" and not self.tensor:
            raise PlanError(
                "quant_method fp8 has scales by block or tensor: take dialect compressed-tensors for a "
                "scale a row"
            )
        if self.exponents and self.dialect != "fp8":
            raise PlanError("scales that are powers of two are supported in dialect fp8 only")

    @property
    def grid(self) -> Grid:
        return self._block_size or (1, 1)

    def encoder(self, *, draft: bool = False) -> EncodeFp8:
        return EncodeFp8(self.dialect, self._block_size, self.exponents)

    def suffixes(self, *, draft: bool = False) -> tuple[str, ...]:
        return FP8[self.dialect]

    def fits(self, stored: Stored) -> bool:
        """The last block of a row may be narrower."""
        return True

    @property
    def _block_size(self) -> tuple[int, int] | None:
        return None if self.block is None or self.tensor else (self.block, self.block)

    @property
    def _by_blocks(self) -> bool:
        """Return whether the result is what DeepSeek and Qwen publish."""
        return self.dialect == "fp8" and not self.tensor

    def __call__(self, plan: Plan) -> Plan:
        if self.consumer is None:
            return self.planned(plan)
        other = self
        if self._by_blocks and not self.exponents:
            other = replace(self, dialect="compressed-tensors")
        made = (other if _misread(self.consumer, plan) else self).planned(plan)
        if _misread(self.consumer, made):
            made = other.planned(plan)
        found = _misread(self.consumer, made)
        if found:
            raise PlanError(
                f"{self.consumer} does not read {found.first!r} as it would be stored"
                f"{f' ({why})' if (why := found.wrong.get(found.first)) else ''}: {found.cure}"
            )
        return made

    def notes(
        self, plan: Plan, chosen: Selection, block: Mapping[str, Any], inputs: InputScales
    ) -> list[str]:
        sizes = loads_note(loads_at(chosen.sizes, self.grid), grid=self.grid)
        cut = cut_notes(chosen.sizes, self.grid)
        rounds = activations_note("FP8")
        return [*shared_notes(plan, chosen, block), sizes, *cut, *inputs.notes(), rounds]

    def encoded(
        self, plan: Plan, chosen: Selection, inputs: InputScales, digest: str | None
    ) -> dict[str, Output]:
        """The new tensors by name; with a scale a matrix, those that are computed as one share it."""
        if not self.tensor:
            return Quantizing.encoded(self, plan, chosen, inputs, digest)
        given = inputs.scales(chosen, lambda largest: largest / LARGEST)
        made: dict[str, Output] = {}
        scales, encoder = TensorScale(self.dialect), partial(EncodeFp8Tensor, dialect=self.dialect)
        for module, results, scale in encoded_together(chosen, scales, encoder):
            made[f"{module}.weight"], made[f"{module}.weight_scale"] = results[0], scale
            if module in given:
                made[f"{module}.input_scale"] = apply(constant_f32(given[module], (1,)))[0]
        return made

    # --- what is taken and left

    @property
    def _plain_kinds(self) -> tuple[Kind, ...]:
        """Return what stays in BF16. But for scales by block what classes read themselves does. With a
        scale a matrix, what sglang fuses in classes of its own does too: those take no two scales
        (`deepseek_v2.py` concatenates them, `qwen3_next.py` `_make_packed_weight_loader` looks for
        four)."""
        if self._by_blocks:
            return ()
        return (*_READ, *_PUBLISHED) if self.tensor else _READ

    def more(self, plan: Plan, known: Collection[str]) -> dict[str, Linear]:
        """Linears that other formats leave and FP8 does not: those of `_PUBLISHED` kinds, those of draft
        layers, and all that are FP8 in the source, since a config has place for one form of it."""
        found: dict[str, Linear] = {}
        if LINEAR not in self.targets:
            return found
        for name, output in plan.tensors.items():
            module, parameter = split_parameter(name)
            kind = plan.role_index.kind(name)
            coded = output.type.dtype in WEIGHT_DTYPES
            draft = plan.family.is_mtp(name, plan.role_index.dims)
            if name in known or module in known or parameter != "weight" or not kind.linear:
                continue
            if kind in self._plain_kinds or matches(module, self.ignore) is not None:
                continue
            if coded or kind in _PUBLISHED or (draft and kind.quantizable):
                stored, names = read_matrix(plan, module)
                found[module] = Linear(kind, stored, names)
        return found

    def others(self, plan: Plan, chosen: Selection) -> dict[str, Output]:
        """The tensors that stay, of `_plain_kinds` in BF16."""
        found = chosen.others(plan)
        for name, output in list(found.items()):
            module, parameter = split_parameter(name)
            coded = output.type.dtype in WEIGHT_DTYPES and parameter == "weight"
            plain = coded and plan.role_index.kind(name) in self._plain_kinds
            if plain and LINEAR in self.targets:
                stored, names = read_matrix(plan, module)
                assert stored.decoder is not None
                found |= {name: apply(stored.decoder, *stored.args)[0]}
                for scale in names[1:]:
                    del found[scale]
        return found

    def check_chosen(self, plan: Plan, chosen: Selection) -> None:
        """Raises PlanError where every matrix has this form already, too."""
        if self._by_blocks and all(
            f"{module}.weight_scale_inv" in plan.tensors and self._is_same(plan, module)
            for module, _, _ in chosen
        ):
            raise PlanError(
                f"every matrix is FP8 in blocks of {self.block}x{self.block} already: use it as it is"
            )
        check_tp(chosen.sizes, self.grid, self.tp)

    def _is_same(self, plan: Plan, module: str) -> bool:
        """Return whether an FP8 module's scales are as this pass would write them."""
        scheme = fp8_scheme(plan.checkpoint, module)
        formats = [config.block.get("scale_fmt") for config in plan.checkpoint.quantization_configs]
        return scheme.block == self._block_size and ("ue8m0" in formats) == self.exponents

    def check_left(self, plan: Plan, others: OutputsByName) -> None:
        """Raises PlanError for layers that stay packed, or in FP8 of another form: the config has place
        for one."""
        check_nothing_packed(others)
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

    def config(self, plan: Plan, chosen: Selection, others: OutputsByName) -> dict[str, Any]:
        """In dialect fp8 every unquantized matrix is named, as in Qwen's folders: transformers takes all
        other linears for FP8."""
        if self.dialect == "fp8":
            left = with_fused_names(with_draft_names(plan, ignored_linears(plan, others)))
            left = with_vllms_name(left) if self.tensor else left
            return fp8_config(
                self._block_size, left, exponents=self.exponents, inputs=self.stores_inputs
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
            group = partial(fp8_tensor_group_config, inputs=self.stores_inputs)
        return compressed_block(plan, chosen, group, left)


def _misread(consumer: str, made: Plan) -> Misread:
    """Return what a runtime's class is known to misread of a plan's result."""
    types = {name: output.type for name, output in made.tensors.items()}
    return misread(parse_consumer(consumer).name, made.config, types)


PASSES = (ToFp8,)
