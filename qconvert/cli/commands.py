"""Table of commands: a module is imported when it runs, or when its help is shown. All of them
took 30 ms of CPU, of which one command needs 8."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module

import click

# By module, the commands with the names that they have there.
_MODULES = {
    "check": ("inspect", "validate", "diff"),
    "advise": ("advise",),
    "convert": ("plan", "run", "dequant"),
    "layout": ("fuse", "unfuse", "experts", "relabel", "prepare", "unprepare", "mtp", "text"),
    "kt": ("amx", "kt"),
    "quantize": ("w4a16", "nvfp4", "fp8", "int8", "mx", "quantize"),
    "stages": ("split", "join"),
    "shards": ("finish", "status"),
    "evaluate": ("evaluate",),
    "repair": ("repair",),
    "upload": ("upload",),
    "misc": ("recipes", "clean", "demo"),
    "report": ("report",),
}
_PLACES = {name: (module, name) for module, names in _MODULES.items() for name in names}
_PLACES["eval"] = _PLACES.pop("evaluate")


class Commands(MutableMapping[str, click.Command]):
    """The commands by name. One that is set is kept beside them."""

    def __init__(self) -> None:
        self._known: dict[str, click.Command | None] = dict.fromkeys(_PLACES)

    def __getitem__(self, name: str) -> click.Command:
        found = self._known[name]
        if found is None:
            module, attribute = _PLACES[name]
            loaded = getattr(import_module(f"qconvert.cli.{module}"), attribute)
            assert isinstance(loaded, click.Command)
            self._known[name] = found = loaded
        return found

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._known[name] = command

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
