"""The only reader of foreign JSON: depth, numbers and memory are bounded.

json.loads ends in RecursionError for a text nested deeper than Python's stack, accepts numbers of 4,000
digits whose product Python refuses to print, and turns `[[],[],...` into twenty times the text's bytes.
"""

from __future__ import annotations

import json
from typing import Any

from qconvert.core.errors import CheckpointError, QConvertError

MOST_DEEP = 100
MOST_DIGITS = 100
# Lists and objects take more memory than their text: 56 bytes for `[]`.
MOST_NESTS = 1 << 20
_LARGEST = 10**MOST_DIGITS


def parse_json(
    data: bytes | str, where: object, *, error: type[QConvertError] = CheckpointError
) -> Any:
    """The value of a JSON text. `where` is used in messages. Raises `error` for invalid JSON, for text
    that is not UTF-8 or cannot be written again, nesting beyond MOST_DEEP, integers of more than
    MOST_DIGITS digits, and more than MOST_NESTS lists and objects."""
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        if text.count("[") + text.count("{") > MOST_NESTS:
            raise error(f"{where}: expected at most {MOST_NESTS} lists and objects, found more")
        value = json.loads(text)
        # Half a surrogate pair can be escaped, but not written.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as failure:
        raise error(f"{where}: nested too deep; expected at most {MOST_DEEP} levels") from failure
    except UnicodeEncodeError as failure:
        raise error(
            f"{where}: contains text that cannot be written again: {failure.reason}"
        ) from failure
    except ValueError as failure:
        raise error(f"{where}: is not valid JSON: {_reason(failure)}") from failure
    _check(value, where, error)
    return value


def parse_object(
    data: bytes | str, where: object, *, error: type[QConvertError] = CheckpointError
) -> dict[str, Any]:
    """A JSON text that must be an object. Raises as `parse_json` does."""
    value = parse_json(data, where, error=error)
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _reason(failure: ValueError) -> str:
    """Python's own message on digits tells a programmer which function to call."""
    said = str(failure)
    return "an integer of thousands of digits" if said.startswith("Exceeds the limit") else said


def _check(value: Any, where: object, error: type[QConvertError]) -> None:
    level = [value]
    depth = 0
    while level:
        deeper: list[Any] = []
        for one in level:
            if type(one) is int:
                if not -_LARGEST < one < _LARGEST:
                    raise error(
                        f"{where}: expected integers of at most {MOST_DIGITS} digits, found a longer one"
                    )
            elif type(one) is dict:
                deeper += one.values()
            elif type(one) is list:
                deeper += one
        level, depth = deeper, depth + 1
        if depth > MOST_DEEP and any(type(one) in (dict, list) for one in level):
            raise error(f"{where}: nested too deep; expected at most {MOST_DEEP} levels")
