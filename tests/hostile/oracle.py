"""What is wrong with what a command did with a hostile input. Each fault is a kind and a detail."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import NamedTuple

from hostile.case import EXTRA_BYTES, MIB, Case, Played, Verdict
from hostile.play import SECRET

MOST_CHARACTERS = 1500
_ERROR = re.compile(r"^(qconvert: error: |Error: )", re.MULTILINE)
_USAGE = re.compile(r"^(Usage: |Try ')")
# What GitHub's runner takes for a command to itself, wherever a line begins with it.
_COMMAND = re.compile(r"^\s*(::|##\[)", re.MULTILINE)
_OWN = re.compile(r"::(error|warning|notice|group|endgroup)\b(?!::INJECTED)")
_FINDINGS = 3
# There is no Hub here: what an upload ends with that would have gone on.
_OFFLINE = "HF_HUB_OFFLINE is set"


class Fault(NamedTuple):
    """`kind` groups faults in tables."""

    kind: str
    detail: str


def faults(case: Case, done: Played) -> list[Fault]:
    """All that is wrong; empty where the command did as it must."""
    found: list[Fault] = []
    out, err = (_text(data) for data in (done.out, done.err))
    if done.stopped == "deadline":
        found.append(Fault("hang", f"stopped after {done.seconds:.0f} s"))
    if done.stopped == "memory" or done.excess > EXTRA_BYTES:
        found.append(Fault("memory", f"{done.excess // MIB} MiB more than with a sound input"))
    if done.signal is not None and done.stopped is None:
        found.append(Fault("signal", f"ended by signal {done.signal}"))
    for note in done.notes:
        found.append(Fault("processes", note))
    if "Traceback (most recent call last)" in err or "Traceback (most recent call last)" in out:
        found.append(Fault("traceback", err.strip().rpartition("\n")[2][:200]))
    if "HOSTILE: " in err:
        found.append(Fault("network", err.partition("HOSTILE: ")[2].splitlines()[0]))
    found += _unsafe(case, done, out, err)
    if done.stopped is None and done.code is not None:
        found += _answer(case, done, out, err)
    found += _touched(case, done)
    for leak in done.leaks:
        found.append(Fault("leak", f"{leak} holds the content of a file outside the folder"))
    if done.code == 0 and done.wrong and not case.mutation.silent:
        found.append(Fault("wrong result", f"exit 0, and OUT differs: {', '.join(done.wrong[:4])}"))
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="surrogateescape")


def _unsafe(case: Case, done: Played, out: str, err: str) -> list[Fault]:
    """Characters and lines of a stranger's in what goes to a terminal or a CI log."""
    found = []
    for where, text in (("stdout", out), ("stderr", err)):
        bad = next((c for c in text if _steers(c)), None)
        if bad is not None:
            at = text.index(bad)
            found.append(
                Fault("control characters", f"{where}: {text[max(0, at - 40) : at + 40]!a}")
            )
        lines = [line for line in text.splitlines() if _COMMAND.match(line)]
        if "github" in done.arguments and where == "stdout":  # its own, on purpose
            lines = [line for line in lines if not _OWN.match(line)]
        if lines:
            found.append(Fault("workflow command", f"{where}: {lines[0][:100]!a}"))
        if SECRET in text:
            found.append(Fault("leak", f"{where} holds the content of a file outside the folder"))
    return found


def _steers(c: str) -> bool:
    """Control and format characters (escape, direction marks, zero widths), line separators, halves of
    surrogates."""
    if c in "\n\t" or " " <= c <= "~":
        return False
    return unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _answer(case: Case, done: Played, out: str, err: str) -> list[Fault]:
    code = done.code
    if code not in (0, 1, 2, 3):
        return [Fault("exit code", f"{code}")]
    errors = _ERROR.findall(err)
    if case.scene.command == "upload" and _OFFLINE in err:
        code, errors = 0, []  # all that it looks at before was good enough
    if code == 0:
        if case.verdict is Verdict.REFUSED:
            return [Fault("accepted", "exit 0 on what must be refused")]
        return [Fault("error and exit 0", err[-200:])] if errors else []
    if case.verdict is Verdict.ACCEPTED:
        return [Fault("refused", f"a sound input: {err[-300:]}")]
    if code == _FINDINGS:
        return _named(case, out + err, "findings") if not errors else []
    if not errors:
        return [Fault("no error line", f"exit {code}: {err[-200:]!a}")]
    found = []
    if len(errors) > 1:
        found.append(Fault("several error lines", f"{len(errors)} of them"))
    lines = [line for line in err.splitlines() if line.strip()]
    first = next(n for n, line in enumerate(lines) if _ERROR.match(line))
    if first != len(lines) - 1:
        found.append(Fault("message of several lines", ascii("\n".join(lines[first:])[:200])))
    message = lines[first]
    size = len("\n".join(lines[first:])) - len("qconvert: error: ")
    if size > MOST_CHARACTERS:
        found.append(Fault("message too long", f"{size} characters"))
    return found + _named(case, message, "message")


def _named(case: Case, text: str, what: str) -> list[Fault]:
    wanted = case.mutation.culprit
    if not wanted or any(name in text for name in wanted):
        return []
    shown = ascii(text[:200])
    return [Fault("culprit not named", f"the {what} holds none of {list(wanted)}: {shown}")]


def _touched(case: Case, done: Played) -> list[Fault]:
    """Whatever changed: outside of what the command may write, and inside when it refused."""
    found: list[Fault] = []
    allowed = tuple(f"case/{name}" for name in case.scene.writes)
    for change in done.changes:
        name = change[2:]
        if name.startswith("home") or (name.startswith("tmp/") and done.stopped):
            continue
        if not any(name == a or name.startswith(f"{a}/") for a in allowed):
            # A folder's link count is no content: only its entries are looked at.
            found.append(Fault("outside touched", change))
    if done.code in (1, 2) and case.scene.command.split()[0] != "clean":
        shown = [c for c in done.changes if _published(c)]
        if shown:
            found.append(Fault("published", f"exit {done.code} and {', '.join(shown[:3])}"))
    return found[:3]


def _published(change: str) -> bool:
    name = change[2:]
    inside = "/.qconvert/" not in f"{name}/"
    return (
        change[0] in "+~" and name.startswith("case/out/") and inside
        and (name.endswith((".safetensors", "config.json")))
    )  # fmt: skip


def described(done: Played) -> str:
    """What to look at first."""
    return json.dumps(
        {
            "arguments": done.arguments,
            "code": done.code,
            "seconds": round(done.seconds, 2),
            "excess MiB": done.excess // MIB,
            "stdout": _text(done.out[:300]),
            "stderr": _text(done.err[-600:]),
            "changes": done.changes[:8],
        },
        indent=1,
        ensure_ascii=True,
    )
