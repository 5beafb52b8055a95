"""Recipes: qconvert's own and llm-compressor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile.breaking.forms import FORMS
from hostile.breaking.sidefiles import _bomb
from hostile.breaking.texts import DIGITS, LONG, STEERING
from hostile.case import Break, Ground, Mutation, Verdict

GROUP = "recipes"
_NEEDS = frozenset({"recipe"})


def _write(data: bytes) -> Callable[[Ground], object]:
    return lambda ground: ground.recipe.write_bytes(data)


def _form(make: Callable[[Path], None]) -> Break:
    return lambda ground: make(ground.recipe)


def _mutations() -> Iterator[Mutation]:
    def one(name: str, make: Callable[[Ground], object], **more: Any) -> Mutation:
        more.setdefault("culprit", ("recipe.yaml", "w4a16"))
        return Mutation(name, GROUP, make, needs=_NEEDS, **more)

    def option(text: str) -> str:
        return f"passes:\n  - w4a16: {{{text}}}\n"

    texts: dict[str, str] = {
        "flow nesting": "passes: " + "[" * 20_000 + "]" * 20_000,
        "flow mappings": "passes: " + "{a: " * 5_000 + "1" + "}" * 5_000,
        "block nesting": "\n".join(" " * n + "passes:" for n in range(2_000)),
        "dash nesting": "passes:\n  " + "- " * 5_000 + "dequant",
        "question nesting": "? " * 5_000 + "a", "unclosed": "passes: " + "[" * 50_000,
        "nested options": option("targets: " + "[" * 3_000 + "]" * 3_000),
        "bomb": _bomb().decode() + "\npasses: *a11",
        "bomb in options": _bomb().decode() + "\npasses:\n  - w4a16: {targets: *a11}",
        "self alias": "passes: &a [*a]", "self alias in options": option("targets: &a [*a]"),
        "unknown alias": "passes: *a", "anchor twice": "passes: [&a dequant, &a copy, *a]",
        "two documents": "passes: []\n---\npasses: []\n", "empty": "", "comment only": "# hello\n",
        "list": "- dequant\n", "number": "5\n", "text": "dequant\n", "null": "~\n",
        "passes null": "passes:\n", "passes number": "passes: 5\n",
        "passes text": "passes: dequant\n",
        "passes object": "passes: {dequant: }\n", "pass null": "passes: [null]\n",
        "pass number": "passes: [5]\n", "pass list": "passes: [[dequant]]\n",
        "pass of two keys": "passes: [{dequant: , drop: }]\n", "unknown pass": "passes: [rm -rf]\n",
        "unknown pass steers": 'passes: ["a\\e[2J\\n::error::INJECTED"]\n',
        "unknown key steers": '"a\\e[2J\\n::error::INJECTED": 1\npasses: []\n',
        "unknown option steers": 'passes:\n  - dequant: {"a\\n::error::INJECTED": 1}\n',
        "option direction": "passes:\n  - w4a16: {targets: [\"\u202egnp\"], bits: \"\u2066\"}\n",
        "pass long": f"passes: [{LONG}]\n", "passes twice": "passes: []\npasses: []\n",
        "1,000,000 passes": "passes: [" + "dequant," * 200_000 + "]\n",
        "size list": "passes: []\nmax_shard_size: [5GB]\n",
        "size negative": "passes: []\nmax_shard_size: -5\n",
        "size zero": "passes: []\nmax_shard_size: 0\n",
        "size word": "passes: []\nmax_shard_size: huge\n",
        "size 5,000 digits": f"passes: []\nmax_shard_size: {DIGITS}\n",
        "size NaN": "passes: []\nmax_shard_size: .nan\n",
        "bits list": option("bits: [4]"), "bits 5,000 digits": option(f"bits: {DIGITS}"),
        "bits hex": option("bits: 0x" + "f" * 5000),
        "bits sexagesimal": option("bits: 1" + ":59" * 2000),
        "bits infinite": option("bits: .inf"), "bits timestamp": option("bits: 2001-99-99"),
        "bits binary": option("bits: !!binary x==="), "bits object": option("bits: {a: b}"),
        "group negative": option("group_size: -32"), "group zero": option("group_size: 0"),
        "group 1e30": option("group_size: 1" + "0" * 30),
        "targets number": option("targets: 5"), "targets null": option("targets: [null]"),
        "targets no expression": option("targets: ['re:(((']"),
        "targets deep expression": option("targets: ['re:" + "(" * 3000 + ")" * 3000 + "']"),
        "targets huge repeat": option("targets: ['re:(a{1,4000}){1,4000}{1,4000}b']"),
        "targets long": option(f"targets: ['{LONG * 20}']"),
        "python tag": "passes: !!python/object/apply:os.system ['touch victim']\n",
        "unknown tag": "passes: !foo [dequant]\n", "tab": "passes:\n\t- dequant\n",
        "directive": "%YAML 9.9\n---\npasses: []\n",
        "tag directive": "%TAG ! tag:x,2000:\n---\npasses: !x []\n",
        "complex key": "? [a]\n: b\npasses: []\n", "key null": "~: 1\npasses: []\n",
        "merge": "<<: {passes: []}\n", "merge number": "passes:\n  - w4a16: {<<: 5}\n",
        "key list in options": "passes:\n  - w4a16: {[a]: 1}\n", "nul": "passes: [\"\\0\"]\n",
        "escape surrogate": 'passes: ["\\ud800"]\n', "calibrate list": option("calibrate: [1]"),
        "calibrate steers": option('calibrate: {"a\\n::error::INJECTED": 1}'),
        "calibrate data traversal": option("calibrate: {data: ../../../../etc/passwd}"),
        "calibrate data zero": option("calibrate: {data: /dev/zero}"),
    }  # fmt: skip
    # Tags that mean nothing change nothing.
    either = {"merge", "anchor twice", "tag directive", "unknown tag"}
    for name, text in texts.items():
        yield one(name, _write(text.encode("utf-8", errors="surrogatepass")), most=3,
                  verdict=Verdict.EITHER if name in either else Verdict.REFUSED)  # fmt: skip
    raws = {"invalid UTF-8": b"passes: [\xff\xfe]\n", "UTF-16": "passes: []\n".encode("utf-16"),
            "nul bytes": bytes(5000), "raw escape": b"passes: [a\x1b[2J]\n",
            "20 MB": b"#" * 20_000_000,
            "a pickle": b"\x80\x04K\x01.", "C1": b"passes: [a\xc2\x9b31m]\n"}  # fmt: skip
    for name, data in raws.items():
        either_here = Verdict.EITHER if name == "UTF-16" else Verdict.REFUSED
        yield one(name, _write(data), verdict=either_here, most=3)
    for pattern in ("(a+)+$", "(.*)*(.*)*(.*)*x", "(\\w|\\w\\w)+!", "([a-z.0-9_]+)*-"):
        # The model's own names are what it is matched with: long ones are needed for some.
        yield one(f"targets catastrophic {pattern}",
            _write(option(f"targets: ['re:{pattern}']").encode()),
                  most=3, culprit=())  # fmt: skip
    for form, make in FORMS.items():
        yield one(f"file {form}", _form(make), most=3)
    yield one("file link to secret", lambda g: _linked(g), most=3)
    foreign: dict[str, str] = {
        "no modifier": "quant_stage:\n  quant_modifiers: {}\n",
        "modifiers list": "quant_stage:\n  quant_modifiers: [GPTQModifier]\n",
        "modifiers null": "quant_stage:\n  quant_modifiers:\n",
        "stage null": "quant_stage:\n", "stage list": "quant_stage: [a]\n",
        "stage number": "quant_stage: 5\n",
        "unknown": "quant_stage:\n  quant_modifiers:\n    EvilModifier: {}\n",
        "unknown steers": 'quant_stage:\n  quant_modifiers:\n    "a\\e[2J\\n::error::INJECTED": {}\n',
        "twice": "a_stage:\n  b_modifiers:\n    GPTQModifier: {scheme: W4A16}\nc_stage:\n"
                 "  d_modifiers:\n"
                 "    GPTQModifier: {scheme: W4A16}\n",
        "options null": _foreign(""), "options list": _foreign("[1]"),
        "scheme unknown": _foreign("{targets: [Linear], scheme: W2A2, ignore: [lm_head]}"),
        "scheme list": _foreign("{targets: [Linear], scheme: [W4A16]}"),
        "scheme steers": _foreign('{targets: [Linear], scheme: "a\\n::error::INJECTED"}'),
        "scheme long": _foreign(f"{{targets: [Linear], scheme: {LONG}}}"),
        "targets null": _foreign("{targets: [null], scheme: W4A16}"),
        "targets no expression": _foreign("{targets: ['re:(('], scheme: W4A16, ignore: [lm_head]}"),
        "targets class": _foreign("{targets: [Conv2d], scheme: W4A16}"),
        "ignore number": _foreign("{targets: [Linear], scheme: W4A16, ignore: 5}"),
        "ignore deep": _foreign(
            "{targets: [Linear], scheme: W4A16, ignore: " + "[" * 3000 + "]" * 3000 + "}"),
        "groups list": _foreign("{config_groups: [a]}"),
        "groups null": _foreign("{config_groups: {g: }}"),
        "group size negative": _group("group_size: -5"), "group size 0": _group("group_size: 0"),
        "group size 5,000 digits": _group(f"group_size: {DIGITS}"), "bits 3": _group("num_bits: 3"),
        "bits text": _group("num_bits: many"), "strategy list": _group("strategy: [group]"),
        "dynamic deep": _group("dynamic: " + "[" * 3000 + "]" * 3000),
        "observer object": _group("observer: {a: b}"), "self alias": _foreign("&a {targets: [*a]}"),
        "alias in itself": _foreign("{targets: &a [*a], scheme: W4A16}"),
        "dampening NaN": "quant_stage:\n  quant_modifiers:\n    GPTQModifier: {targets: [Linear], "
                         "scheme: W4A16, "
                         "ignore: [lm_head], dampening_frac: .nan}\n",
        "gptq without data": "quant_stage:\n  quant_modifiers:\n    GPTQModifier: {targets: [Linear], "
                             "scheme: W4A16, ignore: [lm_head]}\n",
        "extra key": _foreign("{targets: [Linear], scheme: W4A16, ignore: [lm_head], evil: 1}"),
    }  # fmt: skip
    for name, text in foreign.items():
        yield one(f"llm-compressor {name}", _write(text.encode()), most=3)


def _foreign(options: str) -> str:
    return f"quant_stage:\n  quant_modifiers:\n    QuantizationModifier: {options}\n"


def _group(line: str) -> str:
    base = {"num_bits": "4", "type": "int", "strategy": "group", "group_size": "32"}
    key, _, value = line.partition(": ")
    weights = ", ".join(f"{k}: {v}" for k, v in {**base, key: value}.items())
    return _foreign(
        f"{{config_groups: {{g: {{targets: [Linear], weights: {{{weights}}}}}}}, ignore: [lm_head]}}"
    )


def _linked(ground: Ground) -> None:
    ground.recipe.unlink()
    ground.recipe.symlink_to(ground.root.parent / "secret.txt")


assert STEERING
MUTATIONS = tuple(_mutations())
