"""All hostile inputs of a seed, or some, with a table by class and by command, and what failed.

.venv/bin/python tests/hostile/run.py --seed 1 --jobs 2
.venv/bin/python tests/hostile/run.py --group recipes --keep /tmp/cases
.venv/bin/python tests/hostile/run.py --case 'leftovers/journal traversal'
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from multiprocessing import Queue, get_context
from pathlib import Path
from queue import Empty

_TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(_TESTS), str(_TESTS.parent)]

from hostile.bases import Bases  # noqa: E402
from hostile.case import Case  # noqa: E402
from hostile.catalogue import cases, sample  # noqa: E402
from hostile.oracle import Fault, described, faults  # noqa: E402
from hostile.play import Stage  # noqa: E402

Line = tuple[int, list[Fault], str, str, float]  # case, faults, input, described, seconds


def _work(
    root: Path, seed: int, numbers: Sequence[int], keep: Path | None, queue: Queue[Line | str]
) -> None:
    every = cases(seed)
    try:
        with Stage(Bases(root), keep) as stage:
            for number in numbers:
                outcome = stage.play(every[number])
                done = outcome.played
                queue.put((number, faults(outcome.case, done), outcome.input, described(done),
                           done.seconds))  # fmt: skip
    except BaseException as error:
        queue.put(f"{every[number].name}: {type(error).__name__}: {error}")
        raise


def _chosen(every: Sequence[Case], asked: argparse.Namespace) -> list[int]:
    found = [
        n for n, case in enumerate(every)
        if (asked.group is None or case.mutation.group in asked.group.split(","))
        and (asked.case is None or asked.case in case.name)
        and (asked.command is None or asked.command == case.scene.command)
    ]  # fmt: skip
    if asked.sample is None:
        return found
    names = {case.name for case in sample((every[n] for n in found), asked.sample, asked.seed)}
    return [n for n in found if every[n].name in names]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--group", help="classes, with commas between")
    parser.add_argument("--command", help="one command")
    parser.add_argument("--case", help="a part of the name of cases")
    parser.add_argument(
        "--sample", type=int, help="so many cases, spread over classes and commands"
    )
    parser.add_argument("--keep", type=Path, help="keep each case's folder below this one")
    parser.add_argument("--list", action="store_true", help="print names and stop")
    parser.add_argument("--verbose", action="store_true", help="print every failure whole")
    asked = parser.parse_args()
    every = cases(asked.seed)
    numbers = _chosen(every, asked)
    if asked.list:
        print("\n".join(every[n].name for n in numbers))
        return 0
    if asked.keep is not None:
        asked.keep.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-bases-") as root:
        lines = _played(Path(root), asked, numbers)
    print(_report(every, lines, asked.verbose))
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if any(line[1] for line in lines) or len(lines) != len(numbers) else 0


def _played(root: Path, asked: argparse.Namespace, numbers: Sequence[int]) -> list[Line]:
    context = get_context("spawn")
    queue: Queue[Line | str] = context.Queue()
    every = cases(asked.seed)
    # Only the first one waits for torch.
    heavy = [n for n in numbers if every[n].scene.heavy]
    light = [n for n in numbers if not every[n].scene.heavy]
    share = -(-len(numbers) // asked.jobs)
    first = max(0, share - len(heavy))
    shares = [light[:first] + heavy] if heavy else []
    rest = light[first:] if heavy else light
    others = asked.jobs - len(shares)
    shares += [rest[n::others] for n in range(others)] if others else []
    if not others:
        shares[0] += rest
    workers = [
        context.Process(target=_work, args=(root, asked.seed, share, asked.keep, queue))
        for share in shares
    ]
    for worker in workers:
        worker.start()
    lines: list[Line] = []
    ended = 0
    while len(lines) + ended < len(numbers) and any(w.is_alive() for w in workers):
        try:
            got = queue.get(timeout=60)
        except Empty:  # a case may take its 20 s, and a base is made before
            continue
        if isinstance(got, str):
            print(f"the harness failed: {got}", file=sys.stderr)
            break
        lines.append(got)
        print(f"\r{len(lines)}/{len(numbers)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for worker in workers:
        worker.join(timeout=30)
    return sorted(lines)


def _table(title: str, total: Counter[str], failed: Counter[str]) -> str:
    width = max(map(len, total), default=0)
    rows = [f"{name:<{width}}  {total[name]:>5}  {failed[name]:>5}" for name in sorted(total)]
    return "\n".join([f"{title:<{width}}  cases  wrong", *rows])


def _report(every: Sequence[Case], lines: Sequence[Line], verbose: bool) -> str:
    groups, commands, wrong_groups, wrong_commands = (Counter[str]() for _ in range(4))
    kinds: dict[str, list[tuple[Case, Fault, str]]] = defaultdict(list)
    for number, found, _, text, _ in lines:
        case = every[number]
        groups[case.mutation.group] += 1
        commands[case.scene.command] += 1
        if found:
            wrong_groups[case.mutation.group] += 1
            wrong_commands[case.scene.command] += 1
        for fault in found:
            kinds[fault.kind].append((case, fault, text))
    parts = [_table("class", groups, wrong_groups), _table("command", commands, wrong_commands)]
    for kind, met in sorted(kinds.items()):
        parts.append(f"{kind}: {len(met)}")
        parts += [
            f"  {case.name}\n    {fault.detail}" + (f"\n{text}" if verbose else "")
            for case, fault, text in met
        ]
    first: dict[str, str] = {}
    for line in lines:
        name = every[line[0]].name
        if line[2] in first:
            parts.append(f"the same input: {first[line[2]]} and {name}")
        first.setdefault(line[2], name)
    distinct = len(first)
    slow = sorted(((line[4], every[line[0]].name) for line in lines), reverse=True)[:5]
    parts.append("slowest: " + "; ".join(f"{name} {seconds:.1f} s" for seconds, name in slow))
    wrong = sum(1 for line in lines if line[1])
    parts.append(f"{len(lines)} cases, {distinct} distinct inputs, {wrong} wrong")
    return "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:])


if __name__ == "__main__":
    sys.exit(main())
