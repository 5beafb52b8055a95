"""Every command, with what it is given and which folder of that is broken."""

from __future__ import annotations

from typing import Any

from hostile.case import BUDGET, HEAVY_BUDGET, Scene


def _scene(
    command: str,
    arguments: str,
    *,
    src: str = "fp8",
    good: str | None = None,
    out: str | None = None,
    broken: str = "src",
    has: str = "checkpoint",
    writes: str = "",
    runs: bool = False,
    heavy: bool = False,
    result: str = "",
) -> Scene:
    """`src` and `good` are bases; `has` says what there is to break in it."""
    bases = [("src", src)]
    bases += [("good", good)] if good else []
    bases += [("out", out)] if out else []
    bases += [("stats", "stats")] if "stats" in has else []
    words = tuple(arguments.split())
    what = frozenset(has.split())
    budget = (HEAVY_BUDGET if heavy else BUDGET) if runs else 0
    words += ("--jobs", "1", "--memory", f"{budget}") if runs else ()
    return Scene(
        command, words, tuple(bases), broken, what, tuple(writes.split()), heavy, budget,
        result,
    )  # fmt: skip


def _conversion(command: str, arguments: str, **more: Any) -> Scene:
    more.setdefault("writes", "out")
    return _scene(command, arguments, runs=True, **more)


READERS = (
    _scene("inspect", "inspect {src}"),
    _scene("inspect json", "inspect {src} --json", src="bf16"),
    _scene("inspect architecture", "inspect {src} --architecture Qwen3MoeForCausalLM", src="bf16"),
    _scene("inspect tensors", "inspect {src} --tensors *", src="w4a16",
           has="checkpoint manifest receipt"),
    _scene("report", "report {src}", src="made", has="checkpoint manifest receipt"),
    _scene("report json", "report {src} --json", src="w4a16"),
    _scene("plan", "plan dequant-fp8 {src} --jobs 1"),
    _scene("plan json", "plan copy {src} --json --jobs 1", src="bf16"),
    _scene("plan dump", "plan dequant-fp8 {src} --dump-after dequant --jobs 1"),
    _scene("diff", "diff {src} {good}", good="fp8"),
    _scene("diff against", "diff {good} {src} --json", src="bf16", good="bf16"),
    _scene("validate", "validate {src} --jobs 1", src="made", has="checkpoint manifest receipt"),
    _scene("validate full", "validate {src} --level full --jobs 1 --json", src="made",
           has="checkpoint manifest receipt data"),
    _scene("validate against",
        "validate {src} --against {good} --level full --jobs 1 --format github",
           src="made", good="fp8", has="checkpoint manifest receipt data"),
    _scene("validate source",
        "validate {good} --against {src} --level full --jobs 1 --format junit",
           good="made", has="checkpoint"),
    _scene("validate markdown", "validate {src} --jobs 1 --format markdown", src="w4a16",
           has="checkpoint manifest receipt"),
    _scene("validate sarif", "validate {src} --jobs 1 --format sarif", src="prepared",
           has="checkpoint manifest receipt"),
    _scene("validate html", "validate {src} --jobs 1 --format html", src="amx",
           has="checkpoint manifest receipt"),
    _scene("advise", "advise {src} --for ktransformers --cpu-memory 1GB --json"),
    # It mends configs and indexes, which are refused elsewhere.
    _scene("repair", "repair {src} --out {out}", src="w4a16", has="receipt",
           writes="out"),
    _scene("sign", "sign {src} --key {good}/key.pem", src="made", good="keys",
           has="checkpoint manifest receipt", writes="src/model.sig"),
    _scene("verify", "verify {src} --key {src}/key.pub", src="signed", has="signature"),
    _scene("upload dry", "upload {src} me/made --dry-run", src="made",
           has="checkpoint manifest receipt"),
    _scene("upload", "upload {src} me/made --level headers", src="made",
           has="checkpoint manifest receipt",
           writes="src/README.md src/qconvert.receipt.jsonl"),
)  # fmt: skip

CONVERSIONS = (
    _conversion("dequant", "dequant {src} {out}", has="checkpoint data fp8"),
    _scene("dequant dry", "dequant {src} {out} --dry-run --jobs 1", has="checkpoint fp8"),
    _conversion("run", "run copy {src} {out}", src="bf16"),
    _conversion("fuse", "fuse {src} {out} --for sglang", src="gdn"),
    _conversion("unfuse", "unfuse {src} {out}", src="fused", has="checkpoint manifest receipt"),
    _conversion("experts stack", "experts stack {src} {out}", src="bf16"),
    _conversion("experts unstack", "experts unstack {src} {out}", src="stacked"),
    _conversion("mtp drop", "mtp drop {src} {out}", src="gdn"),
    _conversion("mtp extract", "mtp extract {src} {out}", src="gdn"),
    _conversion("mtp graft", "mtp graft {src} {good} {out}", src="bare", good="gdn"),
    _conversion("mtp graft of", "mtp graft {good} {src} {out}", src="gdn", good="bare"),
    _conversion("merge", "merge {src} {good} {out}", src="bf16", good="adapter"),
    _scene("delta", "delta {good} {src} {out}", src="bf16", good="bf16", writes="out"),
    _conversion("apply", "apply {good} {src} {out}", src="delta", good="bf16"),
    _conversion("text", "text {src} {out}", src="gdn"),
    _conversion("amx", "amx {src} {out} --method int4 --numa 1", src="bf16",
                has="checkpoint data"),
    _conversion("kt", "kt {src} --cpu-out {out} --cpu int8 --numa 1", has="checkpoint data fp8"),
    _conversion("w4a16", "w4a16 {src} {out} --rtn --group-size 32", src="bf16",
                has="checkpoint data"),
    _conversion("nvfp4", "nvfp4 {src} {out} --dialect modelopt", src="bf16",
                has="checkpoint data"),
    _conversion("w4a16 search", "w4a16 {src} {out} --rtn --group-size 32 --scales search", src="bf16",
                has="checkpoint data"),
    _conversion("nvfp4 search", "nvfp4 {src} {out} --dialect modelopt --scales search", src="bf16",
                has="checkpoint data"),
    # Nothing is measured in a dry run, and all else is planned.
    _scene("fit dry", "fit {src} {out} --rtn --bits 5 --samples 2 --length 8 --device cpu --dry-run",
           src="bf16"),
    _conversion("fp8", "fp8 {src} {out} --ue8m0", src="bf16", has="checkpoint data"),
    _conversion("relabel", "relabel {src} {out} --to compressed-tensors",
                has="checkpoint data fp8"),
    _conversion("relabel draft", "relabel {src} {out} --to sglang", src="speculator",
                has="checkpoint draft"),
    _conversion("relabel eagle3", "relabel {src} {out} --to speculators --verifier me/model",
                src="draft", has="checkpoint draft"),
    _conversion("relabel dflash", "relabel {src} {out} --to speculators --verifier me/model",
                src="flash", has="checkpoint draft"),
    _scene("validate draft", "validate {good} --against {src} --jobs 1", src="speculator",
           good="speculator", has="checkpoint draft"),
    _conversion("mx", "mx {src} {out}", src="made", has="checkpoint data"),
    _conversion("quantize", "quantize {src} {out} --format mxfp8 --targets Linear", src="bf16",
                has="checkpoint data"),
    _conversion("int8", "int8 {src} {out} --kv-scale 0.5", src="bf16", has="checkpoint data"),
    _conversion("split", "split {src} {out} --pp 1,1 --for vllm --copy"),
    _scene("split balanced", "split {src} {out} --pp 2 --for sglang --balance --dry-run --jobs 1",
           src="bf16"),
    _conversion("join ranks", "join {src} {out}", src="ranks", has="checkpoint data"),
    _conversion("split ranks", "split {src} {out} --tp 2", src="served"),
    _conversion("split numa", "split {src} {out} --numa 2", src="amx",
                has="checkpoint manifest receipt"),
    _conversion("prepare", "prepare trtllm-gen {src} {out}", src="nvfp4"),
    _conversion("unprepare", "unprepare {src} {out}", src="prepared",
                has="checkpoint manifest receipt"),
    _conversion("join", "join {src} {out}", src="stages", broken="src/stage-01-of-02",
                has="checkpoint manifest receipt stages"),
)  # fmt: skip

# A recipe at {root}/recipe.yaml is broken, or the calibration data at {root}/data.*.
WITH_RECIPES = (
    _conversion("run recipe", "run {root}/recipe.yaml {src} {out}", has="recipe"),
    _scene("plan recipe", "plan {root}/recipe.yaml {src} --jobs 1", has="recipe"),
    _conversion("split recipe", "split {src} {out} --pp 1,1 --for vllm --recipe {root}/recipe.yaml",
                has="recipe"),
)  # fmt: skip

# OUT holds what an interrupted or finished run left, and that is broken.
LEFT_OVERS = (
    _conversion("dequant", "dequant {src} {out} --max-shard-size 100000", out="unfinished",
                broken="out", has="unfinished", result="sharded"),
    _conversion("dequant publishing", "dequant {src} {out} --max-shard-size 100000",
                out="publishing", broken="out", has="unfinished", result="sharded"),
    _conversion("dequant finished", "dequant {src} {out}", out="made", broken="out",
                has="finished", result="made"),
    _conversion("amx other plan", "amx {src} {out} --method int8 --numa 1", src="bf16",
        out="unfinished",
                broken="out", has="unfinished"),
    _conversion("dequant shared", "dequant {src} {out} --max-shard-size 100000", out="shared",
                broken="out", has="shared", result="sharded"),
    _conversion("dequant until", "dequant {src} {out} --max-shard-size 100000 --until 9h --log-json -",
                out="unfinished", broken="out", has="unfinished", result="sharded"),
    _conversion("dequant shard", "dequant {src} {out} --max-shard-size 100000 --shard 1/2",
                out="shared", broken="out", has="shared"),
    # The journal's command is for the folder where it was made.
    _scene("finish", "finish {out}", out="shared", broken="out", has="shared", writes="out"),
    _scene("status", "status {out} --json", out="shared", broken="out", has="shared"),
    _scene("status unfinished", "status {out}", out="unfinished", broken="out", has="unfinished"),
    _scene("clean", "clean {out}", out="unfinished", broken="out", has="unfinished",
           writes="out"),
    _scene("clean publishing", "clean {out}", out="publishing", broken="out",
           has="unfinished", writes="out"),
    _scene("inspect", "inspect {out}", out="publishing", broken="out", has="unfinished"),
    _scene("validate", "validate {out} --jobs 1", out="publishing", broken="out",
           has="unfinished"),
    _scene("upload dry", "upload {out} me/made --dry-run", out="publishing", broken="out",
           has="unfinished"),
)  # fmt: skip

# Calibration data at {root}/data.jsonl, statistics at {root}/stats.
_GPTQ = "--gptq --data {root}/data.jsonl --samples 2 --length 8 --device cpu"
_EVAL = f"--data {{root}}/data.jsonl --samples 2 --length 8 --device cpu --memory {HEAVY_BUDGET}"
CALIBRATING = (
    _conversion("w4a16 gptq", f"w4a16 {{src}} {{out}} --group-size 32 {_GPTQ}", src="calibratable",
                has="calibration", heavy=True),
    _conversion("nvfp4 gptq", f"nvfp4 {{src}} {{out}} --dialect modelopt {_GPTQ}",
                src="calibratable", has="calibration", heavy=True),
    _conversion("amx gptq", f"amx {{src}} {{out}} --method int8 --numa 1 {_GPTQ}",
        src="calibratable",
                has="calibration", heavy=True),
    _scene("eval", f"eval {{src}} --against {{good}} {_EVAL}", src="calibratable",
           good="calibratable", has="calibration", heavy=True),
    _scene("eval repo", f"eval {{src}} --against {{good}} --first-layers 1 --json {_EVAL}",
           src="calibratable", good="calibratable", has="checkpoint", heavy=True),
    _scene("eval two", f"eval {{good}} {{src}} --against {{good}} --json {_EVAL}", src="calibratable",
           good="calibratable", has="checkpoint", heavy=True),
    _scene("eval write", f"eval {{src}} --against {{good}} --write {_EVAL}", src="evaluable",
           good="calibratable", has="manifest receipt", heavy=True,
           writes="src/README.md src/qconvert.json src/qconvert.receipt.jsonl"),
    _conversion("nvfp4 stats", "nvfp4 {src} {out} --dialect modelopt --stats {root}/stats",
                src="bf16", has="stats"),
    _conversion("prune", "prune {src} {out} --experts 1 --stats {root}/stats", src="bf16",
                has="checkpoint stats"),
)  # fmt: skip

# The mutation gives all words: see breaking/arguments.py.
_COMMANDS = (
    "inspect", "advise", "repair", "plan", "run", "dequant", "fuse", "amx", "kt", "w4a16", "nvfp4",
    "fp8", "relabel", "mx", "int8", "quantize", "split", "join", "unprepare", "diff", "validate",
    "eval", "upload", "recipes show",
    "clean", "finish", "status", "demo", "experts stack", "experts stats", "prune", "mtp graft",
    "text", "merge", "delta", "apply", "ask", "sign", "verify",
)  # fmt: skip
BARE = tuple(
    _scene(command, "", src="bf16", good="bf16", has="bare", writes="out") for command in _COMMANDS
)

SCENES = READERS + CONVERSIONS + WITH_RECIPES + LEFT_OVERS + CALIBRATING + BARE
