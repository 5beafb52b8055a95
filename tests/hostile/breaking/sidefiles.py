"""Files beside the weights: README.md, qconvert.json, receipts, tokenizers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from hostile.breaking.seals import (
    MANIFEST,
    RECEIPT,
    read_receipt,
    write_manifest,
    write_receipt,
)
from hostile.breaking.texts import DIGITS, LONG, STEERING, SURROGATE, Raw, deep, dumped, nested
from hostile.case import Break, Ground, Mutation, Verdict


def _bomb(levels: int = 12) -> bytes:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} [" + ",".join([f"*a{n - 1}"] * 9) + "]")
    return "\n".join(lines).encode()


def _front(text: bytes) -> bytes:
    return b"---\n" + text + b"\n---\n# A model\n"


def _readme() -> Iterator[Mutation]:
    fronts: dict[str, bytes] = {
        "bomb": _bomb(), "bomb as base_model": _bomb() + b"\nbase_model: *a11",
        "flow nesting": b"a: " + b"[" * 20_000 + b"]" * 20_000,
        "flow mappings": b"a: " + b"{a: " * 5_000 + b"1" + b"}" * 5_000,
        "block nesting": b"\n".join(b" " * n + b"a:" for n in range(2_000)),
        "dash nesting": b"a:\n  " + b"- " * 5_000 + b"x",
        "tags": b"!!python/object/apply:os.system ['touch victim']",
        "tag of a set": b"a: !!set {x, y}", "tag of a timestamp": b"a: 2001-99-99",
        "5,000 digits": b"license: " + DIGITS.encode(), "binary": b"a: !!binary x===",
        "invalid UTF-8": b"license: \xff\xfe", "list": b"- a\n- b", "number": b"5",
        "base_model list of lists": b"base_model: [[a, [b]]]",
        "base_model number": b"base_model: 7",
        "base_model object": b"base_model: {a: {b: c}}",
        "base_model long": b"base_model: " + LONG.encode(),
        "base_model traversal": b"base_model: ../../etc/passwd",
        "self alias": b"a: &a [*a]", "merge": b"<<: 5\na: 1", "tabs": b"a:\n\t- b",
        "doubled": b"license: a\nlicense: b", "unknown alias": b"a: *b", "anchors": b"a: &a",
        "complex key": b"? [a, b]\n: c", "key mapping": b"{a: b}: c", "nul": b"a: \x00",
        "license object": b"license: {a: b}", "tags of numbers": b"tags: [1, null, {}]",
        "escape": b'base_model: "a\\e[2J/b"',
        "newline command": b'base_model: "a/b\\n::error::INJECTED"',
        "direction": 'base_model: "a/\u202eb"'.encode(), "sexagesimal": b"a: 1" + b":59" * 2000,
        "float": b"a: 1e999999999", "hex": b"a: 0x" + b"f" * 5000, "octal": b"a: 0" + b"7" * 5000,
    }  # fmt: skip
    for name, text in fronts.items():
        yield Mutation(f"front {name}", "readme", _write("README.md", _front(text)), (),
                       Verdict.EITHER)  # fmt: skip
    forms = {
        "endless": b"---\n" + b"a: b\n" * 1000, "empty": b"", "nul bytes": bytes(10_000),
        "invalid UTF-8": b"\xff\xfe\x00", "only dashes": b"---\n---\n---\n" * 1000,
        "windows": b"---\r\nlicense: mit\r\n---\r\n", "old Mac": b"---\rlicense: mit\r---\r",
        "BOM": b"\xef\xbb\xbf---\nlicense: mit\n---\n",
        "UTF-16": "---\nlicense: mit\n---\n".encode("utf-16"),
        "one line of 10 MB": b"x" * 10_000_000, "escapes": STEERING["escape"].encode() * 100,
        "command": b"\n::error::INJECTED\n##[error]INJECTED\n",
    }  # fmt: skip
    for name, data in forms.items():
        yield Mutation(f"form {name}", "readme", _write("README.md", data), (), Verdict.EITHER)


def _write(name: str, data: bytes) -> Break:
    return lambda ground: (ground.at / name).write_bytes(data)


def _manifest_edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        value = json.loads((ground.at / MANIFEST).read_bytes())
        change(value)
        write_manifest(ground.at, value)

    return make


def _update(values: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.update(values)


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    """Without a key, or, where there is none, with one that nobody knows: an input of its own."""

    def change(manifest: dict[str, Any]) -> None:
        if key in manifest:
            del manifest[key]
        else:
            manifest[f"no {key}"] = True

    return change


_VALUES: dict[str, Any] = {
    "null": None, "list": [], "number": 5, "text": "x", "object": {}, "list of nulls": [None],
    "object of lists": {"a": [[]]}, "deep": deep(3000), "nested": nested(3000),
    "5,000 digits": Raw(DIGITS),
    "NaN": Raw("NaN"), "steers": STEERING["newline command"], "surrogate": SURROGATE, "true": True,
}  # fmt: skip


def _manifest() -> Iterator[Mutation]:
    needs = frozenset({"manifest"})

    def one(name: str, make: Break, **more: Any) -> Mutation:
        more.setdefault("verdict", Verdict.EITHER)
        return Mutation(name, "manifest", make, needs=needs, **more)

    keys = ("identity", "passes", "dropped", "dropped_files", "lossy_steps", "bytes", "family",
        "layers",
            "experts", "stage", "amx", "w4a16", "nvfp4", "prepared", "calibration",
            "losses")  # fmt: skip
    for key in keys:
        for name, value in _VALUES.items():
            yield one(f"{key} {name}", _manifest_edit(_update({key: value})), most=1)
        yield one(f"{key} gone", _manifest_edit(_without(key)), most=2)
    nested_keys: dict[str, dict[str, Any]] = {
        "stage of nulls": {"stage": dict.fromkeys(("folder", "number", "of", "partition",
            "layers"))},
        "stage layers text": {"stage": {"folder": "x", "number": 0, "of": 2, "partition": [1, 1],
                                        "layers": "ab"}},
        "stage of negative numbers": {"stage": {"folder": "../x", "number": -1, "of": -2,
                                                "partition": [-1, -1], "layers": [-5, 10**30]}},
        "stage partition huge": {"stage": {"folder": "x", "number": 0, "of": 10**9,
                                           "partition": [1] * 100_000, "layers": [0, 1]}},
        "passes of nulls": {"passes": [None]}, "passes without names": {"passes": [{"options": {}}]},
        "passes that steer": {"passes": [{"name": STEERING["escape"],
            "options": {"match": STEERING["newline command"]},
                                          "matched": 1, "expected": 1}]},
        "passes 100,000": {"passes": [{"name": "x", "options": {}, "matched": 1,
            "expected": 1}] * 100_000},
        "dropped with steering names": {"dropped": {STEERING["newline command"]: [STEERING["escape"]]}},
        "dropped of numbers": {"dropped": {"rule": [1, None, {}]}},
        "identity empty": {"identity": {}},
        "identity passes deep": {"identity": {"passes": deep(2000)}},
    }  # fmt: skip
    for name, update in nested_keys.items():
        yield one(name, _manifest_edit(_update(update)), most=3)
    forms = {"empty": b"", "list": b"[]", "null": b"null", "no JSON": b"{",
        "nested": b"[" * 100_000,
             "nested objects": b'{"a":' * 100_000, "invalid UTF-8": b'{"identity": "\xff"}',
             "another's": b'{"name": "not ours"}', "5,000 digits": DIGITS.encode()}  # fmt: skip
    for name, data in forms.items():
        yield one(f"form {name}", _write(MANIFEST, data), verdict=Verdict.REFUSED,
                  culprit=(MANIFEST,), passes=_BLIND)  # fmt: skip


# Commands that have no use for a manifest or receipt may not look at it.
_BLIND = frozenset({"inspect", "inspect tensors", "inspect json", "unfuse", "unprepare",
    "upload dry",
                    "upload", "diff"})  # fmt: skip


def _lines(change: Callable[[list[dict[str, Any]], Ground], object]) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        found = read_receipt(ground.at)
        sealed = found[-1:] if found[-1].keys() == {"receipt"} else []
        lines = found[: len(found) - len(sealed)]
        change(lines, ground)
        write_receipt(ground.at, [*lines, *sealed])

    return make


def _put(key: str, value: Any) -> Callable[[list[dict[str, Any]], Ground], object]:
    def change(lines: list[dict[str, Any]], ground: Ground) -> None:
        having = [line for line in lines if key in line] or lines
        ground.random.choice(having)[key] = value

    return change


def _receipts() -> Iterator[Mutation]:
    needs = frozenset({"receipt"})

    def one(name: str, make: Break, **more: Any) -> Mutation:
        more.setdefault("verdict", Verdict.EITHER)
        return Mutation(name, "receipt", make, needs=needs, **more)

    for key in ("name", "dtype", "shape", "file", "offset", "nbytes", "xxh3", "sources", "sha256"):
        for name, value in _VALUES.items():
            yield one(f"{key} {name}", _lines(_put(key, value)), most=1)
    more: dict[str, Any] = {
        "file traversal": _put("file", "../victim.txt"),
        "file absolute": _put("file", "/etc/passwd"),
        "file dev zero": _put("file", "/dev/zero"),
        "file parent's": _put("file", "../beside/model.safetensors"),
        "sources of nulls": _put("sources", [None, {}]), "sources huge": _put("sources", [{
            "name": "x", "start": 0, "stop": 10**30, "xxh3": "0"}] * 3),
        "a line is null": lambda lines, _g: lines.insert(0, Raw("null")),
        "a line is a list": lambda lines, _g: lines.insert(1, Raw("[]")),
        "a line is deep": lambda lines, _g: lines.insert(1, deep(100_000)),
        "a line is empty": lambda lines, _g: lines.insert(1, {}),
        "a line twice": lambda lines, g: lines.append(g.random.choice(lines)),
        "a line gone": lambda lines, g: lines.remove(g.random.choice(lines)),
        "100,000 lines": lambda lines,
        _g: lines.extend([dict(lines[0], name=f"g{n}") for n in range(100_000)]),
    }  # fmt: skip
    for name, change in more.items():
        yield one(name, _lines(change), most=3)
    forms = {"empty": b"", "no JSON": b"{\n", "nul bytes": bytes(10_000),
        "invalid UTF-8": b"\xff\xfe\n",
             "nested": b"[" * 100_000 + b"\n", "nested objects": b'{"a":' * 100_000 + b"\n",
             "one line of 10 MB": b'{"name": "' + b"x" * 10_000_000 + b'"}\n'}  # fmt: skip
    for name, data in forms.items():
        yield one(f"form {name}", _write(RECEIPT, data))


def _tokenizers() -> Iterator[Mutation]:
    """Carried along byte for byte: whatever is in them is somebody's."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "PREPARED.md"):
        for name, data in {"nul bytes": bytes(1000), "nested": b"[" * 100_000,
                           "template": b"{% for x in range(10**9) %}{{ x }}{% endfor %}",
                           }.items():  # fmt: skip
            yield Mutation(
                f"{file} {name}", "sidefiles", _write(file, data), (), Verdict.EITHER, most=3
            )


def _bundle(change: Callable[[dict[str, Any]], object]) -> Break:
    def make(ground: Ground) -> None:
        file = ground.at / "model.sig"
        value = json.loads(file.read_bytes())
        change(value)
        file.write_bytes(dumped(value))

    return make


def _signatures() -> Iterator[Mutation]:
    """A bundle that is none, and one that leads `verify` elsewhere: no key signed what is left."""

    def one(name: str, make: Break, *culprit: str) -> Mutation:
        words = culprit or ("model.sig",)
        return Mutation(name, "signatures", make, words, needs=frozenset({"signature"}), most=1)

    forms = {
        "empty": b"", "no JSON": b"{", "nul bytes": bytes(10_000), "invalid UTF-8": b"\xff\xfe",
        "nested": b"[" * 100_000, "objects": b'{"a":' * 100_000, "list": b"[]", "number": b"7",
        "one line of 10 MB": b'{"mediaType": "' + b"x" * 10_000_000 + b'"}',
    }  # fmt: skip
    for name, data in forms.items():
        yield one(f"form {name}", _write("model.sig", data))
    values: dict[str, Any] = {
        "null": None, "number": 1, "list": [], "text": "x", "deep": nested(3000), "digits": Raw(DIGITS),
        "surrogate": SURROGATE, **STEERING,
    }  # fmt: skip
    for name, value in values.items():
        for key in ("mediaType", "dsseEnvelope", "verificationMaterial"):
            yield one(f"{key} {name}", _bundle(lambda b, k=key, v=value: b.update({k: v})))  # type: ignore[misc]
        for key in ("payload", "payloadType", "signatures"):
            change = _bundle(lambda b, k=key, v=value: b["dsseEnvelope"].update({k: v}))  # type: ignore[misc]
            yield one(f"envelope {key} {name}", change)
    yield one("no payload", _bundle(lambda b: b["dsseEnvelope"].pop("payload")))
    yield one(
        "two signatures", _bundle(lambda b: b["dsseEnvelope"]["signatures"].append({"sig": "x"}))
    )
    yield one(
        "another key",
        _bundle(lambda b: b["verificationMaterial"]["publicKey"].update(hint="0" * 64)),
    )
    yield one("a pipe", _pipe)
    yield one(
        "a changed file",
        lambda ground: (ground.at / "config.json").write_bytes(b"{}"),
        "config.json",
    )
    yield one("a file more", _write("evil\x1b[2J.py", b"import os"), "evil")
    yield one(
        "a key of another kind", _write("key.pub", b"-----BEGIN PUBLIC KEY-----\n"), "key.pub"
    )


def _pipe(ground: Ground) -> None:
    (ground.at / "model.sig").unlink()
    os.mkfifo(ground.at / "model.sig")


MUTATIONS = (*_readme(), *_manifest(), *_receipts(), *_tokenizers(), *_signatures())
