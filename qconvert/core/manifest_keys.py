"""qconvert.json as it is read back: every key that any module uses has its type, or it is refused.

Validators judge the values; that `stage` is an object with numbers in it is checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from qconvert.core.errors import CheckpointError
from qconvert.core.json_text import parse_object
from qconvert.core.shown import shortened

Check = Callable[[Any], bool]

# Facts of an earlier conversion that hold for everything made from its result, until a pass changes
# them: the order of fused projections cannot be told from the tensors, nor that a folder is to hold
# draft layers alone.
LASTING_FACTS = ("gdn_groups", "draft")
# The fact of a folder that holds draft layers without their model.
DRAFT = "draft"
# The fact of a folder that holds the parameters of one tensor-parallel rank.
RANK = "rank"
# Adapters that became a part of the weights.
MERGED = "merge"
# What `qconvert eval --write` notes of a finished folder; no conversion writes it.
EVALUATION = "evaluation"


def parse_manifest(data: bytes, where: object) -> dict[str, Any]:
    """A manifest from its file's bytes. Raises CheckpointError if it is broken, or another
    program's."""
    return checked_manifest(parse_object(data, where), where)


def checked_manifest(found: dict[str, Any], where: object) -> dict[str, Any]:
    """The manifest, if it is valid. Raises CheckpointError as `parse_manifest` does."""
    for key, (check, expected) in _KEYS.items():
        if key in found and not check(found[key]):
            raise CheckpointError(
                f"{where}: expected {key!r} to be {expected}, found "
                f"{shortened(repr(found[key]), 200)}; it is broken, or not written by qconvert"
            )
        if key not in found and key in _NEEDED:
            raise CheckpointError(f"{where}: key {key!r} is missing; not written by qconvert")
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_hash(value: Any) -> bool:
    """A hash, or none for a file that there was not, or is no more."""
    return value is None or isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _values(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _with(needed: Mapping[str, Check], others: Mapping[str, Check] | None = None) -> Check:
    """An object that must have these keys, and may have those."""
    may = others or {}
    return lambda value: (
        isinstance(value, dict)
        and all(key in value and check(value[key]) for key, check in needed.items())
        and all(check(value[key]) for key, check in may.items() if key in value)
    )


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _is_span(value: Any) -> bool:
    return _is_counts(value) and len(value) == 2


_STEP = _with(
    {"name": _is_text, "options": lambda value: isinstance(value, dict)},
    {
        "matched": _is_count,
        "expected": lambda value: value is None or _is_count(value),
    },
)
_STAGE = _with(
    {
        "number": _is_count,
        "of": _is_count,
        "partition": _is_counts,
        "layers": _is_span,
        "environment": _values(_is_text),
    },
    {"folder": _is_text, "head_from_embeddings": _is_text, "repos": _is_texts},
)
_AMX = _with(
    {
        "method": _is_text, "numa": _is_count, "hidden_size": _is_count,
        "intermediate_size": _is_count, "experts": _is_count,
        "layers": lambda value: _is_counts(value) and bool(value),
    },
    {
        "rounding": _is_text,
        "cut_from": _with({"numa": _is_counts}, {"source": _is_text, "source_sample": _is_text}),
    },
)  # fmt: skip

_EVALUATION = _with(
    {
        "data": _is_text, "digest": _is_text, "samples": _is_count, "length": _is_count,
        "seed": _is_count, "tokens": _is_count, "hidden": _list(_is_number),
        "logits": _with(
            {
                "predicted": _is_count, "perplexity": _is_number, "source_perplexity": _is_number,
                "kl": _is_number, "agreement": _is_number,
                "kl_error": lambda value: value is None or _is_number(value),
            }
        ),
    },
    {
        "activations": lambda value: value is True,
        "task": _with(
            {
                "questions": _is_count,
                "accuracy": _with({"repo": _is_number, "source": _is_number}),
            }
        ),
    },
)  # fmt: skip

_NEEDED = frozenset({"identity", "passes", "dropped", "dropped_files"})
_KEYS: Mapping[str, tuple[Check, str]] = {
    "identity": (
        _with({}, {"qconvert": _is_text, "source": _is_text, "source_sample": _is_text}),
        "an object of strings",
    ),
    "passes": (_list(_STEP), "a list of passes, each with name and options"),
    "dropped": (_values(_is_texts), "an object of lists of names"),
    "dropped_files": (_values(_is_text), "an object of strings"),
    "lossy_steps": (_values(_is_count), "an object of counts"),
    "bytes": (
        _with({}, {"in": _is_count, "out": _is_count, "dropped": _is_count}),
        "an object of counts",
    ),
    "family": (_is_text, "a string"),
    "layers": (_is_count, "a count"),
    "experts": (_is_count, "a count"),
    "gdn_groups": (_is_count, "a count"),
    "reading": (
        _with({}, {"architecture": _is_text, "family_file": _is_text, "sha256": _is_text}),
        "an object of strings",
    ),
    "stated_as": (_is_text, "a string"),
    "stage": (_STAGE, "an object with number, of, partition, layers and environment"),
    RANK: (
        _with({"number": _is_count, "of": _is_count, "ep": _is_count}, {"folder": _is_text}),
        "an object with number, of and ep",
    ),
    "amx": (_AMX, "an object with method, numa, sizes, experts and layers"),
    DRAFT: (_with({"shared": _is_texts}), "an object with the names that it shares with its model"),
    "pair": (
        _with({}, {"side": _is_text, "id": _is_text, "repo": _is_text}),
        "an object of strings",
    ),
    MERGED: (
        _list(_with({"name": _is_text, "digest": _is_text, "scale": _is_number})),
        "a list of adapters, each with name, digest and scale",
    ),
    "calibration": (_is_object, "an object"),
    EVALUATION: (_EVALUATION, "an object with data, samples, errors of hidden states, and logits"),
    "trtllm_gen": (_is_object, "an object"),
    "repaired": (
        _list(_with({"file": _is_text}, {"before": _is_hash, "after": _is_hash})),
        "a list of repairs, each with its file",
    ),
    "tp_sizes": (_is_counts, "a list of counts"),
    "input_scale": (_is_number, "a number"),
    "kv_scale": (lambda v: v == "calibrated" or _is_number(v), "a number or calibrated"),
    "input_maxima": (_values(_is_text), "an object of strings"),
}
