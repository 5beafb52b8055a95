"""The tables of docs/models.md: of named models at their published sizes, as published and as commands
make them, at which tensor-parallel sizes each runtime loads them, by the simulators of their loaders.

With an interpreter that has the runtimes, their own loaders are asked beside, and what they say
otherwise is printed:

    PYTHONPATH=tests python tests/named_table.py --loader PYTHON [--runtime vllm] [MODEL ...]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import headers

from qconvert import api
from qconvert.advise.options import Candidate, Choice, Machine, considered
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loader.ask import RuntimeLoader, loaders_in
from qconvert.runtimes.serving import Answer

_TESTS = Path(__file__).parent
_FOLDERS = (_TESTS / "families" / "published", _TESTS / "headers", _TESTS / "headers" / "forms")
# Names on the Hub, by the file that holds their headers.
MODELS = {
    "gpt-oss-120b": "gpt-oss-120b", "deepseek-v3.2": "DeepSeek-V3.2",
    "deepseek-v4-flash": "DeepSeek-V4-Flash", "kimi-k2.5": "Kimi-K2.5", "glm-5": "GLM-5",
    "llama-3.3-70b": "Llama-3.3-70B", "llama-4-maverick": "Llama-4-Maverick",
    "mixtral-8x22b": "Mixtral-8x22B", "minimax-m2.5": "MiniMax-M2.5",
    "gemma-4-26b-a4b": "gemma-4-26B-A4B", "qwen3-vl-30b-a3b": "Qwen3-VL-30B-A3B",
    "nemotron-3-nano-30b": "Nemotron-3-Nano-30B-A3B",
}  # fmt: skip
SIZES = (1, 2, 4, 8)
RUNTIMES = {"sglang": "SGLang 0.5.23", "vllm": "vLLM 0.33"}
COLUMNS = ("as published", "`w4a16`", "`fp8`", "`nvfp4`")
# Of each layer: what a loader does with one it does with all, and planning hundreds takes minutes.
EXPERTS = 8
_MOST = 220


def candidates(checkpoint: Checkpoint) -> tuple[Candidate, ...]:
    """Conversions of the columns: of routed experts, or of the linears of a model without any."""
    sparse = checkpoint.role_index.dims.num_experts > 0
    targets = ("experts",) if sparse else ("Linear",)
    return (
        Candidate(""),
        Candidate("w4a16", (ExpertsToW4A16(group_size=32, targets=targets),)),
        Candidate("fp8", (ToFp8(),)),
        Candidate("nvfp4", (ToNvfp4("compressed-tensors", targets=targets),)),
    )


@dataclass(frozen=True)
class Cell:
    """Answer about a form of a model: the sizes at which it loads, and what to know of it."""

    text: str
    note: str = ""


def cell_of(choice: Choice) -> Cell:
    """An answer in a few words."""
    if choice.refused:
        return Cell("not made", choice.refused)
    if choice.unknown:
        return Cell("not known", choice.unknown)
    flags = {one.required_flag for one in choice.answers.values() if one.required_flag}
    notes = [f"with `{flag}`" for flag in sorted(flags)]
    failing = {tp: one for tp, one in choice.answers.items() if one.verdict != "loads"}
    if failing:
        tp, answer = next(iter(failing.items()))
        notes.append(why(answer) if answer.cure else f"at TP {tp}: {why(answer)}")
    sizes = ", ".join(map(str, choice.loads_at))
    return Cell(f"TP {sizes}" if sizes else "does not load", "; ".join(notes))


def why(answer: Answer) -> str:
    """The first thing that goes wrong."""
    rank = answer.refused
    if rank is not None and rank.refused is not None:
        return f"{rank.refused.where}: {rank.refused.why}"
    if answer.cure:
        return answer.cure
    last = answer.ranks[-1]
    if last.missing or last.empty:
        return f"{[*last.missing, *last.empty][0]} stays unwritten"
    if last.misread:
        name, how = next(iter(last.misread.items()))
        return f"{name} is read wrong: {how}"
    return f"{answer.ignored[0]} is not read"


@cache
def cells(model: str, runtime: str) -> tuple[Cell, ...]:
    """A line of a runtime's table."""
    return tuple(cell for cell, _ in asked(model, runtime))


def asked(
    model: str,
    runtime: str,
    loader: RuntimeLoader | None = None,
    sizes: Sequence[int] = SIZES,
) -> Iterator[tuple[Cell, Cell | None]]:
    """Answers of the simulator about each form of a model, with those of a runtime's own loader."""
    file = next(f for at in _FOLDERS if (f := at / f"{model}.yaml").is_file())
    with tempfile.TemporaryDirectory() as folder:
        headers.write_sparse(headers.with_few(headers.read(file), EXPERTS), Path(folder))
        checkpoint = api.open_checkpoint(folder)
        for one in candidates(checkpoint):
            about = checkpoint, one, sizes, Machine(), Consumer(runtime)
            real = cell_of(considered(*about, loader)) if loader is not None else None
            yield cell_of(considered(*about)), real


def page(of: Mapping[tuple[str, str], Sequence[Cell]]) -> list[str]:
    """The tables of all runtimes, and their notes, by `of` a model and a runtime."""
    notes: dict[str, int] = {}
    lines: list[str] = []
    for runtime, title in RUNTIMES.items():
        lines += [f"## {title}", "", *head()]
        for model in MODELS:
            lines.append(row(model, of[model, runtime], notes))
        lines.append("")
    lines += ["## Notes", ""]
    return [*lines, *(f"{number}. {note}" for note, number in notes.items())]


def head() -> list[str]:
    titles = ("model", *COLUMNS)
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def row(model: str, found: Sequence[Cell], notes: dict[str, int]) -> str:
    """A line, its notes numbered from those that there are."""
    texts = []
    for cell in found:
        note = cell.note if len(cell.note) <= _MOST else f"{cell.note[: _MOST - 4]} ..."
        number = f" [{notes.setdefault(note, len(notes) + 1)}]" if note else ""
        texts.append(f"{cell.text}{number}")
    return f"| {' | '.join((MODELS[model], *texts))} |"


def main() -> None:
    """Ask loaders and simulators about what the command line names, and print where they differ."""
    takes = argparse.ArgumentParser(description=__doc__)
    takes.add_argument("--loader", required=True)
    takes.add_argument("--runtime", action="append", choices=sorted(RUNTIMES))
    takes.add_argument("--size", action="append", type=int)
    takes.add_argument("models", nargs="*")
    given = takes.parse_args()
    loaders = loaders_in(given.loader)
    for model in given.models or MODELS:
        for runtime in given.runtime or RUNTIMES:
            found = asked(model, runtime, loaders[runtime], given.size or SIZES)
            for column, (said, real) in zip(COLUMNS, found, strict=True):
                same = real is not None and said.text == real.text
                print("same" if same else "OTHER", model, runtime, column, said, flush=True)
                if not same:
                    print("    its own loader:", real, flush=True)


if __name__ == "__main__":
    main()
