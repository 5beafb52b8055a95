"""Nothing broken: shows that each scene works, and what it takes, before anything is broken in it."""

from __future__ import annotations

from hostile.case import Ground, Mutation, Verdict
from hostile.scenes import SCENES

# What a sound input is refused for in these: no Hub, an OUT that is another plan's or unfinished.
_REFUSED = frozenset(
    {"upload dry", "validate", "validate sarif", "inspect", "amx other plan", "finish"}
)


def _nothing(_ground: Ground) -> None:
    return


MUTATIONS = (
    Mutation(
        "nothing", "sound", _nothing, (), Verdict.ACCEPTED, needs=frozenset(),
        passes=_REFUSED, most=len(SCENES),
    ),
)  # fmt: skip
