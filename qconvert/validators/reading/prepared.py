"""Experts in the order of TensorRT-LLM's MoE kernels (experimental): which tensors of a folder are
theirs, what its marker states, and which byte comes from where.

Sources: flashinfer 0.7.2 (`fused_moe/core.py`, `get_shuffle_matrix_a_row_indices`,
`block_scale_interleave`), sglang (`prepare_static_weights_for_trtllm_fp4_moe`); written from
their behaviour, without sharing code with the encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.errors import CheckpointError
from qconvert.core.json_text import parse_json
from qconvert.validators.formats.nvfp4 import DIALECTS, Dialect

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.intp]]

METHOD = "qconvert-trtllm-gen"
FACT = "trtllm_gen"  # in the metadata of shards, and in qconvert.json
SCALARS = ("g1_alphas", "g2_alphas", "g1_scale_c", "w13_input_scale_quant", "w2_input_scale_quant")
TILE = 128


def blocks_of(config: QuantConfig) -> Iterator[Mapping[str, Any]]:
    """The source's quantization blocks, which a prepared folder's marker keeps: they hold for all
    tensors that are not prepared."""
    replaced = config.block.get("replaced") if config.method == METHOD else None
    for entry in replaced if isinstance(replaced, list) else ():
        block = entry.get("block") if isinstance(entry, Mapping) else None
        if isinstance(block, Mapping):
            yield block


def marker(checkpoint: Checkpoint) -> QuantConfig | None:
    return next((c for c in checkpoint.quantization_configs if c.method == METHOD), None)


def metadata_layout(checkpoint: Checkpoint) -> Any:
    """The layout that the shards' metadata states: None if nothing, "" if it cannot be read."""
    text = checkpoint.metadata.get(FACT)
    if text is None:
        return None
    try:
        return parse_json(text, FACT)
    except CheckpointError:
        return ""


def bases(checkpoint: Checkpoint) -> dict[str, Dialect]:
    """The name prefix of each layer's prepared tensors, and their dialect."""
    found: dict[str, Dialect] = {}
    for name in checkpoint if checkpoint.says_prepared else ():
        for dialect in DIALECTS:
            end = f".experts.w13_{dialect.weight}"
            if name.endswith(end) and checkpoint[name].type.dtype == "U8":
                found[name.removesuffix(f".w13_{dialect.weight}")] = dialect
    return found


@lru_cache(maxsize=4)
def prepared_tensors(checkpoint: Checkpoint) -> frozenset[str]:
    """All tensors of prepared layers."""
    layers = set(bases(checkpoint))
    ends = {*SCALARS}
    for dialect in DIALECTS:
        for part in (dialect.weight, "weight_scale", dialect.global_scale, dialect.input):
            ends |= {f"w13_{part}", f"w2_{part}"}
    return frozenset(
        name
        for name in checkpoint
        if name.rpartition(".")[0] in layers and name.rpartition(".")[2] in ends
    )


# --- The order -----------------------------------------------------------------------------------


def source_rows(rows: int, *, gated: bool) -> Numbers:
    """The row of [gate; up], or of the one matrix, that each of `rows` prepared rows is: [rows].

    Of 32 rows, row 8c + r is row 4r + c of what comes before: for gated experts the rows of up and
    gate in turn."""
    import numpy as np

    place = np.arange(rows)
    before = place // 32 * 32 + 4 * (place % 8) + place % 32 // 8
    if not gated:
        return before
    half = rows // 2
    return np.where(before % 2 == 0, half + before // 2, before // 2)


def scale_places(rows: int, columns: int) -> Numbers:
    """The position of scale [m, k] among prepared bytes, [rows, columns]: tiles of 128 rows and 4
    columns, 512 bytes each."""
    import numpy as np

    m, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    tile = m // TILE * (columns // 4) + k // 4
    return tile * 512 + m % 32 * 16 + m % TILE // 32 * 4 + k % 4
