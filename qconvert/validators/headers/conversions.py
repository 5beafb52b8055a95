"""What qconvert.json says of how weights were quantized, against what lies beside it.

QC092 it says that the result loads at a tensor-parallel size at which no rank gets whole groups.
QC093 weights were calibrated on made-up tokens.
QC094 what it says of a calibration cannot be meant, or is not borne out by what it says of the weights.

Not a validator itself: it has no `VALIDATOR`, so discovery passes it by; manifest_claims asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.core.roles import Cut
from qconvert.validation.findings import Finding, Rule
from qconvert.validators.reading.matrices import matrices

RULES = (
    Rule(
        "QC092",
        "qconvert.json says it loads at a tensor-parallel size, and its groups do not divide so",
        "Config or tensors were changed after the conversion. Some kernels refuse, and some round the "
        "number of groups down in silence and use each scale for its neighbour's columns.",
        "Convert again with --tp, which refuses what would not load, or with --group-size 32.",
    ),
    Rule(
        "QC093",
        "weights were calibrated on made-up tokens",
        "--synthetic is for trying things out: experts that real text uses hardly ever were weighed as "
        "much as others, and what each of them sees was noise.",
        "Calibrate again with --data, or round with --rtn.",
    ),
    Rule(
        "QC094",
        "qconvert.json contradicts itself on how weights were calibrated",
        "It was edited, or is another folder's.",
        "Convert again; never copy a qconvert.json.",
    ),
)

FACT = "calibration"  # of the manifest
_TP = re.compile(r"\btp=(\d{1,5})\b")
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
                f"says that AMX codes were calibrated, and has no `{FACT}` that says with what"
            )
            yield Finding("QC094", "error", MANIFEST, message)
        return
    found = manifest[FACT]
    wrong = _fault(found)
    if wrong:
        yield Finding("QC094", "error", MANIFEST, f"`{FACT}`: {wrong}")
        return
    if rounding is not None and rounding != "gptq":
        message = f"`{FACT}` is there, and `amx` says that codes were rounded ({rounding})"
        yield Finding("QC094", "error", MANIFEST, message)
    if found["synthetic"]:
        message = f"calibrated on made-up tokens ({found['samples']} samples of {found['length']})"
        yield Finding("QC093", "warning", MANIFEST, message)


def _fault(found: Any) -> str:
    """Why it cannot be meant."""
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
    for key, known in (("experts", ("routed", "all")), ("few", ("all", "rtn"))):
        if found.get(key) not in known:
            return f"expected `{key}` to be {' or '.join(known)}, found {found.get(key)!r}"
    return ""


def _parallel(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """Of each kind of packed matrix the first that does not divide."""
    sizes = [
        int(number)
        for step in manifest["passes"]
        if step.get("name") == "w4a16"
        for number in _TP.findall(str(step.get("spec")))
    ]
    if not sizes or sizes[-1] < 1:
        return
    tp, seen = sizes[-1], set()
    for matrix in matrices(checkpoint).values():
        form = matrix.form
        if form.codes is None or form.grid is None or matrix.role in seen:
            continue
        cut = checkpoint.census.kind(matrix.tensor).cut
        if cut is Cut.WHOLE:
            continue
        packed_rows = form.turned or not form.codes.symmetric
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
                f"{MANIFEST} says it loads at tensor parallel {tp}: expected {what} in {tp} equal parts "
                f"of whole {step}s, found {size}"
            )
            yield Finding("QC092", "error", matrix.tensor, message)
