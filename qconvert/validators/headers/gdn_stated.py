"""Statements of a folder about the order of its fused linear attention, if nothing proves it: headers
cannot, because every order has the same shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import MANIFEST
from qconvert.validation.findings import OnlyRead
from qconvert.validation.runner import Folder, Need, NotChecked, Yield
from qconvert.validators.reading.matrices import FUSED, GROUPS_FACT, gdn_groups


@dataclass(frozen=True)
class GdnStated:
    """It can only prove that an order is stated."""

    name: str = "gdn_stated"
    proves: str = "the order of fused linear-attention rows is stated, or they are split"
    needs: frozenset[Need] = frozenset({"gdn"})

    def __call__(self, folder: Folder) -> Iterator[Yield]:
        checkpoint = folder.checkpoint
        if not any(f".{name}." in tensor for tensor in checkpoint for name in FUSED):
            return
        groups = gdn_groups(checkpoint)
        if groups is None:
            raise NotChecked(
                f"no valid {GROUPS_FACT} in {MANIFEST}, and the family has no convention"
            )
        if folder.source is not None and folder.request.level != "headers":
            return
        said = (checkpoint.manifest or {}).get(GROUPS_FACT)
        who = f"says {MANIFEST}" if said else f"by the convention of {checkpoint.family.name}"
        count = f"{groups} group" + ("s" if groups > 1 else "")
        yield OnlyRead(
            f"linear attention is fused in {count}, {who} (--against SRC --level sample proves it)"
        )


VALIDATOR = GdnStated()
