"""The words that users write for options of passes, and the fields and values that passes have for them.

A pass's repr stands in fingerprints, journals, manifests and receipts, so its fields and values keep
their first names. Where a clearer word was found later, command lines and recipes take both; the old
ones are accepted until 0.2 and are no longer shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.core.errors import UsageError

# What w4a16 has for the routed experts, whatever their names in a family.
EXPERT_PATTERN = r"re:.*\.mlp\.experts\..*"
# What `targets` names beside modules: the routed experts, and every linear layer that runtimes load so.
EXPERTS, LINEAR = "experts", "Linear"
# Of --rounding: the bytes of kt-kernel's own converter.
REFERENCE, _PEER = "reference", "peer"
UNDERSAMPLED, _FEW = "undersampled", "few"
_ALL = "all"
_TWO_TARGETS = ("nvfp4", "fp8", "mx", "int8")


def fields_of(name: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the pass `name` as its fields have them. What is none of the words stays as it is, for
    the pass to judge. Raises UsageError for a word that is given beside its old one, and for targets
    that the pass does not tell apart."""
    found = dict(words)
    if name == "amx" and found.get("rounding") == REFERENCE:
        found["rounding"] = _PEER
    if name == "w4a16" and isinstance(found.get("targets"), list | tuple):
        found["targets"] = tuple(EXPERT_PATTERN if t == EXPERTS else t for t in found["targets"])
    if name in _TWO_TARGETS and "targets" in found:
        found["targets"] = _of_two(name, found["targets"])
    if isinstance(found.get("calibrate"), Mapping):
        found["calibrate"] = _of_calibration(found["calibrate"])
    return found


def words_of(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round."""
    found = dict(fields)
    if name == "amx" and found.get("rounding") == _PEER:
        found["rounding"] = REFERENCE
    if name == "w4a16" and "targets" in found:
        found["targets"] = [EXPERTS if t == EXPERT_PATTERN else t for t in found["targets"]]
    if name in _TWO_TARGETS and "targets" in found:
        found["targets"] = [LINEAR if found["targets"] == _ALL else found["targets"]]
    calibrate = found.get("calibrate")
    if isinstance(calibrate, Mapping):
        found["calibrate"] = {
            UNDERSAMPLED if key == _FEW else key: value for key, value in calibrate.items()
        }
    return found


def option_word(path: str) -> str:
    """An option's path, `calibrate.few`, as users write it."""
    return path.replace(f"calibrate.{_FEW}", f"calibrate.{UNDERSAMPLED}")


def value_words(name: str, message: str) -> str:
    """A message about the values that an option of a pass takes, in users' words."""
    return message.replace(f"{_PEER!r}", f"{REFERENCE!r}") if name == "amx" else message


def rounding_word(value: object) -> object:
    """A manifest's `rounding` as users write it."""
    return REFERENCE if value == _PEER else value


def _of_two(name: str, targets: Any) -> Any:
    """`experts` or `all`: these passes take no other modules by name."""
    listed = tuple(targets) if isinstance(targets, list | tuple) else (targets,)
    if not listed or not all(isinstance(target, str) for target in listed):
        return targets
    for target in listed:
        if target not in (EXPERTS, LINEAR, _ALL):
            raise UsageError(
                f"targets: {name} quantizes {EXPERTS!r} or {LINEAR!r}, found {target!r}; modules by "
                "name are supported by w4a16"
            )
    return EXPERTS if set(listed) == {EXPERTS} else _ALL


def _of_calibration(words: Mapping[str, Any]) -> dict[str, Any]:
    if UNDERSAMPLED in words and _FEW in words:
        raise UsageError(
            f"calibrate: {UNDERSAMPLED!r} and {_FEW!r} are one option; give the former"
        )
    return {_FEW if key == UNDERSAMPLED else key: value for key, value in words.items()}
