"""The table of docs/models.md: which conversion a published model needs for a runtime and a machine, by
the rules of `qconvert advise` on headers of full size."""

from __future__ import annotations

import tempfile
from pathlib import Path

import headers

from qconvert import api
from qconvert.advise.advice import hybrids
from qconvert.advise.options import Machine, candidates, considered
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.runtimes.consumers import Consumer

_FOLDERS = (Path(headers.__file__).parent, Path(__file__).parent / "families" / "published")
GB = 10**9
# Names on the Hub, by the file that holds their headers.
MODELS = {
    "qwen3.5-35b-a3b-fp8": "Qwen3.5-35B-A3B-FP8",
    "qwen3-next-80b-a3b-fp8": "Qwen3-Next-80B-A3B-FP8",
    "glm-4.5-air": "GLM-4.5-Air",
    "qwen3-235b-fp8": "Qwen3-235B-A22B-FP8",
    "glm-4.7-fp8": "GLM-4.7-FP8",
    "deepseek-v3": "DeepSeek-V3",
    "kimi-k2-thinking": "Kimi-K2-Thinking",
    "gpt-oss-120b": "gpt-oss-120b",
}
COLUMNS = {
    "SGLang, 2 x 80 GB": ("sglang", Machine(2, 80 * GB)),
    "SGLang, 8 x 80 GB": ("sglang", Machine(8, 80 * GB)),
    "vLLM, 8 x 80 GB": ("vllm", Machine(8, 80 * GB)),
    "KTransformers, 1 x 80 GB, 768 GB RAM": ("ktransformers", Machine(1, 80 * GB, 768 * GB)),
}


def row(model: str) -> str:
    """A line of the table."""
    file = next(f for at in _FOLDERS if (f := at / f"{model}.yaml").is_file())
    with tempfile.TemporaryDirectory() as folder:
        headers.write_sparse(headers.read(file), Path(folder))
        checkpoint = api.open_checkpoint(folder)
        cells = [_cell(checkpoint, *asked) for asked in COLUMNS.values()]
    return f"| {' | '.join((MODELS[model], *cells))} |"


def table() -> list[str]:
    """All lines."""
    return [*head(), *(row(model) for model in MODELS)]


def head() -> list[str]:
    titles = ("model", *COLUMNS)
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def _cell(checkpoint: Checkpoint, runtime: str, machine: Machine) -> str:
    """As `advise` chooses, without what it would print beside: the first that loads and fits, at the
    most ranks that it does."""
    if runtime == "ktransformers":
        found = hybrids(checkpoint, machine, numa=2)
        best = next((one for one in found if one.fits(machine)), None)
        if best is not None:
            return _said(best.command, f"`--kt-method {best.method}`")
        refused = all(one.refused for one in found)
        return "not for its experts" if refused else "does not fit"
    for candidate in candidates(checkpoint, machine, runtime):
        choice = considered(checkpoint, candidate, machine.sizes, machine, Consumer(runtime))
        if choice.unknown:
            return "not known"
        if sizes := choice.fits_at(machine):
            option = choice.answers[max(sizes)].required_flag
            return _said(candidate.command, f"TP {max(sizes)}") + (f" `{option}`" if option else "")
    return "does not fit"


def _said(command: str, where: str) -> str:
    words = command.replace(" SRC OUT", "")
    return f"`{words}`, {where}" if command else f"nothing, {where}"
