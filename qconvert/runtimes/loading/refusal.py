"""The end of a load: an error of the runtime, foreseen."""

from __future__ import annotations


class LoadRefused(Exception):
    """The runtime would end with this error. `kind` is the type of its exception and `says` a part of
    its message; `why` says it in our words, `where` names the module or tensor."""

    def __init__(self, kind: str, says: str, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.kind, self.says, self.where, self.why = kind, says, where, why


class NotSimulated(Exception):
    """The simulator has no rule for this class, quantization or setting, so it gives no answer."""
