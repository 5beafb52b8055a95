"""Command lines: sizes, numbers, ranges, names of repos, patterns, paths."""

from __future__ import annotations

from collections.abc import Iterator

from hostile.breaking.texts import LONG, STEERING, brief
from hostile.case import Ground, Mutation, Verdict

GROUP = "arguments"
_NEEDS = frozenset({"bare"})
_E, _N, _D = STEERING["escape"], STEERING["newline command"], STEERING["direction"]


def _nothing(_ground: Ground) -> None:
    return


def _mutations() -> Iterator[Mutation]:
    def one(command: str, name: str, *words: str, verdict: Verdict = Verdict.REFUSED) -> Mutation:
        first = tuple(command.split())
        return Mutation(f"{command} {name}", GROUP, _nothing, (), verdict, _NEEDS,
                        frozenset({command}), arguments=(*first, *words), most=1)  # fmt: skip

    sources = {
        "empty": "", "missing": "{root}/gone", "escape": f"{{root}}/{_E}", "newline": _N,
        "direction": _D,
        "long": "x" * 5000, "long path": "a/" * 3000, "fifo-like": "/dev/stdin",
        "zero": "/dev/zero",
        "null": "/dev/null", "proc": "/proc/self/mem", "repo": "nobody/nothing",
        "hf nothing": "hf://",
        "hf datasets": "hf://datasets/a/b", "hf escape": f"hf://a/{_E}", "hf revision": "hf://a/b@",
        "hf traversal": "hf://../../etc", "repo traversal": "../..", "repo revision": "a/b@../../c",
        "repo newline": "a/b@\n::error::INJECTED", "URL": "https://example.com/x", "dash": "-",
        "dashes": "--gone",
        "home": "~/gone", "file": "{root}/victim.txt", "nul-like": "a\\x00b",
        "surrogate": "a\udc80b",
        "parent": "{root}/..", "spaces": "   ", "a shard": "{src}/config.json",
    }  # fmt: skip
    rest = {
        "inspect": (), "plan": (), "diff": ("{src}",), "validate": (),
        "eval": ("--against", "{good}", "--data", "{root}/x.jsonl"),
        "ask": ("--server", "http://127.0.0.1:9", "--data", "{root}/x.jsonl"),
        "sign": ("--key", "{root}/x.pem"), "verify": ("--key", "{root}/x.pem"),
        "upload": ("me/made", "--dry-run"),
        "dequant": ("{out}",), "amx": ("{out}", "--method", "int4", "--numa", "1"),
        "join": ("{out}",), "text": ("{out}",), "merge": ("{good}", "{out}"),
        "mtp graft": ("{good}", "{out}"),
        "split": ("{out}", "--pp", "2", "--for", "vllm"), "unprepare": ("{out}",),
    }  # fmt: skip
    for number, (name, source) in enumerate(sources.items()):
        for place, (command, more) in enumerate(rest.items()):
            if (number + place) % 3:  # a third of the product, every source and command in it
                continue
            before = ("copy",) if command == "plan" else ()
            yield one(command, f"source {name}", *before, source, *more)
    outs = {"empty": "", "escape": f"{{root}}/victim.txt/{_E}", "file": "{root}/victim.txt",
            "in a file": "{root}/victim.txt/x", "long": "{root}/" + LONG, "source": "{src}",
            "in source": "{src}/out",
            "around source": "{root}", "dev null": "/dev/null", "proc": "/proc/x",
            "nul": "{root}/a/\udc80/../../src",
            "dot dot": "{out}/../src"}  # fmt: skip
    writers = {
        "dequant": ("dequant", "{src}"), "fuse": ("fuse", "{src}"), "run": ("run", "copy", "{src}"),
        "nvfp4": ("nvfp4", "--dialect", "modelopt", "{src}"), "w4a16": ("w4a16", "--rtn", "{src}"),
        "experts stack": ("experts", "stack", "{src}"), "mtp graft": ("mtp", "graft", "{src}", "{good}"),
        "text": ("text", "{src}"),
    }  # fmt: skip
    for number, (name, out) in enumerate(outs.items()):
        for place, (command, words) in enumerate(writers.items()):
            if (number + place) % 2:
                continue
            yield Mutation(f"{command} out {name}", GROUP, _nothing, (), Verdict.REFUSED, _NEEDS,
                           frozenset({command}), arguments=(*words, out), most=1)  # fmt: skip
    sizes = ("0", "-1", "1", "nan", "inf", "1e9", "9" * 5000, "5XB", "", "1.5.5GB", "0x10", "५GB",
        _E, "1KB", "٣MiB",
             "9" * 20 + "TB")  # fmt: skip
    for number, size in enumerate(sizes):
        option = ("--memory", "--max-shard-size")[number % 2]
        verdict = Verdict.EITHER if size in ("9" * 20 + "TB", "1") else Verdict.REFUSED
        yield one(
            "dequant", f"{option} {brief(size)}", "{src}", "{out}", option, size, verdict=verdict
        )
        yield one(
            "validate", f"--memory {brief(size)}", "{src}", "--memory", size, verdict=Verdict.EITHER
        )
    for name in ("victim.txt", "gone", "src/config.json", "src"):
        file = f"{{root}}/{name}"
        yield one("prune", f"--keep {name}", "{src}", "{out}", "--keep", file)
    for jobs in ("0", "-1", "1.5", "9" * 400, "many", _N, ""):
        yield one("dequant", f"--jobs {brief(jobs)}", "{src}", "{out}", "--jobs", jobs)
        yield one("validate", f"--jobs {brief(jobs)}", "{src}", "--jobs", jobs)
    for layers in ("a", "5-1", "-1", "0-999999999999", "1,,2", "", "9" * 5000, "0-" + "9" * 400,
        _E, "1-2-3",
                   ",".join(["0-65535"] * 50), "٣"):  # fmt: skip
        yield one("validate", f"--layers {brief(layers)}", "{src}", "--against", "{good}",
                  "--layers", layers)  # fmt: skip
    for pp in (
        "0",
        "-1",
        "1,,1",
        "1,-1,2",
        "9" * 400,
        "a,b",
        "999999999",
        "",
        _N,
        "1" + ",1" * 10_000,
        "0,2",
        "1.5,1",
    ):
        yield one("split", f"--pp {brief(pp)}", "{src}", "{out}", "--pp", pp, "--for", "sglang")
    for repo in ("", "a", "a/b/c", "../x", "a/..", f"a/{_E}", "a/b\n::error::INJECTED",
        "a" * 500 + "/b", "-a/b", "a/b.git",
                 "a//b", "datasets/a/b/c", "a/b@c", "a/--b", "a/b?x=1", "á/b",
                 "\u202ea/b"):  # fmt: skip
        yield one("upload", f"repo {brief(repo)}", "{src}", repo, "--dry-run")
        yield one("dequant", f"--base-model {brief(repo)}", "{src}", "{out}", "--base-model", repo,
                  verdict=Verdict.REFUSED if repo not in ("a/b.git",
                      ) else Verdict.EITHER)  # fmt: skip
    for target in ("", "sglang==", "sglang==banana", "sglang==1.2.3.4.5.6.7.8" + ".9" * 3000,
        f"sglang=={_E}", "evil",
                   _N, "sglang=0.5", "sglang==" + "9" * 5000, "==", "vllm==-1"):  # fmt: skip
        verdict = (
            Verdict.EITHER if target.startswith(("sglang==1", "sglang==9")) else Verdict.REFUSED
        )
        yield one(
            "fuse", f"--for {brief(target)}", "{src}", "{out}", "--for", target, verdict=verdict
        )
    for groups in ("0", "-1", "9" * 400, "999999999", "x"):
        yield one("fuse", f"--groups {brief(groups)}", "{src}", "{out}", "--groups", groups)
    for numa in ("0", "-1", "9" * 400, "1000000000", "x", "3"):
        yield one(
            "amx", f"--numa {brief(numa)}", "{src}", "{out}", "--method", "int4", "--numa", numa
        )
    for tp in ("0", "-1", "9" * 400, "1000000007", "x"):
        yield one("w4a16", f"--tp {brief(tp)}", "{src}", "{out}", "--rtn", "--tp", tp)
    for target in ("re:(a+)+$", "re:(.*)*(.*)*x$", "re:(\\w|\\w\\w)+!", "re:([a-z.0-9_]+)*-",
        "re:((((", "re:" + "(" * 5000,
                   "re:(a{1,4000}){1,4000}b", "re:", "", _E, _N, LONG, "re:(?P<a>x)(?P<a>y)",
                   "re:\\", "*", "re:(?#",
                   "re:(?i)(m|mo|mod)*l$", "re:[[:alpha:]]", "Linear\x00"):  # fmt: skip
        if "\x00" in target:
            continue
        verdict = Verdict.EITHER if target == "*" else Verdict.REFUSED
        yield one(
            "w4a16",
            f"--target {brief(target)}",
            "{src}",
            "{out}",
            "--rtn",
            "--targets",
            target,
            verdict=verdict,
        )
        yield one("w4a16", f"--ignore {brief(target)}", "{src}", "{out}", "--rtn", "--group-size",
            "32", "--ignore",
                  target, verdict=Verdict.EITHER)  # fmt: skip
    for pattern in ("*" * 500 + "x", "*a" * 50 + "z", "[" * 500, "[!" * 100, _E, _N, "",
        "?" * 3000, "[z-a]*", "*.weight[",
                    LONG * 20):  # fmt: skip
        yield one(
            "inspect",
            f"--tensors {brief(pattern)}",
            "{src}",
            "--tensors",
            pattern,
            verdict=Verdict.EITHER,
        )
    for name in ("", "nothing", "../dequant-fp8", "/etc/passwd", "dequant-fp8.yaml", _E, _N, _D,
        LONG * 10, "..",
                 "dequant-fp8/../copy", "%s%s", "{src}", "Dequant-FP8", "*"):  # fmt: skip
        yield one("recipes show", f"name {brief(name)}", name)
        yield one("run", f"recipe {brief(name)}", name, "{src}", "{out}")
    for name in ("source\x1b[2J", "nothing", "", _N, LONG * 10):
        yield one("plan", f"--dump-after {brief(name)}", "copy", "{src}", "--dump-after", name)
    for rule in ("", "QC999", "qc001x", _E, _N, LONG * 10, "../RULES"):
        yield one("validate", f"--explain {brief(rule)}", "--explain", rule)
    for report in ("{root}/victim.txt/x.html", "{root}/none/x.html", "{root}/x.exe",
        "/proc/self/x.html", "{root}/" + LONG + ".html",
                   "", "/proc/x.json", "{src}"):  # fmt: skip
        yield one("validate", f"--report {brief(report)}", "{src}", "--report", report)
        yield one("eval", f"--report {brief(report)}", "{src}", "--against", "{good}", "--data",
                  "x.jsonl", "--report", report)  # fmt: skip
    for layers in ("0", "-1", "9" * 400, "x", _N):
        yield one("eval", f"--first-layers {brief(layers)}", "{src}", "--against", "{good}", "--data",
                  "x.jsonl", "--first-layers", layers)  # fmt: skip
    for folder in (
        "{src}",
        "{root}/victim.txt",
        "{root}/victim.txt/x",
        "",
        "/dev/null",
        "{root}/" + LONG,
        "/proc/demo",
    ):
        yield one("demo", f"folder {brief(folder)}", folder)
    for out in (
        "{root}/nothing",
        "",
        "{root}/victim.txt",
        "/dev/null",
        f"{{root}}/{_E}",
        "{root}/" + LONG,
        "{src}",
        "{root}/\udc80",
    ):
        yield one("clean", f"folder {brief(out)}", out,
                  verdict=Verdict.EITHER if out in ("{src}",) else Verdict.REFUSED)  # fmt: skip
    for command in ("dequant", "amx", "validate", "upload", "split", "kt", "nvfp4"):
        yield one(command, "no arguments")
        yield one(command, "unknown option", "{src}", "{out}", f"--{_E}")
    for word in ("", _E, _N, LONG * 10, "\u202erun", "--", "-\x1b[2J"):
        yield Mutation(f"qconvert {brief(word)}", GROUP, _nothing, (),
            Verdict.EITHER if word == "--" else Verdict.REFUSED,
                       _NEEDS, frozenset({"inspect"}), arguments=(word,), most=1)  # fmt: skip
    for method in ("int5", "", _E, "INT4\n::error::INJECTED"):
        yield one(
            "kt",
            f"--cpu {brief(method)}",
            "{src}",
            "--cpu-out",
            "{out}",
            "--cpu",
            method,
            "--numa",
            "1",
        )
    yield one("kt", "both outs the same", "{src}", "--cpu-out", "{out}", "--gpu-out", "{out}",
        "--cpu", "int8", "--numa",
              "1", "--gpu", "w4a16")  # fmt: skip
    yield one(
        "kt", "out in the source", "{src}", "--cpu-out", "{src}/out", "--cpu", "int8", "--numa", "1"
    )
    for stats in ("{root}/gone", "{src}", "{root}/victim.txt", "", "/dev/zero", f"{{root}}/{_E}"):
        yield one(
            "nvfp4",
            f"--stats {brief(stats)}",
            "{src}",
            "{out}",
            "--dialect",
            "modelopt",
            "--stats",
            stats,
        )


MUTATIONS = tuple(_mutations())
