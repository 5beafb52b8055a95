"""The card that a conversion writes, before anything is validated."""

from __future__ import annotations

from typing import Any

from qconvert import __version__
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TypesOf
from qconvert.core.errors import CheckpointError
from qconvert.hub.card import README, card, split_front_matter
from qconvert.hub.card.front import base_of
from qconvert.plan.manifest import described
from qconvert.plan.plan import Plan
from qconvert.runtimes.serving import loads

_RULE = "card: replaced by what was made, and of what"


def with_card(plan: Plan, base_model: str | None = None) -> Plan:
    """The plan with a model card as its README.md, in place of the source's, whose front matter is kept
    as far as it is still true. `base_model` is the source's id on the Hub; None: what the source names.

    Call it last, on a finished plan: the text is part of the fingerprint.
    """
    source = source_front(plan.checkpoint)
    base = base_model or base_of(plan.checkpoint.root, source)
    manifest = {"identity": {"qconvert": __version__}, **described(plan)}
    said = loads(plan.config, TypesOf(plan.tensors), manifest)
    left = {README: _RULE} if README in plan.side_files else {}
    return plan.beside(
        side_files=tuple(name for name in plan.side_files if name != README),
        dropped_files={**left, **plan.dropped_files},
        new_files={
            **plan.new_files,
            README: card(manifest, plan.config, source, base_model=base, said=said),
        },
    )


def source_front(checkpoint: Checkpoint) -> dict[str, Any]:
    """Front matter of the source's README.md, empty if it cannot be read: validation reports that
    (QC059), and the conversion continues."""
    if README not in checkpoint.side_files:
        return {}
    try:
        return split_front_matter((checkpoint.read(README) or b"").decode("utf-8", "replace"))[0]
    except CheckpointError:
        return {}
