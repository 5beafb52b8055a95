"""Foreign regular expressions: `re:` targets and ignore lists of configs, recipes, options.

Python's `re` backtracks. `(.*)*x` over a module name of 60 letters does not end in a lifetime, and
`.*.*.*.*.*.*.*x` not in an hour. So a pattern is refused if its unbounded repeats are nested, or if it
has many of them (repeats of digits do not count); patterns that name modules have two or three in a
row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MOST_CHARACTERS = 20_000  # GPTQ's lists of unquantized modules are one pattern with a name for each
MOST_REPEATS = (
    4  # 4 over a name of 100 letters take 4 million steps, 0.1 s; 6 a thousand times that
)
_SOME = 64  # a repeat up to more than that counts as unbounded
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """The compiled pattern. Raises re.error for an invalid regular expression, and for one that could
    take unbounded time on a module name."""
    if len(pattern) > MOST_CHARACTERS:
        raise re.error(f"expected at most {MOST_CHARACTERS} characters, found {len(pattern)}")
    try:
        tree = _parser.parse(pattern)
        most = max(_depths(tree, 0), default=0)
        count = _most_in_a_row(tree)
    except (RecursionError, OverflowError) as error:
        raise re.error("nested too deep, or too many repeats") from error
    if most > 1:
        raise re.error("a repeat within a repeat can take unbounded time; write only one of them")
    if count > MOST_REPEATS:
        raise re.error(f"expected at most {MOST_REPEATS} unbounded repeats, found {count}")
    return re.compile(pattern)


def _parts(value: Any) -> Iterator[Any]:
    """The sequences of items within an item's argument."""
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _parts(part)


def _is_unbounded(kind: Any, value: Any) -> bool:
    return kind in _REPEATS and (value[1] is _constants.MAXREPEAT or value[1] > _SOME)


def _is_digits(body: Any) -> bool:
    """Return whether a repeat is of digits: names have few in a row."""
    if len(body) != 1 or body[0][0] is not _constants.IN:
        return False
    digits = (
        (_constants.CATEGORY, _constants.CATEGORY_DIGIT),
        (_constants.RANGE, (ord("0"), ord("9"))),
    )
    return all(part in digits for part in body[0][1])


def _depths(tree: Any, above: int) -> Iterator[int]:
    """Return how many unbounded repeats each is in, including itself."""
    for kind, value in tree:
        here = above + _is_unbounded(kind, value)
        yield here
        for part in _parts(value):
            yield from _depths(part, here)


def _most_in_a_row(tree: Any) -> int:
    """The most unbounded repeats, digits left out, that one match can go through: for alternatives,
    the most of any one."""
    total = 0
    for kind, value in tree:
        inner = [_most_in_a_row(part) for part in _parts(value)]
        if kind is _constants.BRANCH:
            total += max(inner, default=0)
        else:
            total += (_is_unbounded(kind, value) and not _is_digits(value[2])) + sum(inner)
    return total
