"""NVFP4 experts as TensorRT-LLM's generated MoE kernels read them (flashinfer's trtllm backend).

Sources: flashinfer 0.7.2.post1 (`fused_moe/core.py`, `_maybe_get_cached_w3_w1_permute_indices` and
`get_w2_permute_indices_with_cache`; `utils.py`, `get_shuffle_matrix_a_row_indices`;
`quantization/fp4_quantization.py`, `block_scale_interleave`) and sglang
(`layers/quantization/utils.py`, `prepare_static_weights_for_trtllm_fp4_moe`), which makes this at
every load. Experimental: the bytes equal theirs, but no kernel has run on them.

w1 is gate, w3 up, w2 down; M rows; all maps say which source row goes to row n.
  shuffle    within 32 rows, row 8c + r comes from 4r + c (r < 8, c < 4)
  gated w13  halves in the order [w3; w1], their rows alternating, then the shuffle
  scales     rows as the weights', then tiles of 128 rows and 4 columns, 512 bytes each: byte
             (m % 32) * 16 + m % 128 // 32 * 4 + k % 4 of tile (m // 128, k // 4), row-major
A tile of 128 rows takes the same rows of w1 and w3 wherever it lies, which is why a rank's slice of a
prepared tensor is what preparing the rank's weights would give.

Routed experts stored in NVFP4, one matrix per expert, in both dialects (experimental).

modelopt: `weight` U8 (two E2M1 codes a byte), `weight_scale` E4M3 for 16 columns,
`weight_scale_2` and `input_scale` F32, multipliers. compressed-tensors (nvfp4-pack-quantized):
`weight_packed`, `weight_scale`, `weight_global_scale` and `input_global_scale`, divisors. Input scales
need a calibration and may be absent everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from qconvert.checkpoint.prepared import DERIVED
from qconvert.core.dtypes import Shape, TensorType
from qconvert.core.errors import PlanError, RunError
from qconvert.core.graph import Buffer, Output
from qconvert.ops.base import Exact, Uncut, array
from qconvert.ops.gather import take_tiles

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qconvert.ops.gather import Tiles


TILE = 128  # rows: the kernels' epilogue tile, and of a tile of scales
_WORD = 4  # scales of neighbouring columns stay together

GUIDE = "PREPARED.md"


def row_step(gated: bool) -> int:
    """The intermediate size must be a multiple of this, for the model and for each rank's share."""
    return TILE // 2 if gated else TILE


def check_sizes(hidden: int, intermediate: int, gated: bool) -> None:
    """Raise PlanError for sizes that the runtime pads before it prepares them, or refuses."""
    step = row_step(gated)
    if intermediate % step:
        kind = "gated" if gated else "plain"
        raise PlanError(
            f"expected an intermediate size in whole {step}s ({kind} experts, tiles of {TILE} rows), "
            f"found {intermediate}; the runtime pads such a size as it loads, so a prepared file "
            "cannot fit: serve the source unprepared"
        )
    if hidden % TILE:
        raise PlanError(
            f"expected a hidden size in whole {TILE}s (rows of w2), found {hidden}; the kernels have "
            "no layout for it: serve the source unprepared"
        )


def tp_sizes(intermediate: int, gated: bool) -> list[int]:
    """The tensor-parallel sizes, powers of two, that one prepared file serves."""
    step = row_step(gated)
    return [1 << n for n in range(intermediate.bit_length()) if intermediate % (step << n) == 0]


@lru_cache(maxsize=64)
def row_index(rows: int, gated: bool) -> NDArray[np.intp]:
    """For each row of a prepared matrix its row in the source, [rows]: of w1 followed by w3 where
    gated, else of the one matrix."""
    import numpy as np

    n = np.arange(rows)
    shuffled = n - n % 32 + n % 8 * 4 + n // 8 % 4
    if not gated:
        return shuffled
    half = rows // 2
    in_turn = shuffled // 2 + shuffled % 2 * half  # of [w3; w1]
    return (in_turn + half) % rows


@lru_cache(maxsize=64)
def scale_index(rows: int, columns: int, gated: bool) -> NDArray[np.intp]:
    """For each word of 4 prepared scales its word in the source, [rows * columns / 4]. `columns` are
    those of scales, in whole words."""
    import numpy as np

    words = columns // _WORD
    source = np.arange(rows * words).reshape(rows, words)[row_index(rows, gated)]
    return source.reshape(rows // TILE, 4, 32, words).transpose(0, 3, 2, 1).ravel()


@dataclass(frozen=True, slots=True)
class _Tiled:
    """An order within tiles. Arguments are w1 and w3 where gated."""

    gated: bool

    @property
    def tile(self) -> int:
        return TILE

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1


@dataclass(frozen=True, slots=True)
class Rows(_Tiled):
    """The order of packed weights: whole rows."""

    def width(self, columns: int) -> int:
        return columns

    def index(self, columns: int) -> NDArray[np.intp]:
        return row_index(TILE, self.gated)

    def gather(self, halves: Sequence[Tiles], result: Tiles, spare: Tiles) -> None:
        """Without the index: 32 rows are 4 times 8 (c, r), and for gated experts c is a pair and which
        of the two, w3 or w1, so all of it is a copy between strided views."""
        import numpy as np

        columns = result.shape[-1]
        if not self.gated:
            np.copyto(
                result.reshape(-1, 4, 8, columns),
                halves[0].reshape(-1, 8, 4, columns).swapaxes(1, 2),
            )
            return
        turns = result.reshape(-1, 2, 2, 8, columns)
        for turn, half in zip((1, 0), halves, strict=True):
            np.copyto(turns[:, :, turn], half.reshape(-1, 8, 2, columns).swapaxes(1, 2))


@dataclass(frozen=True, slots=True)
class Scales(_Tiled):
    """The order of E4M3 block scales: words of 4."""

    def width(self, columns: int) -> int:
        if columns % _WORD:
            raise PlanError(f"expected scales in whole words of {_WORD}, found {columns} columns")
        return _WORD

    def index(self, columns: int) -> NDArray[np.intp]:
        return scale_index(TILE, columns, self.gated)

    def gather(self, halves: Sequence[Tiles], result: Tiles, spare: Tiles) -> None:
        take_tiles(self, halves, result, spare)


@dataclass(frozen=True, slots=True)
class DerivedScalars(Uncut, Exact):
    """Scales of a layer's experts -> the scales that the kernels take, in F32: `DERIVED`, in that order.

    Arguments: per-tensor scales of w13, F32 [E, 2] (gate, up) or plain [E]; of w2 [E]; and the same two
    of their inputs. One scale serves the inputs of all experts: the largest multiplier, the smallest
    divisor. Results: three [E], then two [] (modelopt) or [E] (compressed-tensors), as the classes of
    sglang hold them, rounded where they round. Raises RunError for scales that give no finite,
    positive number.
    """

    inverted: bool
    gated: bool

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        experts = args[1].shape[0] if len(args) == 4 and len(args[1].shape) == 1 else -1
        wide = (experts, 2) if self.gated else (experts,)
        wanted = [wide, (experts,), wide, (experts,)]
        if [arg.shape for arg in args] != wanted or any(arg.dtype != "F32" for arg in args):
            raise PlanError(
                f"expected F32 scales {wanted} of one layer's experts, found "
                f"{', '.join(map(str, args))}"
            )
        one = (experts,) if self.inverted else ()
        each = TensorType("F32", (experts,))
        return (each, each, each, TensorType("F32", one), TensorType("F32", one))

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        one = np.float32(1)
        w13, w2, in13, in2 = (array(b.data, np.float32, b.type.shape) for b in ins)
        with np.errstate(all="ignore"):  # reported below
            if self.inverted:
                quant1, quant2 = in13.min(), in2.min()
                w13, w2, a1, a2 = one / w13, one / w2, one / quant1, one / quant2
            else:
                a1, a2 = in13.max(), in2.max()
                quant1, quant2 = one / a1, one / a2
            gate, up = (w13[:, 0], w13[:, 1]) if self.gated else (w13, w13)
            c = quant2 * (a1 * up) if self.gated else np.full_like(w2, quant2)
            results = (a1 * gate, a2 * w2, c, quant1, quant2)
        for name, result, out in zip(DERIVED, results, outs, strict=True):
            if not (np.isfinite(result) & (np.asarray(result) > 0)).all():
                raise RunError(
                    f"{name} is not a finite, positive number: a scale is zero or broken"
                )
            array(out.data, np.float32, out.type.shape)[...] = result
        return {}


def guide(form: Form) -> str:
    """PREPARED.md of a prepared folder."""
    sizes = ", ".join(map(str, tp_sizes(form.intermediate, form.gated)))
    return f"""# Prepared for TensorRT-LLM's MoE kernels (experimental)

Made by `qconvert prepare trtllm-gen`. The routed experts (NVFP4, {form.experts} a layer, hidden size \
{form.hidden}, intermediate size {form.intermediate}) lie in the order that these kernels read, which \
sglang otherwise makes at every load. The bytes equal what flashinfer and sglang make; no Blackwell \
server has run them yet.

A stock server refuses this folder by its quant_method: it would shuffle a second time and serve noise.
With qconvert in its environment (`pip install --no-deps qconvert`), sglang's plug-in takes it:

    SGLANG_PLUGINS=qconvert_prepared python -m sglang.launch_server --model FOLDER \\
        --moe-runner-backend flashinfer_trtllm --disable-shared-experts-fusion

Tensor-parallel sizes that fit: {sizes}. `qconvert unprepare FOLDER OUT` gives back the tensors it was \
made from, byte for byte; `qconvert validate` judges those, not this layout.
"""


GROUP = 16  # columns that share a block scale
_NAME = re.compile(r"(.+\.experts)\.([0-9]{1,9})\.([a-z0-9_]+)\.([a-z0-9_]+)")
# (w1, w3, w2) as checkpoints name them.
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class Dialect:
    """A checkpoint's names of a matrix's parameters. `inverted`: per-tensor scales are divisors."""

    name: str
    weight: str
    block: str
    tensor: str
    activation: str
    inverted: bool

    @property
    def parameters(self) -> tuple[str, str, str, str]:
        return self.weight, self.block, self.tensor, self.activation


MODELOPT = Dialect("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", False)
COMPRESSED_TENSORS = Dialect(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    True,
)
DIALECTS = {dialect.name: dialect for dialect in (MODELOPT, COMPRESSED_TENSORS)}

# A layer: parameters by name, of each expert's each projection.
Layer = dict[tuple[int, str], dict[str, Output]]


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a layer of experts: its dialect, projections (w1 and w3 if gated, then w2), count,
    sizes, the shape of a per-tensor scale, and whether inputs have scales."""

    dialect: Dialect
    projections: tuple[str, ...]
    experts: int
    hidden: int
    intermediate: int
    scalar: Shape
    activations: bool

    @property
    def gated(self) -> bool:
        return len(self.projections) == 3

    def __str__(self) -> str:
        kind = "gated" if self.gated else "plain"
        scales = "with" if self.activations else "without"
        return (
            f"{self.experts} {kind} experts of {self.dialect.name}, hidden size {self.hidden}, "
            f"intermediate size {self.intermediate}, {scales} input scales"
        )


def layers_of(tensors: Mapping[str, Output]) -> tuple[dict[str, Layer], dict[str, Output]]:
    """Parameters of routed experts by the name their layer's share, and all other tensors."""
    layers: dict[str, Layer] = {}
    others: dict[str, Output] = {}
    for name, output in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            others[name] = output
            continue
        base, expert, projection, parameter = match.groups()
        layer = layers.setdefault(base, {})
        layer.setdefault((int(expert), projection), {})[parameter] = output
    return layers, others


def named(base: str, layer: Layer) -> dict[str, Output]:
    """A layer's tensors under their own names."""
    return {
        f"{base}.{expert}.{projection}.{parameter}": output
        for (expert, projection), matrix in layer.items()
        for parameter, output in matrix.items()
    }


def dialect_of(layer: Layer) -> Dialect | None:
    """The dialect of a layer's first NVFP4 matrix, None if there is none."""
    for matrix in layer.values():
        for dialect in DIALECTS.values():
            if dialect.tensor in matrix:
                return dialect
    return None


def form_of(base: str, layer: Layer, experts: int) -> Form:
    """The form of an NVFP4 layer, checked to its last parameter. Raises PlanError naming the first that
    is missing, unexpected, or of another type or shape than its layer requires."""
    dialect = dialect_of(layer)
    assert dialect is not None
    projections = _projections(base, layer)
    for expert, projection in layer:
        if expert >= experts:
            raise PlanError(f"'{base}.{expert}.{projection}': the config counts {experts} experts")
    activations = any(dialect.activation in matrix for matrix in layer.values())
    wanted = set(dialect.parameters if activations else dialect.parameters[:3])
    for expert in range(experts):
        for projection in projections:
            found = layer.get((expert, projection), {}).keys()
            for parameter in sorted(wanted ^ found):
                what = (
                    "is missing" if parameter in wanted else "is not a parameter of NVFP4 experts"
                )
                raise PlanError(f"'{base}.{expert}.{projection}.{parameter}' {what}")
    down = layer[0, projections[-1]]
    shape = down[dialect.weight].type.shape
    if len(shape) != 2:
        raise PlanError(
            f"'{base}.0.{projections[-1]}.{dialect.weight}': expected a matrix, found "
            f"{down[dialect.weight].type}"
        )
    scalar = down[dialect.tensor].type.shape
    if down[dialect.tensor].type.numel != 1:
        raise PlanError(
            f"'{base}.0.{projections[-1]}.{dialect.tensor}': expected one element, found "
            f"{down[dialect.tensor].type}"
        )
    form = Form(dialect, projections, experts, shape[0], 2 * shape[1], scalar, activations)
    _check_types(base, layer, form)
    return form


def _projections(base: str, layer: Layer) -> tuple[str, ...]:
    """w1, w3, w2 of gated experts; up and down of plain ones."""
    known = {projection for _, projection in layer}
    for gate, up, down in _PROJECTIONS:
        if known == {gate, up, down}:
            return gate, up, down
        if known in ({up, down}, {gate, down}):
            plain = up if up in known else gate
            return plain, down
    raise PlanError(f"{base}: expected experts of gate, up and down, or two, found {sorted(known)}")


def _check_types(base: str, layer: Layer, form: Form) -> None:
    hidden, intermediate, dialect = form.hidden, form.intermediate, form.dialect
    for (expert, projection), matrix in layer.items():
        down = projection == form.projections[-1]
        rows, columns = (hidden, intermediate) if down else (intermediate, hidden)
        types = (
            TensorType("U8", (rows, columns // 2)),
            TensorType("F8_E4M3", (rows, columns // GROUP)),
            TensorType("F32", form.scalar),
            TensorType("F32", form.scalar),
        )
        for parameter, kind in zip(dialect.parameters, types, strict=True):
            found = matrix[parameter].type if parameter in matrix else kind
            if found != kind:
                raise PlanError(
                    f"'{base}.{expert}.{projection}.{parameter}': expected {kind}, found {found}"
                )
