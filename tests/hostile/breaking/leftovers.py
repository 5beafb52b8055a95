"""What lies in OUT from another run, or from somebody who says so: journals, locks, stages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from hostile.breaking.forms import FORMS
from hostile.breaking.texts import DIGITS, STEERING, Raw, deep, dumped, nested
from hostile.case import Break, Ground, Mutation, Verdict

GROUP = "leftovers"
_NEEDS = frozenset({"unfinished"})


def _work(ground: Ground) -> Path:
    return ground.out / ".qconvert"


def hashed(text: bytes) -> bytes:
    """A line as the journal's own are: its hash before it."""
    return xxhash.xxh3_64(text).hexdigest().encode() + b" " + text + b"\n"


def _records(ground: Ground) -> list[dict[str, Any]]:
    lines = (_work(ground) / "journal.jsonl").read_bytes().splitlines()
    return [json.loads(line.partition(b" ")[2]) for line in lines]


def _journal(change: Callable[[list[Any], Ground], object]) -> Callable[[Ground], None]:
    """Change records; each line is hashed again, so that it is believed."""

    def make(ground: Ground) -> None:
        records: list[Any] = list(_records(ground))
        change(records, ground)
        data = b"".join(hashed(dumped(record)) for record in records)
        (_work(ground) / "journal.jsonl").write_bytes(data)

    return make


def _publishes(*names: Any) -> Callable[[Ground], None]:
    """It says that these were being published. `stage` of the folder holds one of them, or nothing
    would be taken back."""

    def change(records: list[Any], ground: Ground) -> None:
        records[:] = [r for r in records if "publish" not in r]
        staged = sorted(p.name for p in (_work(ground) / "stage").iterdir())
        filled = [
            str(ground.root / n[6:]) if isinstance(n, str) and n.startswith("{root}") else n
            for n in names
        ]
        records.append({"publish": [*staged[:1], *filled, *staged[1:]]})

    return _journal(change)


def _link_work(target: str) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        shutil.rmtree(_work(ground))
        _work(ground).symlink_to(ground.root / target)

    return make


def _link_stage(ground: Ground) -> None:
    shutil.rmtree(_work(ground) / "stage")
    (_work(ground) / "stage").symlink_to(ground.root / "beside")


def _link_in_stage(ground: Ground) -> None:
    file = sorted((_work(ground) / "stage").glob("*.safetensors"))[0]
    file.unlink()
    file.symlink_to(ground.root / "beside" / "model.safetensors")


def _link_lock(ground: Ground) -> None:
    (_work(ground) / "lock").unlink(missing_ok=True)
    (_work(ground) / "lock").symlink_to(ground.root / "victim.txt")


def _hard_lock(ground: Ground) -> None:
    (_work(ground) / "lock").unlink(missing_ok=True)
    os.link(ground.root / "victim.txt", _work(ground) / "lock")


def _link_journal(ground: Ground) -> None:
    (_work(ground) / "journal.jsonl").unlink()
    (_work(ground) / "journal.jsonl").symlink_to(
        ground.root / "beside" / ".qconvert" / "journal.jsonl"
    )


def _staged(change: Callable[[Path, Ground], object]) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        change(
            ground.random.choice(sorted((_work(ground) / "stage").glob("*.safetensors"))), ground
        )

    return make


def _flip(file: Path, ground: Ground) -> None:
    data = bytearray(file.read_bytes())
    data[ground.random.randrange(len(data))] ^= 1 << ground.random.randrange(8)
    file.write_bytes(data)


def _in_work(name: str, make: Callable[[Path], object]) -> Break:
    return lambda ground: make(_work(ground) / name)


def _in_out(name: str, make: Callable[[Path], object]) -> Break:
    return lambda ground: make(ground.out / name)


def _alone(make: Callable[[Path], object]) -> Callable[[Path, Ground], object]:
    return lambda file, _ground: make(file)


def _filled(data: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(data)


def _halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _mutations() -> Iterator[Mutation]:
    def one(name: str, make: Callable[[Ground], object], **more: Any) -> Mutation:
        more.setdefault("verdict", Verdict.EITHER)
        return Mutation(name, GROUP, make, needs=_NEEDS, **more)

    for name, names in {
        "parent's": ("../victim.txt",), "grandparent's": ("../../secret.txt",),
        "absolute": ("{root}/victim.txt",), "beside": ("../beside/model.safetensors",),
        "source's": ("../src/config.json",), "nested": ("a/../../victim.txt",), "dot": (".",),
        "dot dot": ("..",),
        "work": (".qconvert/journal.jsonl",), "empty": ("",), "number": (5,), "null": (None,),
        "list": (["a"],),
        "object": ({"a": 1},), "long": ("n" * 5000,), "nul": ("a\x00b",),
        "escape": (STEERING["newline command"],),
        "deep folder": ("a/b/c/d",), "surrogate": ("\ud800",), "deep": (deep(3000),),
    }.items():  # fmt: skip
        yield one(f"journal publishes {name}", _publishes(*names), most=4)
    changes: dict[str, Callable[[list[Any], Ground], object]] = {
        "publish null": lambda r, _g: r.append({"publish": None}),
        "publish text": lambda r, _g: r.append({"publish": "../victim.txt"}),
        "publish number": lambda r, _g: r.append({"publish": 5}),
        "publish object": lambda r, _g: r.append({"publish": {"../victim.txt": 1}}),
        "publish empty": lambda r, _g: r.append({"publish": []}),
        "header list": lambda r, _g: r.__setitem__(0, []), "header null": lambda r,
        _g: r.__setitem__(0, None),
        "header number": lambda r, _g: r.__setitem__(0, 5), "header empty": lambda r,
        _g: r.__setitem__(0, {}),
        "header text": lambda r, _g: r.__setitem__(0, "x"),
        "header passes null": lambda r, _g: r[0].update(passes=None),
        "header passes number": lambda r, _g: r[0].update(passes=5),
        "header passes steer": lambda r,
        _g: r[0].update(passes=[STEERING["newline command"], STEERING["escape"]]),
        "header passes long": lambda r, _g: r[0].update(passes=["p" * 100_000]),
        "header deep": lambda r, _g: r[0].update(passes=deep(3000)),
        "header fingerprint list": lambda r, _g: r[0].update(fingerprint=[1]),
        "header run list": lambda r, _g: r[0].update(run=[1]), "header digits": lambda r,
        _g: r[0].update(
            max_shard_size=Raw(DIGITS)),
        "line null": lambda r, _g: r.insert(1, None), "line list": lambda r, _g: r.insert(1, []),
        "line number": lambda r, _g: r.insert(1, 5), "line text": lambda r, _g: r.insert(1, "unit"),
        "line empty": lambda r, _g: r.insert(1, {}), "line deep": lambda r,
        _g: r.insert(1, nested(100_000)),
        "line deep object": lambda r, _g: r.insert(1, deep(100_000)),
        "line 5,000 digits": lambda r, _g: r.insert(1, Raw('{"unit": ' + DIGITS + "}")),
        "unit null": lambda r, _g: r.insert(1, {"unit": None, "records": [], "remarks": []}),
        "unit list": lambda r, _g: r.insert(1, {"unit": [], "records": [], "remarks": []}),
        "unit negative": lambda r, _g: r.insert(1, {"unit": -1, "records": [], "remarks": []}),
        "unit huge": lambda r, _g: r.insert(1, {"unit": 10**9, "records": [], "remarks": []}),
        "unit without records": lambda r, _g: r.insert(1, {"unit": 0}),
        "records null": lambda r, _g: r.insert(1, {"unit": 0, "records": None, "remarks": []}),
        "records numbers": lambda r, _g: r.insert(1, {"unit": 0, "records": [1], "remarks": []}),
        "records no JSON": lambda r, _g: r.insert(1, {"unit": 0, "records": ["{"], "remarks": []}),
        "records traversal": lambda r, _g: r.insert(1, {"unit": 0, "records": [
            '{"file": "../victim.txt", "name": "x"}'], "remarks": []}),
        "records newline": lambda r,
        _g: r.insert(1, {"unit": 0, "records": ["{}\n::error::INJECTED"], "remarks": []}),
        "remarks null": lambda r, _g: r.insert(1, {"unit": 0, "records": [], "remarks": None}),
        "remarks numbers": lambda r,
        _g: r.insert(1, {"unit": 0, "records": [], "remarks": [5, None]}),
        "remarks steer": lambda r, _g: r.insert(1, {"unit": 0, "records": [], "remarks": [
            STEERING["newline command"], STEERING["escape"]]}),
        "another unit's records": lambda r,
        _g: [x.update(records=r[1].get("records")) for x in r[2:] if "unit" in x],
        "sent null": lambda r, _g: r.append({"sent": None}),
        "sent text": lambda r, _g: r.append({"sent": "model.safetensors"}),
        "sent numbers": lambda r, _g: r.append({"sent": [5]}),
        "sent parent's": lambda r, _g: r.append({"sent": [
            {"name": "../victim.txt", "size": 1, "sha256": "0" * 64}]}),
        "sent no size": lambda r, _g: r.append({"sent": [
            {"name": "model.safetensors", "size": -1, "sha256": "0" * 64}]}),
        "sent no hash": lambda r, _g: r.append({"sent": [
            {"name": "model.safetensors", "size": 1, "sha256": None}]}),
        "sent from a folder": lambda r, _g: r.append({"sent": [
            {"name": "model.safetensors", "size": 1, "sha256": "0" * 64}]}),
        "unsent parent's": lambda r, _g: r.append({"unsent": ["../victim.txt"]}),
        "unsent null": lambda r, _g: r.append({"unsent": None}),
        "no units": lambda r, _g: r.__delitem__(slice(1, None)),
        "units twice": lambda r, _g: r.extend(r[1:]),
        "100,000 lines": lambda r,
        _g: r.extend([{"unit": n, "records": [], "remarks": []} for n in range(100_000)]),
    }  # fmt: skip
    for name, change in changes.items():
        yield one(f"journal {name}", _journal(change), most=3)
    for name, data in {
        "empty": b"", "nul bytes": bytes(10_000), "invalid UTF-8": hashed(b"\xff\xfe"),
        "no JSON": hashed(b"{"),
        "not hashed": b"0123456789abcdef {}\n", "NaN": hashed(b"NaN"),
        "one line of 5 MB": b"x" * 5_000_000,
    }.items():  # fmt: skip
        yield one(
            f"journal form {name}",
            _in_work("journal.jsonl", _filled(data)),
            most=3,
        )
    for form, make in FORMS.items():
        yield one(f"journal {form}", _in_work("journal.jsonl", make), most=3)
        yield one(f"lock {form}", _in_work("lock", make), most=2)
        yield one(f"stage {form}", _in_work("stage", make), most=2)
        yield one(f"work {form}", _in_work("", make), most=2)
        yield one(f"staged shard {form}", _staged(_alone(make)), most=2)
    for target in ("beside", "src", "beside/.qconvert", "victim.txt", "nothing"):
        yield one(f"work link to {target}", _link_work(target), most=3)
    yield one("stage link", _link_stage, most=5)
    yield one("staged shard link", _link_in_stage, most=5)
    yield one("lock link", _link_lock, most=6)
    yield one("lock hard link", _hard_lock, most=3)
    yield one("journal link", _link_journal, most=5)
    staged: dict[str, Callable[[Path, Ground], object]] = {
        "truncated": lambda f, _g: os.truncate(f, f.stat().st_size // 2),
        "longer": lambda f, _g: os.truncate(f, f.stat().st_size + 100), "emptied": lambda f,
        _g: f.write_bytes(b""),
        "removed": lambda f, _g: f.unlink(),
        "another's": lambda f,
        g: shutil.copy(g.root / "src" / "model-00001-of-00002.safetensors", f),
    }  # fmt: skip
    for name, restaged in staged.items():
        yield one(f"staged shard {name}", _staged(restaged), most=5)
    yield one(
        "more files staged",
        lambda g: (_work(g) / "stage" / "evil.safetensors").write_bytes(b"x"),
        most=4,
    )
    yield one("foreign file beside", lambda g: (g.out / "mine.txt").write_text("mine"), most=4)
    yield one("foreign config beside", lambda g: (g.out / "config.json").write_text("{}"), most=4)


def _finished() -> Iterator[Mutation]:
    """A finished OUT, broken; the same command again must mend it or refuse."""
    needs = frozenset({"finished"})

    def one(name: str, make: Callable[[Ground], object], **more: Any) -> Mutation:
        more.setdefault("verdict", Verdict.EITHER)
        return Mutation(name, "finished", make, needs=needs, **more)

    for file in (
        "qconvert.json",
        "qconvert.receipt.jsonl",
        "config.json",
        "model.safetensors",
        "README.md",
    ):
        for form, make in FORMS.items():
            yield one(f"{file} {form}", _in_out(file, make))
        yield one(f"{file} gone", _in_out(file, Path.unlink))
        yield one(f"{file} cut", _in_out(file, _halve))
    yield one("config.json {}", lambda g: (g.out / "config.json").write_text("{}"))
    yield one(
        "manifest deep",
        lambda g: (g.out / "qconvert.json").write_bytes(b'{"identity":' + b"[" * 100_000),
    )
    yield one(
        "manifest digits",
        lambda g: (g.out / "qconvert.json").write_text('{"identity": ' + DIGITS + "}"),
    )
    yield one("foreign file", lambda g: (g.out / "mine.txt").write_text("mine"))


def _planted() -> Iterator[Mutation]:
    """Own folders of qconvert in what was downloaded, and a header that is only claimed."""

    def one(name: str, make: Callable[[Ground], object], **more: Any) -> Mutation:
        more.setdefault("verdict", Verdict.EITHER)
        return Mutation(name, "planted", make, **more)

    def stage(said: object, folder: str = ".qconvert-repair") -> Callable[[Ground], None]:
        def make(ground: Ground) -> None:
            place = ground.at / folder
            place.mkdir()
            (place / "config.json").write_bytes(b'{"model_type": "pwned"}')
            (place / "commit.json").write_bytes(said if isinstance(said, bytes) else dumped(said))

        return make

    weights = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, said in {
        "old form": {"written": ["config.json"], "removed": ["model.safetensors", *weights]},
        "weights": {"files": {name: [None, None] for name in ("model.safetensors", *weights)}},
        "victim": {"files": {"../victim.txt": [None, None], "../../secret.txt": ["0" * 32, None]}},
        "no hash": {"files": {"config.json": None}},
        "numbers": {"files": {"config.json": [1, 2]}},
        "torn": b"",
        "half": b'{"files": {"config.json": ["',
        "deep": deep(3000),
    }.items():
        yield one(f"stage {name}", stage(said), most=5)
    yield one("stage of other case", stage({"files": {}}, ".QConvert-Repair"), most=4)
    for form, make in FORMS.items():
        yield one(f"stage {form}", lambda g, make=make: make(g.at / ".qconvert-repair"), most=2)  # type: ignore[misc]

    def claims(ground: Ground) -> None:
        shard = ground.at / "model-00009-of-00009.safetensors"
        shard.write_bytes((99_999_999).to_bytes(8, "little"))
        with (ground.at / "model.safetensors.index.json").open("wb") as stream:
            stream.truncate(2 << 30)

    yield one("claimed header, large index", claims, verdict=Verdict.REFUSED, most=8)


MUTATIONS = (*_mutations(), *_finished(), *_planted())
