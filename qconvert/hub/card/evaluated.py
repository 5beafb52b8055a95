"""Result of an evaluation, on a model card: a section for people, and `model-index` for the Hub.

Keys of `model-index`: the Hub's model cards (huggingface_hub, repocard_data.py,
`eval_results_to_model_index`). Results of others stay; ours are known by `tool` among a data set's
`args`, which is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.core.manifest_keys import EVALUATION
from qconvert.core.shown import count
from qconvert.hub.card.front import base_model_of
from qconvert.hub.card.sections import plain, title

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
    samples = f"{count(found['samples'], 'sample')}, {count(found['tokens'], 'token')}"
    return "\n".join(
        [
            "## What the conversion cost",
            "",
            f"By `{_TOOL}` on {plain(found['data'])} ({samples}), weights alone:",
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
