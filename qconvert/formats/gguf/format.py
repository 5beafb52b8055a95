"""Tensors of a GGUF file, each of the type that its header states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.gguf.models import HALVES, KINDS, METHOD, PLUS_ONE
from qconvert.formats.base import FolderTensors, Format, Read, Stored
from qconvert.formats.gguf.decode import DequantGguf
from qconvert.plan.plan import Plan


@lru_cache(maxsize=8)  # asked for each matrix
def _stated(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The block of a GGUF file's config, {} for another checkpoint."""
    blocks = (c.block for c in checkpoint.quantization_configs if c.method == METHOD)
    return next(blocks, {})


def _decoder(block: Mapping[str, Any], name: str) -> DequantGguf:
    return DequantGguf(block[KINDS][name], block[HALVES].get(name, 0), name in block[PLUS_ONE])


def read(plan: Plan, module: str) -> Read | None:
    """A module's weight in a GGUF file. Raises PlanError where it does not fit its type."""
    block, name = _stated(plan.checkpoint), f"{module}.weight"
    if not block or name not in block[KINDS] or name not in plan.tensors:
        return None
    output = plan.tensors[name]
    if output.source is None:
        return None
    return _stored(plan, name), (name,)


def _stored(plan: Plan, name: str) -> Stored:
    decoder, output = _decoder(_stated(plan.checkpoint), name), plan.tensors[name]
    (kind,) = decoder.infer(output.type)
    rows = kind.shape[0]
    return Stored(decoder, (output,), rows, kind.numel // max(1, rows))


def every(plan: Plan) -> Iterator[tuple[str, Read]]:
    """All tensors of a GGUF file that no folder holds as they are: blocks, numbers in F32 as it has
    them, rows in another order."""
    for name in _stated(plan.checkpoint).get(KINDS, ()):
        if name in plan.tensors and plan.tensors[name].source is not None:
            yield name, (_stored(plan, name), (name,))


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    kinds: Mapping[str, str] = folder.once(_stated).get(KINDS, {})
    return kinds.get(f"{module}.{parameter}")


FORMATS = (
    Format(
        name="gguf", title="GGUF", parameters=("weight",), codes=("U8",), cut=(1, 0), order=5,
        equals="gguf 0.19 quants.py", read=read, every=every, label=_label,
    ),
)  # fmt: skip
