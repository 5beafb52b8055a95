"""`--until`: a run that ends itself before somebody else does, so that the same command goes on.

Time never enters a plan or its fingerprint: it decides between two units, or two layers of a
calibration, and what is done by then is what an interrupted run leaves."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from qconvert.core.errors import UsageError

_UNITS = re.compile(
    r"(?:(?P<d>[0-9]{1,4})d)?(?:(?P<h>[0-9]{1,6})h)?(?:(?P<m>[0-9]{1,7})m)?(?:(?P<s>[0-9]{1,9})s)?"
)
# As Slurm writes what is left of a job: 3:50:00, 1-03:50:00.
_CLOCK = re.compile(
    r"(?:(?P<d>[0-9]{1,4})-)?(?P<h>[0-9]{1,4}):(?P<m>[0-5]?[0-9]):(?P<s>[0-5]?[0-9])"
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_until(text: str) -> int:
    """Seconds: `3h50m`, `90m`, `3:50:00`, `1d2h`, `1-02:00:00`. Raises UsageError, also for a number
    without a unit: Slurm takes that for minutes, `timeout` for seconds."""
    found = _UNITS.fullmatch(text) or _CLOCK.fullmatch(text)
    parts = {} if found is None else found.groupdict()
    seconds = sum(int(value) * _SECONDS[unit] for unit, value in parts.items() if value)
    if seconds < 1:
        raise UsageError(f"--until {text[:40]!r}: write a time such as 3h50m, 90m or 3:50:00")
    return seconds


@dataclass(frozen=True)
class Until:
    """A run is to have ended `seconds` after `began`, by a clock that only goes forward."""

    seconds: float
    began: float
    now: Callable[[], float] = time.monotonic

    @staticmethod
    def of(given: Until | str | float | None) -> Until | None:
        """A time that begins now, unless it has begun. Raises UsageError for a text that is no time, and
        for a number of seconds that is not above 0."""
        if given is None or isinstance(given, Until):
            return given
        seconds = parse_until(given) if isinstance(given, str) else given
        if not seconds > 0:
            raise UsageError(f"until {seconds}: expected seconds above 0")
        return Until(seconds, time.monotonic())

    @property
    def left(self) -> float:
        return self.seconds - (self.now() - self.began)

    @property
    def over(self) -> bool:
        return self.left <= 0


class Pace:
    """Steps of a run that cannot be stopped within. The first one is always taken, so that whatever the
    time given, the same command comes to an end."""

    def __init__(self, until: Until | None) -> None:
        self._until = until
        self._begun = 0.0 if until is None else until.now()
        self.longest = 0.0

    def another(self) -> bool:
        """A step has been made: whether what is left holds one as long as the longest so far."""
        if self._until is None:
            return True
        now = self._until.now()
        self.longest = max(self.longest, now - self._begun)
        self._begun = now
        return self._until.left > self.longest
