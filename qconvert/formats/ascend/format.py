"""msmodelslim's checkpoints for Ascend NPUs: `quant_model_description.json` names the type of each
tensor, and config.json says nothing.

msmodelslim's integers -> BF16: bf16((code - offset) * scale), rounded once.

Format source: msmodelslim 26.1, `core/quant_service/modelslim_v1/save/ascendv1.py` (`AscendV1Saver`) and
`ir/api/impl/int_quantization.py` (`dequantize`). A static W8A8 stores no scale of its weights but
`deq_scale`, which is it times that of the inputs: F32, or its bits in an I64 for models in float16. Two
rows of W4A8 are in one, the even one's code in the lower half of a byte.

BF16 -> msmodelslim's W8A8_DYNAMIC: the codes of compressed-tensors' INT8 under that project's names.

Format source: msmodelslim 26.1, `modelslim_v1/save/ascendv1.py` (`on_w8a8_dynamic_per_channel`), as
vllm-ascend reads it (`quantization/methods/w8a8_dynamic.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from qconvert.checkpoint.checkpoint import ASCEND, Checkpoint
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer, Output, Part, whole
from qconvert.core.int_scheme import IntScheme
from qconvert.core.parameter_names import ASCEND as PARTS
from qconvert.formats.base import FolderTensors, Format, Read, stored, weights_of_method
from qconvert.formats.int_packed.packers import INT8_ROWS, KeepInt8
from qconvert.ops.base import array
from qconvert.ops.cast import FLOAT_DTYPES, RoundedTiles, check_finite, decode, float_tiles
from qconvert.ops.rowwise import row_parts
from qconvert.plan.plan import Plan

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s
    from qconvert.core.int_scheme import Codes

WRITTEN = PARTS[:3]
BLOCK: Mapping[str, Any] = {
    "quant_method": ASCEND, "model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "group_size": 0,
    "metadata": {}, "optional": {},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeepAscend:
    """weight I8 [N, K], weight_scale and weight_offset BF16 [N, 1], those of INT8 and zeros. msmodelslim
    has them in F32, of which vllm-ascend makes the model's dtype at load: codes rounded with a scale
    that is bf16 already keep it."""

    suffixes: ClassVar[tuple[str, ...]] = WRITTEN
    row_step: ClassVar[int] = 1

    def scheme_of(self, columns: int) -> IntScheme:
        return INT8_ROWS

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        codes, scale = KeepInt8().infer(weight)
        return codes, scale, scale

    def loss(self, weight: TensorType) -> str:
        return KeepInt8().loss(weight)

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        KeepInt8().pack(codes, outs[:2])
        outs[2].data[:] = bytes(outs[2].type.nbytes)


def description_of(names: Iterable[str]) -> str:
    """quant_model_description.json of tensors by name: those of a module with offsets are W8A8_DYNAMIC,
    its bias apart."""
    every = list(names)
    coded = {name.removesuffix(f".{PARTS[2]}") for name in every if name.endswith(f".{PARTS[2]}")}
    kinds = {}
    for name in every:
        module, _, part = name.rpartition(".")
        is_coded = module in coded and part in WRITTEN
        kinds[name] = BLOCK["model_quant_type"] if is_coded else "FLOAT"
    stated = {key: value for key, value in BLOCK.items() if key != "quant_method"}
    return json.dumps({**kinds, **stated}, indent=2) + "\n"


Kind = Literal["offset", "packed", "static"]


@dataclass(frozen=True, slots=True)
class DequantAscend(RoundedTiles):
    """weight I8 [N, K] (`packed`: [N / 2, K]), weight_scale and weight_offset [N, groups] in floats; or
    (`static`) weight, deq_scale F32 or I64 [N, 1] and input_scale [1] in floats -> BF16 [N, K].

    Raises PlanError where dtypes or shapes do not fit, or rows of one byte would part; RowError where a
    scale or offset is NaN or infinite.
    """

    kind: Kind

    format: ClassVar[str] = "msmodelslim"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scale, beside = args
        if weight.dtype != "I8" or len(weight.shape) != 2:
            raise PlanError(f"expected codes in an I8 matrix, found {weight}")
        columns = weight.shape[1]
        rows = scale.shape[0] if self.kind == "packed" and scale.shape else weight.shape[0]
        if self.kind == "static":
            fits = scale.dtype in ("F32", "I64") and scale.shape == (rows, 1)
            fits = fits and beside.dtype in FLOAT_DTYPES and beside.shape == (1,)
            said = f"deq_scale F32 or I64 [{rows}] and input_scale [1] in floats"
        else:
            groups = scale.shape[-1] if len(scale.shape) == 2 else 0
            fits = scale.dtype in FLOAT_DTYPES and beside == scale and scale.shape == (rows, groups)
            fits = fits and groups > 0 and columns % groups == 0
            fits = fits and weight.shape[0] == ceil_div(rows, self._per_byte)
            said = f"weight_scale and weight_offset [{rows}, groups] in floats"
        if not fits:
            raise PlanError(f"expected {said} for {weight}, found {scale} and {beside}")
        return (TensorType("BF16", (rows, columns)),)

    def loss(self, *args: TensorType) -> str | None:
        return "rounds int8 x scale to bf16 (relative error at most 2^-8)"

    @property
    def _per_byte(self) -> int:
        return 2 if self.kind == "packed" else 1

    def row_step(self, *args: TensorType) -> int:
        return self._per_byte

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        (made,) = self.infer(*args)
        if (start, stop) == (0, made.shape[0]):
            return whole(self, args)
        taken = []
        for number, arg in enumerate(args):
            step = self._per_byte if number == 0 else 1
            first, last = start // step, ceil_div(stop, step)
            cut = len(arg.shape) > 1
            taken.append((first * arg.row_nbytes, arg.with_rows(last - first)) if cut else (0, arg))
        return Part(tuple(taken), ((start * made.row_nbytes, made.with_rows(stop - start)),))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        (made,) = self.infer(*args)
        return row_parts(self, made.shape[0], 2 * made.row_nbytes, limit, *args)

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[Self, tuple[Output, ...]]:
        step = self._per_byte
        if start % step:
            raise PlanError(f"rows from {start} on are wanted, and {step} rows share their bytes")
        taken = [args[0].rows(start // step, ceil_div(stop, step))]
        taken += [arg.rows(start, stop) if len(arg.type.shape) > 1 else arg for arg in args[1:]]
        return self, tuple(taken)

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        codes = array(ins[0].data, np.int8, ins[0].type.shape)
        scale, beside = _floats(ins[1]), _floats(ins[2])
        if self.kind == "static":
            with np.errstate(all="ignore"):
                scale, beside = scale / beside, np.zeros_like(scale)
        check_finite(scale, 0)
        check_finite(beside, 0)
        rows, groups = scale.shape
        for start, stop in float_tiles(rows, codes.shape[1]):
            part = codes[start:stop]
            if self.kind == "packed":
                at = np.arange(start, stop)
                pairs = codes[at // 2]
                # A shift to the left and back extends the sign of the lower half.
                lower = np.left_shift(pairs, 4) >> np.int8(4)
                part = np.where((at % 2 == 0)[:, None], lower, pairs >> np.int8(4))
            blocks = part.astype(np.float32).reshape(stop - start, groups, -1)
            with np.errstate(all="ignore"):
                blocks -= beside[start:stop, :, None]
                blocks *= scale[start:stop, :, None]
            yield start, blocks.reshape(stop - start, -1)


def _floats(stored: Buffer) -> Float32s:
    """Scales or offsets as float32; I64 holds the bits of one."""
    import numpy as np

    kind = stored.type
    if kind.dtype == "I64":
        bits = array(stored.data, np.int64, kind.shape)
        return bits.astype(np.int32).view(np.float32)
    found = np.empty(kind.shape, np.float32)
    decode(stored.data, kind.dtype, found, np.empty(kind.shape, np.int32))
    return found


# Types whose weights are (code - offset) * scale, one code a byte.
_OFFSET = ("W8A8_DYNAMIC", "W8A8_MIX", "W8A16", "W4A4_DYNAMIC")
_STATIC, _PACKED, _PLAIN = "W8A8", "W4A8_DYNAMIC", "FLOAT"
# The first version whose W4A8 has two rows in one and no second scales.
_VERSION = "1.0.0"


def description(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The type of each tensor by name, and a few settings; None in a folder without one."""
    found = (one.block for one in checkpoint.quantization_configs if one.method == ASCEND)
    return next(found, None)


def read(plan: Plan, module: str) -> Read | None:
    """A module whose weight the description gives a type of integers."""
    stated, codes = description(plan.checkpoint), f"{module}.{PARTS[0]}"
    weight = plan.tensors.get(codes)
    if stated is None or (weight is None and f"{module}.{PARTS[2]}" not in plan.tensors):
        return None
    kind = stated.get(codes)
    if weight is not None and weight.type.dtype != "I8" and kind in (None, _PLAIN):
        return None
    if kind not in (*_OFFSET, _STATIC, _PACKED):
        raise PlanError(
            f"{codes!r}: expected a type of integers in the description ({', '.join(_OFFSET)}, "
            f"{_STATIC}, {_PACKED}) for {weight and weight.type}, found {kind!r}"
        )
    if weight is None or weight.type.dtype != "I8":
        found = "none" if weight is None else weight.type
        raise PlanError(
            f"{codes!r}: expected codes in I8, as the description says {kind}, found {found}"
        )
    if kind == _PACKED and stated.get("version") != _VERSION:
        raise PlanError(
            f"{codes!r}: expected version {_VERSION} of the description for {kind}, found "
            f"{stated.get('version')!r}: before it codes had two scales; quantize anew with msmodelslim"
        )

    parts = (PARTS[0], "deq_scale", "input_scale") if kind == _STATIC else PARTS[:3]
    names = [f"{module}.{part}" for part in parts]
    form: Kind = "static" if kind == _STATIC else "packed" if kind == _PACKED else "offset"
    others = [f"{module}.{part}" for part in PARTS[1:4] if part not in parts]
    beside = [name for name in others if name in plan.tensors]
    return stored(plan, names, DequantAscend(form), _as_rows), (*names, *beside)


def _as_rows(output: Output) -> Output:
    """A scale a row as a column."""
    shape = output.type.shape
    return output.reshape((*shape, 1)) if len(shape) == 1 and shape[0] > 1 else output


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    stated = folder.once(description)
    kind = None if stated is None else stated.get(f"{module}.{parameter}")
    return f"msmodelslim {kind}" if parameter == PARTS[0] and kind not in (None, _PLAIN) else None


FORMAT = Format(
    name="msmodelslim", title="msmodelslim", parameters=PARTS, mark=PARTS[2],
    unmixed=weights_of_method(ASCEND, read),
    codes=("I8",), cut=(1, "group"), order=18,
    equals="msmodelslim 26.1 (q - offset) * scale", read=read, label=_label,
)  # fmt: skip
