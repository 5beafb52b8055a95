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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from qconvert.checkpoint.prepared import DERIVED
from qconvert.contrib.trtllm_gen.stacks import Form
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RunError
from qconvert.core.graph import Buffer
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
class Rows:
    """The order of packed weights: whole rows. Arguments are w1 and w3 where gated."""

    gated: bool

    @property
    def tile(self) -> int:
        return TILE

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1

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
class Scales:
    """The order of E4M3 block scales: words of 4. Arguments as for `Rows`."""

    gated: bool

    @property
    def tile(self) -> int:
        return TILE

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1

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
