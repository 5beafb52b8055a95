"""The sections of a model card: how a folder was made, how to serve it, what was checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import inf, isnan
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from qconvert.checkpoint.checkpoint import MANIFEST
from qconvert.core.family import draft_algorithm
from qconvert.core.manifest_keys import EVALUATION, RANK
from qconvert.core.shown import count, format_size
from qconvert.hub.card.front import (
    Loads,
    amx_of,
    base_model_of,
    command,
    consumer_of,
    has_signed_scales,
    quantization_of,
    said_of,
    takers,
)
from qconvert.plan.pass_options import recipe_line
from qconvert.plan.plan import ROWS_OUT
from qconvert.runtimes.consumers import CLASSES
from qconvert.runtimes.ktransformers import DRAFT_LAYERS, RUNTIME, launch_line
from qconvert.runtimes.pipeline import VARIABLE
from qconvert.runtimes.serving import SIMULATED, class_of, launch, launch_ranks
from qconvert.runtimes.shared_experts import NO_FUSION

if TYPE_CHECKING:
    from qconvert.validation.runner import Report


_HUB = "https://huggingface.co"
_SPECIAL = re.compile(r"([\\`*_\[\]<>|])")
_MOST = 20
_SIGNED = (
    "- some scales are negative. transformers, compressed-tensors, kt-kernel, and vLLM's Marlin and "
    "Machete were seen to compute right with such; FlashInfer's INT4 experts for Blackwell and Humming "
    "were not tried. Where a kernel misreads them, convert again with `--set signs=positive`"
)
_DRAFT = (
    "This is the draft of a model, which is served beside the model itself. With MODEL as that one's "
    "folder and REPO as this one:"
)
_DRAFT_OPTIONS = {
    "sglang": "--speculative-algorithm {sglang} --speculative-draft-model-path REPO",
    "vllm": """--speculative-config '{{"method": "{vllm}", "model": "REPO", "num_speculative_tokens": """
    "{tokens}}}'",
}
# By a draft's algorithm, "" for layers of the model's own kind: what runtimes call it.
_ALGORITHMS = {"": ("NEXTN", "mtp"), "eagle3": ("EAGLE3", "eagle3"), "dflash": ("DFLASH", "dflash")}


def title(manifest: Mapping[str, Any] | None, config: Mapping[str, Any], base: str | None) -> str:
    """The first heading: the model and its format."""
    name = base.rpartition("/")[2] if base else str(config.get("model_type", "A model"))
    if manifest is None:
        return plain(name)
    if (stage := manifest.get("stage")) is not None:
        name += f", stage {stage['number']} of 0 to {stage['of'] - 1} alone, not a whole model"
    amx, block = amx_of(manifest), quantization_of(config)
    if amx is not None:
        nodes = f"{amx['numa']} NUMA node{'' if amx['numa'] == 1 else 's'}"
        return plain(f"{name}: routed experts for KTransformers, {amx['method']}, {nodes}")
    names = [step["name"] for step in manifest["passes"]]
    kind = str(block.get("quant_method", "quantized")) if block is not None else ""
    if block is None and "dequant" in names:
        kind = "BF16"
    layout = {"fuse": "fused", "unfuse": "split projections", "stack": "stacked experts",
              "unstack": "one matrix per expert"}  # fmt: skip
    said = [kind, *(layout[step] for step in names if step in layout)]
    about = ", ".join(part for part in said if part)
    return plain(f"{name}: {about}" if about else name)


def made(manifest: Mapping[str, Any], base: str | None) -> str:
    """The source, the steps, their losses, and what was dropped."""
    origin = f"[{base}]({_HUB}/{base})" if base else "a checkpoint without a known repo"
    version = plain(str(manifest["identity"]["qconvert"]))
    lines = ["## How it was made", "", f"From {origin}, by qconvert {version}.", ""]
    if manifest["passes"]:
        lines += ["| step | options | matched | expected |", "|---|---|---|---|"]
        for step in manifest["passes"]:
            wanted = "any" if step["expected"] is None else step["expected"]
            lines.append(
                f"| {_code(step['name'])} | {_code(_options(step))} | {step['matched']} | {wanted} |"
            )
        lines.append("")
    else:
        which = "All tensors" if manifest.get("stage") is None else "The stage's tensors"
        lines += [f"{which} are unchanged.", ""]
    chosen = [step["options"] for step in manifest["passes"] if step["name"] == "fitted"]
    lines += [f"- {plain(_fitted(options))}" for options in chosen]
    losses = manifest["lossy_steps"]
    lines.append("- lossy steps: none" if not losses else "- lossy steps:")
    lines += [f"  - {plain(what)} ({count(number, 'time')})" for what, number in losses.items()]
    for rule, names in manifest["dropped"].items():
        part = "rows of " if rule == ROWS_OUT else ""
        lines.append(f"- dropped: {part}{count(len(names), 'tensor')}, by the rule {_code(rule)}")
    for file, rule in manifest["dropped_files"].items():
        if file == "README.md":
            continue  # this card replaces it
        lines.append(f"- dropped: the file {_code(file)}, by the rule {_code(rule)}")
    calibration = manifest.get("calibration")
    if isinstance(calibration, Mapping):
        lines.append(f"- {plain(_calibrated(calibration))}")
    if has_signed_scales(manifest):
        lines.append(_SIGNED)
    if (constant := manifest.get("input_scale")) is not None:
        lines.append(
            f"- input scales of activations: the constant {constant:g}, found from no data"
        )
    size = manifest["bytes"]
    lines.append(
        f"- {size['in']:,} bytes of tensors in, {size['dropped']:,} of them dropped; "
        f"{size['out']:,} out"
    )
    return "\n".join(lines)


def _fitted(options: Mapping[str, Any]) -> str:
    """Return what chose the formats (`passes/mixture.py`)."""
    return (
        f"formats of layers were chosen by `qconvert fit` for {options.get('budget')}: "
        f"{options.get('bits')} bits a weight, KL {options.get('kl')} nats a token, "
        f"over {options.get('tokens')} tokens of {options.get('data')}"
    )


def _calibrated(settings: Mapping[str, Any]) -> str:
    """Samples that codes were found from. The step's options, in the table, are those that are not at
    their defaults; the manifest has all."""
    source = "random token ids" if settings.get("synthetic") else "text"
    samples = settings.get("samples")
    number = count(samples, "sample") if isinstance(samples, int) else "samples"
    return (
        f"calibrated by solver {settings.get('solver')} on at most {number} of {source}, each of up to "
        f"{settings.get('length')} tokens (xxh3-128 {settings.get('data')}); all settings are in "
        f"{MANIFEST}"
    )


def serve(manifest: Mapping[str, Any], config: Mapping[str, Any], said: Loads) -> str:
    """The commands of the runtimes that load it, and at which sizes `said` they do."""
    amx, pair = amx_of(manifest), manifest.get("pair")
    lines = ["## How to serve it", ""]
    said = _of_stage(manifest, said)
    if amx is not None:
        made = (
            "the repo this was made from"
            if pair is None
            else "the folder made together with this one"
            if pair.get("repo") is None
            else f"{_repo(pair['repo'])}, made together with this one"
        )
        layers = f"layers {amx['layers'][0]} to {amx['layers'][-1]}"
        sizes = f"hidden size {amx['hidden_size']}, intermediate size {amx['intermediate_size']}"
        held = f"{amx['experts']} per layer, {layers}, {sizes}"
        lines += [
            f"These are the routed experts only ({held}); all other layers are read from the GPU side:",
            f"{made}. With CPU as a folder that holds these files, and GPU as that one:",
            "",
            f"    {launch_line(amx['method'], amx['numa'], 'CPU', 'GPU')}",
            "",
            "`--kt-method` and `--kt-threadpool-count` must be as above: the kernel does not check "
            "them, and with files for another count or method it crashes or generates garbage. "
            + RUNTIME,
            "",
            f"If GPU has draft layers: {DRAFT_LAYERS}",
        ]
        return "\n".join(lines)
    if (rank := manifest.get(RANK)) is not None:
        which = f"rank {rank['number']} of {rank['of']}"
        lines += [
            f"These are the parameters of {which} alone, for vLLM's loader of sharded states. With",
            "FOLDERS as the folder that holds those of all ranks:",
            "",
            f"    {launch_ranks('FOLDERS', rank['of'], rank['ep'])}",
        ]
        return "\n".join(lines)
    if pair is not None:
        cpu = "a folder of experts for KTransformers"
        if pair.get("repo") is not None:
            cpu = f"{_repo(pair['repo'])}, experts for KTransformers"
        lines.append(
            f"This is the GPU side of {cpu}, made in the same read; the model card there has the "
            "command for both."
        )
        return "\n".join(lines)
    if manifest.get("trtllm_gen") is not None:
        lines.append(
            "Its experts are in the layout of TensorRT-LLM's kernels, which no stock server loads: "
            "PREPARED.md says how to serve it (experimental)."
        )
        return "\n".join(lines)
    if manifest.get("draft") is not None or draft_algorithm(config) in ("eagle3", "dflash"):
        return "\n".join([*lines, _DRAFT, *_draft_lines(config, said), *_sizes(said)])
    loaders, untried = takers(manifest, said), takers(manifest, said, "not known")
    if not loaders and not untried:
        groups = manifest.get("gdn_groups")
        order = f" Its linear-attention projections are fused in {groups} groups." if groups else ""
        lines.append(f"No released runtime is known to load it.{order}")
        return "\n".join([*lines, *_sizes(said), *_stage_lines(manifest)])
    kind = _code(str(config.get("model_type")))
    consumer = consumer_of(manifest)
    commands = {
        name: f"    {_variable(name, manifest)}{command(name, manifest, config, said)}"
        f"{_node(name, manifest)}"
        for name in (*loaders, *untried)
    }
    about = f"It was made for {consumer}" if consumer else ""
    if consumer in CLASSES:
        about = f"It has the model class {kind}"
    if consumer in loaders:
        also = " and ".join(name for name in loaders if name != consumer)
        lines += [f"{about}, with REPO as this repo's id or folder:", "", commands[consumer]]
        lines += ["", f"Loaded by {also} as well."] if also else []
    elif loaders:
        these = f"{about}; these runtimes" if about else "These runtimes"
        lines += [f"{these} load it, with REPO as this repo's id or folder:", ""]
        lines += [commands[name] for name in loaders]
    elif about:
        lines.append(f"{about}.")
    if untried:
        lines += ["", *_to_try(untried, config, said), *(commands[name] for name in untried)]
    if NO_FUSION in "".join(commands.values()):
        lines.append("")
        lines.append(
            f"`{NO_FUSION}` keeps sglang from fusing the shared expert into the routed experts: its "
            "weights are stored in another form, and would not be loaded."
        )
    if manifest.get("kv_scale") is not None:
        lines.append("")
        lines.append(
            "`--kv-cache-dtype fp8_e4m3` keeps keys and values in FP8, divided by the scales that are "
            "stored here, where a runtime's class reads these."
        )
    lines += _sizes(said)
    tp_sizes = manifest.get("tp_sizes")
    if tp_sizes is not None and not said:  # else the runtimes' own sizes are there
        held = f"at tensor parallel {', '.join(map(str, tp_sizes))}" if tp_sizes else "at no size"
        lines += ["", f"Ranks get whole groups, or blocks, of its quantized weights {held}."]
    return "\n".join([*lines, *_stage_lines(manifest)])


def _of_stage(manifest: Mapping[str, Any], said: Loads) -> Loads:
    """Answers of the runtimes that a stage was cut for, of a whole model those of all."""
    variables = (manifest.get("stage") or {}).get("environment")
    if variables is None:
        return said
    return {name: one for name, one in said.items() if VARIABLE.get(name) in variables}


def _variable(runtime: str, manifest: Mapping[str, Any]) -> str:
    """The variable of a pipeline stage's cut, as it stands before a runtime's command; "" of others."""
    name = VARIABLE.get(runtime, "")
    value = ((manifest.get("stage") or {}).get("environment") or {}).get(name)
    return f"{name}={value} " if value else ""


def _node(runtime: str, manifest: Mapping[str, Any]) -> str:
    """Options of a runtime on the machine of a pipeline stage, which has its stage's folder alone. Of
    vLLM (`entrypoints/cli/serve.py`) all machines but the first serve no requests."""
    stage = manifest.get("stage")
    if stage is None or runtime not in SIMULATED:
        return ""
    here = f" --nnodes {stage['of']} --node-rank {stage['number']}"
    if runtime == "sglang":
        return f"{here} --dist-init-addr FIRST:5000"
    return f"{here} --master-addr FIRST{' --headless' if stage['number'] else ''}"


def _stage_lines(manifest: Mapping[str, Any]) -> list[str]:
    """The place of a pipeline stage, and the variable that tells a runtime the cut; none of others."""
    stage = manifest.get("stage")
    if stage is None:
        return []
    settings = " or ".join(_code(f"{k}={v}") for k, v in stage["environment"].items())
    first, stop = stage["layers"]
    of = f"{stage['number']} of {stage['of']}, counted from 0"
    which = f"layers {first} to {stop - 1}" if stop - first > 1 else f"layer {first}"
    lines = [
        "",
        f"It is pipeline stage {of}, {which}, for a machine of its own: set {settings} on each.",
    ]
    lines[-1] += " FIRST is the name of the first machine."
    if stage.get("repos"):
        lines += ["", f"All stages: {', '.join(map(_repo, stage['repos']))}."]
    return lines


def _to_try(runtimes: Sequence[str], config: Mapping[str, Any], said: Loads) -> list[str]:
    """Return what stands before lines of runtimes that are not known to load the folder."""
    each = " and ".join(f"{name} {said_of(name, said).version}" for name in runtimes)
    verb = "loads" if len(runtimes) == 1 else "load"
    doubt = f"Not known for {_code(class_of(config))}: whether {each} {verb} it whole."
    return [f"{doubt} To try, with REPO as this repo's id or folder:", ""]


def _draft_lines(config: Mapping[str, Any], said: Loads) -> Iterator[str]:
    """Return how each runtime is started on a model with this draft, unless it is known not to load
    it."""
    algorithm = draft_algorithm(config)
    by_sglang, by_vllm = _ALGORITHMS[algorithm]
    block = config.get("block_size")
    tokens = block - 1 if type(block) is int and block > 1 else 3 if algorithm else 1
    for verdict in ("loads", "not known"):
        names = [name for name in _DRAFT_OPTIONS if said_of(name, said).verdict == verdict]
        if names and verdict == "not known":
            yield ""
            yield from _to_try(names, config, said)
        elif names:
            yield ""
        for name in names:
            yield f"    {launch(name, 'MODEL')} \\"
            options = _DRAFT_OPTIONS[name]
            yield f"        {options.format(sglang=by_sglang, vllm=by_vllm, tokens=tokens)}"


def _options(step: Mapping[str, Any]) -> str:
    """A step's options as a recipe has them."""
    name = str(step["name"])
    text = recipe_line(step)
    return "none" if text == name else text.removeprefix(f"{name}: ")


def _repo(name: str) -> str:
    """A link to a repo on the Hub."""
    return f"[{plain(name)}](https://huggingface.co/{quote(name)})"


def _sizes(said: Loads) -> list[str]:
    """Return what simulated loaders do with it at which sizes, a paragraph each."""
    lines: list[str] = []
    for one in said.values():
        who = f"{one.runtime} {one.version}"
        for option, held in one.sizes.items():
            sizes = ", ".join(f"{tp} ({format_size(nbytes)} a rank)" for tp, nbytes in held.items())
            with_option = f" with {_code(option)}" if option else ""
            text = f"{who} on H200s loads it whole{with_option} at tensor parallel {sizes}"
            lines += ["", f"{text}, as simulated from headers and config."]
        if one.failed:
            lines += ["", plain(f"{who} {one.fails}.")]
        if one.draft:
            lines += ["", plain(f"{who} {one.draft}.")]
        if one.unknown and one.runtime in SIMULATED:
            lines += ["", plain(f"{one.runtime} {one.version}: {one.unknown}.")]
    return lines


def _steps(manifest: Mapping[str, Any]) -> set[str]:
    """Names of the passes that made a folder."""
    return {str(step.get("name")) for step in manifest.get("passes", ())}


def _checked_by(manifest: Mapping[str, Any]) -> str:
    """The command that holds a folder to what it was made of."""
    steps = _steps(manifest)
    if "apply_delta" in steps:
        return "diff NEW DIR"  # the checkpoint that the delta was made of
    more = " --draft DRAFT" if "graft_draft" in steps else ""
    more += " --adapter ADAPTER" if "merge" in steps else ""
    return f"validate DIR --against SRC{more} --level full"


def proof(report: Report | None, manifest: Mapping[str, Any] | None, *, forced: bool) -> str:
    """Return what a validation proved, only read, and did not check; its findings, if any."""
    head = ["## What was checked", ""]
    if report is None:
        by = f"`qconvert {_checked_by(manifest or {})}`"
        noted = "`qconvert upload` validates, too, and writes here what was found"
        return "\n".join(
            [*head, f"Nothing is noted here before an upload: {by} checks it; {noted}."]
        )
    source = "with its source" if "against" in report.about else "without its source"
    if "against" in report.about and "merge" in _steps(manifest or {}):
        source = "with its source and the adapters that were merged into it"
    level = plain(report.about.get("level", "headers"))
    tally = f"{count(report.errors, 'error')}, {count(report.warnings, 'warning')}"
    lines = [*head, f"`qconvert validate` at level {level}, {source}: {tally}."]
    if forced:
        lines += ["", "**Uploaded although it failed validation.**"]
    places = {report.about.get("folder", ""): "DIR", report.about.get("against", ""): "SRC"}
    worst = sorted(report.findings, key=lambda f: f.severity != "error")[:_MOST]
    for label, texts in (
        ("Found", [f"{f.severity} {f.rule}: {f.where}: {f.message}" for f in worst]),
        ("Proved", report.proved),
        ("Only read in the folder's own metadata", report.read),
        ("Not checked", report.not_checked),
        ("Measured against the source", list(_measured(report))),
    ):
        if texts:
            lines += ["", f"{label}:", ""]
            lines += [f"- {plain(_without(text, places))}" for text in texts]
    more = len(report.findings) - _MOST
    if more > 0:
        lines += ["", f"... and {more:,} more findings."]
    return "\n".join(lines)


def _without(text: str, places: Mapping[str, str]) -> str:
    """The text without paths of the machine that validated the folder."""
    for path, name in places.items():
        if "/" in path:
            text = text.replace(path, name)
    return text


def _measured(report: Report) -> Iterator[str]:
    """One line per format: the number of matrices, and the lowest SQNR."""
    by_format: dict[str, list[float]] = {}
    for measure in report.measures:
        by_format.setdefault(measure.format, []).append(measure.sqnr)
    for name, found in sorted(by_format.items()):
        lowest = min(found, key=lambda sqnr: -inf if isnan(sqnr) else sqnr)
        said = "all equal" if lowest == inf else f"{lowest:.1f} dB SQNR or more"
        said = "some without anything to compare" if isnan(lowest) else said
        yield f"{name}: {count(len(found), 'matrix', 'matrices')}, {said}"


def plain(text: str) -> str:
    """Escaped text: names come from folders, and must not end a comment or a table cell."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("\\<", "&lt;")


def _code(text: str) -> str:
    """A code span, or escaped text if it holds a character that would end one."""
    line = " ".join(text.split())
    return plain(line) if set(line) & set("`|<>") else f"`{line}`"


# Result of an evaluation, on a model card: a section for people, and `model-index` for the Hub. Keys
# of `model-index`: the Hub's model cards (huggingface_hub, repocard_data.py,
# `eval_results_to_model_index`). Results of others stay; ours are known by `tool` among a data set's
# `args`, which is free.

_KEY = "model-index"
_TOOL = "qconvert eval"


def evaluation_of(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The manifest's entry, None where nothing was evaluated."""
    return manifest.get(EVALUATION)


def quality(found: Mapping[str, Any]) -> str:
    """The section: figures of the logits, and of the last layer's hidden states."""
    logits = found["logits"]
    error = logits["kl_error"]
    spread = "" if error is None else f" ± {error:.2g}"
    ratio = logits["perplexity"] / logits["source_perplexity"] - 1
    rows = [
        ("perplexity", f"{logits['perplexity']:.5g}"),
        ("perplexity of the source", f"{logits['source_perplexity']:.5g} ({ratio:+.2%})"),
        ("KL from the source, nats a token", f"{logits['kl']:.4g}{spread}"),
        ("same first choice as the source", f"{logits['agreement']:.2%}"),
    ]
    if found["hidden"]:
        rows.append(
            ("relative error of the last hidden states", f"{found['hidden'][-1]:.3g}"),
        )
    if (task := found.get("task")) is not None:
        right = task["accuracy"]
        what = f"{count(task['questions'], 'question')} answered right (source)"
        rows.append((what, f"{right['repo']:.2%} ({right['source']:.2%})"))
    samples = f"{count(found['samples'], 'sample')}, {count(found['tokens'], 'token')}"
    what = "and activations as its config has them" if found.get("activations") else "alone"
    return "\n".join(
        [
            "## What the conversion cost",
            "",
            f"By `{_TOOL}` on {plain(found['data'])} ({samples}), weights {what}:",
            "",
            "| figure | value |",
            "|---|---|",
            *(f"| {label} | {value} |" for label, value in rows),
        ]
    )


def with_results(
    front: Mapping[str, Any], manifest: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Front matter with our results in place of our earlier ones; as it is where nothing was
    evaluated."""
    found = evaluation_of(manifest)
    if found is None:
        return dict(front)
    said = front.get(_KEY)
    entries = [one for one in said if isinstance(one, Mapping)] if isinstance(said, list) else []
    kept = [_without_ours(one) for one in entries]
    name = title(manifest, config, base_model_of(front)).replace("\\", "")
    ours = {"name": name, "results": [_result(found)]}
    for entry in kept:
        if entry.get("name") == name and isinstance(entry.get("results"), list):
            entry["results"] = [*entry["results"], *ours["results"]]
            break
    else:
        kept.append(ours)
    return {**front, _KEY: [one for one in kept if one.get("results") != []]}


def _without_ours(entry: Mapping[str, Any]) -> dict[str, Any]:
    results = entry.get("results")
    if not isinstance(results, list):
        return dict(entry)
    return {**entry, "results": [one for one in results if not _is_ours(one)]}


def _is_ours(result: Any) -> bool:
    data = result.get("dataset") if isinstance(result, Mapping) else None
    args = data.get("args") if isinstance(data, Mapping) else None
    return isinstance(args, Mapping) and args.get("tool") == _TOOL


def _result(found: Mapping[str, Any]) -> dict[str, Any]:
    logits = found["logits"]
    metrics = [
        ("perplexity", "Perplexity", logits["perplexity"]),
        ("perplexity", "Perplexity of the source", logits["source_perplexity"]),
        ("kl_divergence", "KL(source || model), nats a token", logits["kl"]),
        ("top1_agreement", "Same first choice as the source", logits["agreement"]),
    ]
    return {
        "task": {"type": "text-generation"},
        "dataset": {
            "name": found["data"],
            "type": found["data"],
            "args": {
                "tool": _TOOL, "samples": found["samples"], "length": found["length"],
                "seed": found["seed"], "digest": found["digest"],
            },
        },
        "metrics": [
            {"type": kind, "name": label, "value": value} for kind, label, value in metrics
        ],
    }  # fmt: skip
