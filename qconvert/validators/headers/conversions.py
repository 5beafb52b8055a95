"""Statements of qconvert.json about the quantization of weights, checked against tensors and config.

QC092 it states a tensor-parallel size at which no rank gets whole groups.
QC093 weights were calibrated on synthetic tokens.
QC094 its calibration entry is invalid, or contradicts what it states about the weights.

Not a validator itself: it has no `VALIDATOR`, so discovery skips it; manifest_claims uses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.core.roles import Cut
from qconvert.validation.findings import Finding
from qconvert.validators.reading.matrices import matrices

FACT = "calibration"  # of the manifest
_DIGEST = re.compile(r"[0-9a-f]{32}")
_COUNTS = ("samples", "length", "block_size", "min_tokens")
_CHANNEL_STEP = 64  # of a row under one scale, what a rank has fits kernels in multiples of this


def quantizing_claims(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """Each claim on its own."""
    yield from _calibration(manifest)
    if "amx" not in manifest:
        yield from _parallel(checkpoint, manifest)


def _calibration(manifest: Mapping[str, Any]) -> Iterator[Finding]:
    block = manifest.get("amx")
    rounding = block.get("rounding") if isinstance(block, dict) else None
    if FACT not in manifest:
        if rounding == "gptq":
            message = (
                f"says that AMX codes were calibrated, but has no `{FACT}`, which states the data"
            )
            yield Finding("QC094", "error", MANIFEST, message)
        return
    found = manifest[FACT]
    wrong = _fault(found)
    if wrong:
        yield Finding("QC094", "error", MANIFEST, f"`{FACT}`: {wrong}")
        return
    if rounding is not None and rounding != "gptq":
        message = f"`{FACT}` exists, but `amx` says that codes were rounded ({rounding})"
        yield Finding("QC094", "error", MANIFEST, message)
    if found["synthetic"]:
        message = (
            f"calibrated on synthetic tokens ({found['samples']} samples of {found['length']})"
        )
        yield Finding("QC093", "warning", MANIFEST, message)


def _fault(found: Any) -> str:
    """Its fault."""
    if not isinstance(found, dict):
        return f"expected an object, found {found!r}"
    data = found.get("data")
    if not isinstance(data, str) or not _DIGEST.fullmatch(data):
        return f"expected `data` to be a digest of 32 hex digits, found {data!r}"
    if type(found.get("synthetic")) is not bool:
        return f"expected `synthetic` to be true or false, found {found.get('synthetic')!r}"
    for key in _COUNTS:
        if type(found.get(key)) is not int or found[key] < 1:
            return f"expected `{key}` to be 1 or more, found {found.get(key)!r}"
    for key, known in (("experts", ("routed", "all")), ("undersampled", ("all", "rtn"))):
        if found.get(key) not in known:
            return f"expected `{key}` to be {' or '.join(known)}, found {found.get(key)!r}"
    return ""


def _parallel(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """For each kind of packed matrix the first that cannot be divided."""
    sizes = [
        tp
        for step in manifest["passes"]
        if step["name"] == "w4a16" and type(tp := step["options"].get("tp")) is int
    ]
    if not sizes or sizes[-1] < 1:
        return
    tp, seen = sizes[-1], set()
    for matrix in matrices(checkpoint).values():
        form = matrix.form
        if form.codes is None or form.grid is None or matrix.role in seen:
            continue
        cut = checkpoint.role_index.kind(matrix.tensor).cut
        if cut is Cut.WHOLE:
            continue
        packed_rows = form.transposed or not form.codes.symmetric
        size, step = form.rows, form.codes.word if packed_rows else 1
        what = "rows"
        if cut is Cut.COLUMNS:
            whole = form.grid.block[1] == form.columns
            size, step, what = (
                form.columns,
                _CHANNEL_STEP if whole else form.grid.block[1],
                "columns",
            )
        if tp > 1 and size % (tp * step):
            seen.add(matrix.role)
            message = (
                f"{MANIFEST} states tensor parallel {tp}: expected {what} in {tp} equal parts "
                f"of whole {step}s, found {size}"
            )
            yield Finding("QC092", "error", matrix.tensor, message)
