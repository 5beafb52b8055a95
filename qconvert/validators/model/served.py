"""A model as it is served of a folder, whatever form its matrices are stored in: FP8 and packed INT4
decoded, routed experts by layer and number, those for CPU kernels beside the layers of their GPU side.

Not a validator itself: it has no `VALIDATOR`, so discovery passes it by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.family import text_config
from qconvert.checkpoint.quantization_config import Fp8Scheme, fp8_scheme
from qconvert.core.errors import PlanError
from qconvert.core.graph import Source
from qconvert.core.names import parse
from qconvert.matrices.experts import PROJECTIONS, routed_experts
from qconvert.matrices.stored import Stored, fp8_reading, fp8_scale_name, read_matrix
from qconvert.ops.fp8 import WEIGHT_DTYPES, DequantFp8
from qconvert.ops.gptq import DequantGptq
from qconvert.ops.int4 import DequantInt4
from qconvert.ops.ints import DequantInts
from qconvert.plan.plan import Plan
from qconvert.run.reader import Reader
from qconvert.validation.runner import Folder, NotChecked
from qconvert.validators.amx.reading import (
    Block,
    Kind,
    matching_source,
    sound_block,
    source_weights,
)
from qconvert.validators.amx.reading import weights as amx_weights
from qconvert.validators.reading.decode import floats
from qconvert.validators.reading.quantization import fp8_blocks

if TYPE_CHECKING:
    from qconvert.validators.amx.reading import Floats

Format = Literal["bf16", "fp8", "int4", "int8", "amxint4", "amxint8"]

_CHUNK = 4 << 20


@dataclass(frozen=True)
class Model:
    """`plan` holds everything, or, where `amx` is given, everything but the routed experts, which are
    those of that folder. Matrices are read as consumers compute with them: FP8 and INT4 rounded to
    BF16, AMX codes in float32."""

    plan: Plan
    amx: tuple[Block, Checkpoint] | None = None

    @property
    def layers(self) -> int:
        return self.plan.census.dims.num_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self.plan.census.dims.groups.get("moe", ())

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The language model's settings."""
        return text_config(self.plan.config)

    @cached_property
    def prefixes(self) -> Mapping[int, str]:
        """What the names of each layer of the model's own begin with: `model.layers.3`."""
        plan, found = self.plan, {}
        for name in plan.tensors:
            layer = parse(name).layer
            if ".layers." not in name or layer is None:
                continue
            if layer < self.layers and not plan.family.is_mtp(name, plan.census.dims):
                found[layer] = f"{name.partition('.layers.')[0]}.layers.{layer}"
        return found

    @cached_property
    def stored_experts(self) -> Mapping[tuple[int, str, int], Stored]:
        """By layer, kind and expert, draft layers left out; none of a dense model. Raises PlanError."""
        if not self.plan.census.dims.num_experts:
            return {}
        found = routed_experts(self.plan).projections
        return {(p.layer, p.kind, p.expert): p.weight for p in found if not p.draft}

    def expert_format(self, layer: int) -> Format:
        """How the routed experts of a layer are stored. Raises PlanError."""
        if self.amx is not None:
            return "amxint4" if self.amx[0].method == "int4" else "amxint8"
        return format_of(self.stored_experts[layer, PROJECTIONS[0], 0])

    @cached_property
    def fp8(self) -> Fp8Scheme:
        """How its FP8 matrices are scaled: by the one block stated, also where that stands beside
        packed experts. Raises PlanError."""
        configs = self.plan.checkpoint.quantization_configs
        blocks = fp8_blocks(configs)
        if len(blocks) != 1:
            return fp8_scheme(self.plan.checkpoint)
        ((block, where),) = blocks.items()
        inner = (c.block.get("linear_fp8_config") or {} for c in configs)
        stated = [*(c.block for c in configs), *inner]
        return Fp8Scheme(block, where, any(b.get("scale_fmt") == "ue8m0" for b in stated))

    def matrix(self, module: str) -> Stored:
        """A module's weight beside the routed experts. Raises PlanError where it is missing or in no
        form that is read here."""
        name = f"{module}.weight"
        weight = self.plan.tensors.get(name)
        if weight is None or weight.type.dtype not in WEIGHT_DTYPES:
            return read_matrix(self.plan, module)[0]
        scale = self.plan.tensors[fp8_scale_name(self.plan, name)]
        decoder, matrix, grid = fp8_reading(weight, scale, self.fp8)
        decoder.infer(matrix.type, grid.type)
        return Stored(decoder, (matrix, grid), *matrix.type.shape)


def format_of(stored: Stored) -> Format:
    """What a matrix is stored as, where a consumer's arithmetic depends on it."""
    if isinstance(stored.decoder, DequantFp8):
        return "fp8"
    if isinstance(stored.decoder, DequantInts | DequantGptq):
        return "int4" if stored.decoder.bits == 4 else "int8"
    return "int4" if isinstance(stored.decoder, DequantInt4) else "bf16"


def source_model(folder: Folder) -> Model:
    assert folder.source is not None
    return Model(Plan.identity(folder.source))


def output_model(folder: Folder) -> Model:
    """What is served of a folder: of experts for CPU kernels together with its GPU side, or with the
    source, which may be it. Raises NotChecked where there is no whole model."""
    manifest = folder.checkpoint.manifest or {}
    if "stage" in manifest:
        raise NotChecked("it is one pipeline stage, no model by itself; check what `join` makes")
    if "amx" not in manifest:
        return Model(Plan.identity(folder.checkpoint))
    block = sound_block(folder.checkpoint)
    matching_source(block, folder)
    rest = folder.partner or folder.source
    assert rest is not None
    return Model(Plan.identity(rest), (block, folder.checkpoint))


class Weights:
    """A model's weights, read when asked for; nothing is kept."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._reader = Reader(model.plan.checkpoint.shards)
        self._experts = Reader(model.amx[1].shards) if model.amx is not None else self._reader

    def close(self) -> None:
        self._reader.close()
        self._experts.close()

    def expert(self, layer: int, kind: str, expert: int) -> Floats:
        """A routed expert's matrix, float32 [rows, columns]."""
        if self.model.amx is None:
            return source_weights(self._reader, self.model.stored_experts[layer, kind, expert])
        block, checkpoint = self.model.amx
        short: Kind = "gate" if kind == "gate_proj" else "up" if kind == "up_proj" else "down"
        return amx_weights(block, checkpoint, self._experts, layer, short, expert)[0]

    def matrix(self, module: str) -> Floats:
        """A module's weight, float32 [rows, columns]. Raises PlanError as Model.matrix does."""
        return source_weights(self._reader, self.model.matrix(module))

    def plain(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """An unquantized tensor, or its rows [start, stop), as float32. Raises PlanError."""
        import numpy as np

        if name not in self.model.plan.checkpoint:
            raise PlanError(f"{name!r} is missing")
        source = self.model.plan.checkpoint[name]
        if source.type.dtype not in ("BF16", "F16", "F32"):
            raise PlanError(f"{name!r}: expected BF16, F16 or F32, found {source.type}")
        size = source.type.row_nbytes
        stop = source.type.shape[0] if stop is None else stop
        data = np.frombuffer(self._raw(source, start * size, stop * size), np.uint8)
        return floats(data, source.type.dtype).reshape(stop - start, *source.type.shape[1:])

    def chunks(self, source: Source) -> Iterator[memoryview]:
        """A tensor's bytes as they are, some at a time."""
        for start in range(0, source.type.nbytes, _CHUNK):
            yield self._raw(source, start, min(start + _CHUNK, source.type.nbytes))

    def _raw(self, source: Source, start: int, stop: int) -> memoryview:
        data = memoryview(bytearray(stop - start))
        self._reader.read(source, start, data)
        return data


@contextmanager
def reading(model: Model) -> Iterator[Weights]:
    found = Weights(model)
    try:
        yield found
    finally:
        found.close()
