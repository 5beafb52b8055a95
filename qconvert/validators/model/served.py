"""A model as it is served from a folder, whatever form its matrices are stored in: FP8 and packed INT4
decoded, routed experts by layer and number, those for CPU kernels with the layers of their GPU side.

Not a validator itself: it has no `VALIDATOR`, so discovery skips it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.family import text_config
from qconvert.core.errors import PlanError
from qconvert.core.graph import Source
from qconvert.core.manifest_keys import DRAFT
from qconvert.core.names import parse
from qconvert.run.reader import Reader
from qconvert.validation.runner import Folder, NotChecked
from qconvert.validators.amx.reading import Block, matching_source, sound_block
from qconvert.validators.amx.reading import weights as amx_weights
from qconvert.validators.reading.decode import floats
from qconvert.validators.reading.experts import KINDS, Kind, routed_experts
from qconvert.validators.reading.forms import Forms, Unread
from qconvert.validators.reading.matrices import Matrix, whole
from qconvert.validators.reading.rows import bf16_rows

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Floats

Format = Literal["bf16", "fp8", "int4", "int8", "amxint4", "amxint8"]

# Forms whose rounding the model checks have bounds for.
_FORMATS: Mapping[str, Format] = {
    "bf16": "bf16", "fp16": "bf16", "fp32": "bf16", "fp8": "fp8", "w4a16": "int4", "w8a16": "int8",
}  # fmt: skip
_CHUNK = 4 << 20


@dataclass(frozen=True)
class Model:
    """`checkpoint` holds everything, or, where `amx` is given, everything but the routed experts,
    which are those of that folder. Matrices are read as consumers compute with them: FP8 and INT4
    rounded to BF16, AMX codes in float32."""

    checkpoint: Checkpoint
    amx: tuple[Block, Checkpoint] | None = None

    @property
    def layers(self) -> int:
        return self.checkpoint.role_index.dims.num_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self.checkpoint.role_index.dims.groups.get("moe", ())

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The language model's settings."""
        return text_config(self.checkpoint.config)

    @cached_property
    def prefixes(self) -> Mapping[int, str]:
        """The name prefix of each of the model's own layers: `model.layers.3`."""
        checkpoint, found = self.checkpoint, {}
        for name in checkpoint:
            layer = parse(name).layer
            if ".layers." not in name or layer is None:
                continue
            if layer < self.layers and not checkpoint.family.is_mtp(
                name, checkpoint.role_index.dims
            ):
                found[layer] = f"{name.partition('.layers.')[0]}.layers.{layer}"
        return found

    @cached_property
    def experts(self) -> Mapping[tuple[int, Kind, int], Matrix]:
        """By layer, projection and number; none of a dense model. Raises PlanError."""
        if not self.checkpoint.role_index.dims.num_experts:
            return {}
        return routed_experts(self.checkpoint).matrices

    def expert_format(self, layer: int) -> Format:
        """How the routed experts of a layer are stored. Raises PlanError."""
        if self.amx is not None:
            return "amxint4" if self.amx[0].method == "int4" else "amxint8"
        return format_of(self.experts[layer, KINDS[0], 0])

    @cached_property
    def fp8_columns(self) -> int | None:
        """Columns of a block of FP8 weights, None if a config states no block, or several."""
        blocks = Forms(self.checkpoint).fp8_blocks
        return next(iter(blocks))[1] if len(blocks) == 1 else None

    def matrix(self, module: str) -> Matrix:
        """A module's weight other than routed experts. Raises PlanError if it is missing or in an
        unsupported form."""
        names = [f"{module}.{part}" for part in ("weight_packed", "qweight", "weight")]
        name = next((name for name in names if name in self.checkpoint), None)
        if name is None:
            raise PlanError(f"{names[-1]!r} is missing")
        try:
            found = whole(self.checkpoint, name)
        except Unread as why:
            raise PlanError(f"{name!r}: {why}") from why
        format_of(found)
        return found


def format_of(matrix: Matrix) -> Format:
    """The stored form of a matrix, if a consumer's arithmetic depends on it. Raises PlanError for a
    form whose rounding has no bound here."""
    if matrix.format not in _FORMATS:
        raise PlanError(f"{matrix.tensor!r}: {matrix.format} weights are not supported here")
    return _FORMATS[matrix.format]


def source_model(folder: Folder) -> Model:
    assert folder.source is not None
    return Model(folder.source)


def output_model(folder: Folder) -> Model:
    """What is served from a folder: experts for CPU kernels together with the GPU side, or with the
    source, which may be it. Raises NotChecked if there is no complete model."""
    manifest = folder.checkpoint.manifest or {}
    if "stage" in manifest:
        raise NotChecked("it is one pipeline stage, not a whole model; check the result of `join`")
    if DRAFT in manifest:
        raise NotChecked("it is a draft, not a whole model; check the model that it is grafted to")
    if "amx" not in manifest:
        return Model(folder.checkpoint)
    block = sound_block(folder.checkpoint)
    matching_source(block, folder)
    rest = folder.partner or folder.source
    assert rest is not None
    return Model(rest, (block, folder.checkpoint))


class Weights:
    """A model's weights, read when asked for; nothing is kept."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._reader = Reader(model.checkpoint.shards)
        self._experts = Reader(model.amx[1].shards) if model.amx is not None else self._reader

    def close(self) -> None:
        self._reader.close()
        self._experts.close()

    def expert(self, layer: int, kind: Kind, expert: int) -> Floats:
        """A routed expert's matrix, float32 [rows, columns]."""
        if self.model.amx is None:
            return bf16_rows(self._reader, self.model.experts[layer, kind, expert])
        block, checkpoint = self.model.amx
        return amx_weights(block, checkpoint, self._experts, layer, kind, expert)[0]

    def matrix(self, module: str) -> Floats:
        """A module's weight, float32 [rows, columns]. Raises PlanError as Model.matrix does."""
        return bf16_rows(self._reader, self.model.matrix(module))

    def plain(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """An unquantized tensor, or its rows [start, stop), as float32. Raises PlanError."""
        import numpy as np

        if name not in self.model.checkpoint:
            raise PlanError(f"{name!r} is missing")
        source = self.model.checkpoint[name]
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
