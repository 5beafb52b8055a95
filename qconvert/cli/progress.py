"""Progress on stderr: a tqdm bar on a terminal, else a line a minute; and as lines of JSON.

Each line of `--log-json` is an object: `event` (start, phase, progress, end), `time` (UTC), `seconds`
since the run began, `phase` (text), `bytes` written and `bytes_total`, `part` done (0 to 1) and
`left_seconds` (null where unknown) by the work that is planned, and `work`, by kind (write, read,
forward, hessian, solve) `done` and `planned` in bytes or operations and the `seconds` it took: empty
where nothing is calibrated. The last one, `end`, has `ok`. More keys may come; these stay.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from qconvert.cli.command import is_quiet, is_verbose
from qconvert.core.links import writing
from qconvert.core.say import log_line, say, say_log, shown_line

if TYPE_CHECKING:
    from tqdm import tqdm

_LINE_SECONDS = 60.0  # between lines where stderr is no terminal
_LOG_SECONDS = 10.0  # between lines of the log within a phase
_DRAWN_SECONDS = 0.2
_STDERR = "-"
_BY_WORK = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}"


class _Unseen:
    """Part of tqdm's bar that is used where none is drawn: its import takes 30 ms of CPU."""

    n: float = 0
    initial: float = 0
    total: float | None = None
    bar_format: str | None = None

    def reset(self, total: float | None = None) -> None:
        self.n, self.total = 0, total

    def update(self, _more: float) -> None: ...

    def set_description(self, _text: str) -> None: ...

    def set_postfix_str(self, _text: str) -> None: ...

    def refresh(self) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class Bar:
    """Events of a run as a progress bar. `unit` is what is counted: bytes. `log` is a file that gets
    lines of JSON, or `-`; `now` is a clock that only goes forward. With -q nothing is shown, with -v
    a line a phase, too."""

    def __init__(
        self, unit: str = "B", *, log: str | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        from qconvert.run.work.estimate import Estimate

        self._unit, self._log, self._now = unit, log, now
        self._estimate = Estimate(now)
        self._by_work = False  # whether there is more to do than to write
        self._total = self._done = self._before = 0
        self._phase = ""
        self._lock = RLock()  # work is told of by several threads
        self._begun = self._wrote_at = self._line_at = self._log_at = self._drawn_at = now()
        self._stream: IO[str] | None = None

    def __enter__(self) -> Self:
        from qconvert.core.errors import OutputError

        if self._log is not None and self._log != _STDERR:
            try:
                self._stream = Path(self._log).open("a", encoding="ascii")
            except OSError as error:
                raise OutputError(
                    f"--log-json {self._log}: cannot be written: {error.strerror or error}"
                ) from error
        self._told = self._log != _STDERR and not is_quiet()
        self._shown = sys.stderr.isatty() and self._told
        self._phases = is_verbose() and self._told
        self._bar: tqdm[Any] | _Unseen = self._drawn() if self._shown else _Unseen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bar.close()
        try:
            self._tell("end", ok=error is None)
        finally:
            if self._stream is not None:
                with writing(Path(str(self._log))):
                    self._stream.close()

    def _drawn(self) -> tqdm[Any]:
        from tqdm import tqdm

        return tqdm(
            unit=self._unit, unit_scale=True, dynamic_ncols=True, leave=False, file=sys.stderr
        )

    def start(self, total: int, done: int) -> None:
        with self._lock:
            self._total, self._done, self._before = total, done, done
            self._wrote_at = self._now()
            self._bar.reset(total=total)
            # Work of an earlier run counts toward the total, not toward this run's speed.
            self._bar.initial = done
            self._bar.n = done
            self._bar.refresh()
            self._tell("start")

    def planned(self, work: Mapping[str, float], before: Mapping[str, float]) -> None:
        with self._lock:
            self._by_work = True
            self._estimate.plan(work, before)
            self._bar.bar_format = _BY_WORK
            self._bar.reset(total=1000)

    def did(self, kind: str, amount: float, seconds: float) -> None:
        with self._lock:
            self._estimate.did(kind, amount, seconds)
            self._show()

    def wrote(self, nbytes: int) -> None:
        from qconvert.run.work.estimate import WRITE

        with self._lock:
            self._done += nbytes
            at = self._now()
            seconds, self._wrote_at = at - self._wrote_at, at
            if not self._by_work:
                self._bar.update(nbytes)
                self._show()
            elif self._estimate.kinds[WRITE].left > 0:  # later what was solved is written beside
                self.did(WRITE, float(nbytes), seconds)

    def phase(self, text: str) -> None:
        with self._lock:
            self._phase = text
            self._bar.set_description(shown_line(text))
            if self._phases:
                self._bar.clear()
                say(f"phase   {text}, after {self._now() - self._begun:.1f} s", err=True)
            self._tell("phase")

    def _part(self) -> float:
        if self._by_work:
            return self._estimate.part()
        return self._done / self._total if self._total else 0.0

    def _left(self) -> float | None:
        """Seconds until the end, as far as what was done in this run tells."""
        if self._by_work:
            return self._estimate.left()
        made = self._done - self._before
        seconds = self._now() - self._begun
        return (self._total - self._done) * seconds / made if made > 0 else None

    def _show(self) -> None:
        """Whatever of bar, line and log is due."""
        at = self._now()
        if self._shown and self._by_work and at - self._drawn_at >= _DRAWN_SECONDS:
            self._drawn_at = at
            self._bar.n = round(1000 * self._part())
            self._bar.set_postfix_str(f"{spell(self._left())} left")
        if self._told and not self._shown and at - self._line_at >= _LINE_SECONDS:
            self._line_at = at
            what = f", {self._phase}" if self._phase else ""
            say(f"progress  {100 * self._part():.0f} %, {spell(self._left())} left{what}", err=True)
        if at - self._log_at >= _LOG_SECONDS:
            self._tell("progress")

    def _tell(self, event: str, **more: Any) -> None:
        """A line of the log, if there is one."""
        if self._log is None:
            return
        self._log_at = self._now()
        left = self._left()
        found = {
            "event": event,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self._log_at - self._begun, 3),
            "phase": self._phase,
            "bytes": self._done,
            "bytes_total": self._total,
            "part": round(self._part(), 6),
            "left_seconds": None if left is None else round(left, 1),
            "work": {
                kind: {"done": a.done, "planned": a.planned, "seconds": round(a.seconds, 3)}
                for kind, a in self._estimate.kinds.items()
            },
            **more,
        }
        if self._stream is None:
            say_log(found)
        else:
            with writing(Path(str(self._log))):
                self._stream.write(log_line(found))
                self._stream.flush()


def spell(seconds: float | None) -> str:
    """A time as it is read: 45 s, 12 min, 3 h 05 min."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
