"""drop: leave tensors out, by a rule that has a name. Nothing else may lose a byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from qconvert.core.errors import PlanError
from qconvert.core.family import MTP_COUNTS, first_int, text_config
from qconvert.core.manifest_keys import DRAFT
from qconvert.passes.replace_weights import sources_of
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the MTP (draft) layers, or every tensor whose name matches a shell pattern.

    A pattern needs `why`, which is recorded with the tensors. Raises PlanError if nothing
    matches, and (in Plan.check) if experts or MTP would be dropped in part.
    """

    name: ClassVar[str] = "drop"

    what: Literal["mtp"] | None = None
    match: str | None = None
    why: str | None = None

    def __call__(self, plan: Plan) -> Plan:
        if (self.what is None) == (self.match is None):
            raise PlanError("give either `what: mtp` or `match: PATTERN`")
        if self.match is not None and not self.why:
            raise PlanError(f"`match: {self.match}` needs `why:`, the reason to record")
        dims = plan.checkpoint.role_index.dims
        family = plan.checkpoint.family

        def goes(name: str) -> bool:
            if self.match is not None:
                return fnmatchcase(name, self.match)
            return family.is_mtp(name, dims)

        if self.what == "mtp" and DRAFT in plan.facts:
            raise PlanError("the folder holds a draft alone, so nothing would be left of a model")
        rule = f"drop: {self.why}" if self.match is not None else "drop: what=mtp"
        gone = [name for name in plan.tensors if goes(name)]
        counted = self.what == "mtp" and first_int(text_config(plan.config), *MTP_COUNTS) > 0
        if not gone and not counted:  # a count alone is dropped, too
            raise PlanError(
                f"nothing matches {self.match!r}; see `qconvert inspect SRC --tensors '*'` for the names"
                if self.match is not None
                else "no tensor is known as one of an MTP (draft) layer, and config.json counts none: "
                "there is nothing to drop"
            )
        dropped = {**plan.dropped, **sources_of(plan, gone, rule)}
        removed = set(gone)
        kept = {name: output for name, output in plan.tensors.items() if name not in removed}
        config = plan.config
        if self.what == "mtp":
            config = _without_mtp(config)
            if family.dims(config).mtp_layers:  # the class assumes a draft that is not stated
                config = {**config, "mtp_num_hidden_layers": 0}
        notes = () if gone else ("none is there; config.json counts none now",)
        entry = LogEntry(self.name, options_of(self), len(gone), None, notes)
        return plan.logged(entry, tensors=kept, dropped=dropped, config=config)


def _without_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in MTP_COUNTS:  # left as they were, a runtime would look for the weights
            kept[key] = 0
        elif key == "text_config" and isinstance(value, Mapping):
            kept[key] = _without_mtp(value)
        else:
            kept[key] = value
    return kept


PASSES = (Drop,)
