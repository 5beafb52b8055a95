"""Values and texts that no reader expects."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

# Each with what it would do where it is printed as it is.
STEERING = {
    "escape": "a\x1b[2J\x1b]0;owned\x07b",
    "newline command": "a\n::error::INJECTED",
    "carriage return": "a\r\n##[error]INJECTED",
    "direction": "a\u202egnp.exe\u2066b",
    "line separator": "a\u2028::error::INJECTED\u2029b",
    "c1": "a\x9b31mb",
    "nul": "a\x00b",
    "zero width": "a\u200b\ufeffb",
}
SURROGATE = "a\ud800b"
LONG = "n" * 5000
# As JSON text, because no Python value writes them.
DIGITS = "9" * 5000


class Raw:
    """A value that is written into JSON as the text it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def nested(depth: int, opening: str = "[", closing: str = "]") -> Raw:
    return Raw(opening * depth + closing * depth)


def deep(depth: int) -> Raw:
    return Raw('{"a":' * depth + "1" + "}" * depth)


# For keys that should be small positive integers.
NOT_A_SIZE: dict[str, Any] = {
    "list": [1, 2],
    "object": {"a": 1},
    "text": "two",
    "negative": -1,
    "1e30": 10**30,
    "5000 digits": Raw(DIGITS),
    "fraction": 2.5,
    "NaN": Raw("NaN"),
    "infinite": Raw("1e999"),
    "null": None,
    "false": False,
    "deep": nested(3000),
}


def brief(text: str) -> str:
    """A text in a case's name: printable, without slashes, and another one for every other text."""
    shown = ascii(text)[1:-1].replace("/", "|")
    if len(shown) <= 40:
        return shown
    return f"{shown[:30]}~{blake2b(shown.encode(), digest_size=3).hexdigest()}"


def dumped(value: Any) -> bytes:
    """JSON with Raw texts in it, and lone surrogates escaped."""
    import json

    raws: list[str] = []

    def mark(found: Any) -> str:
        assert isinstance(found, Raw), found
        raws.append(found.text)
        return f"@@raw{len(raws) - 1}@@"

    text = json.dumps(value, default=mark)
    for number, one in enumerate(raws):
        text = text.replace(f'"@@raw{number}@@"', one)
    return text.encode()
