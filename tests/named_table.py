"""The table of docs/models.md: of named models at their published sizes, as published and as commands
make them, at which tensor-parallel sizes each runtime loads them, by the simulators of their loaders.

With an interpreter that has the runtimes, their own loaders are asked beside, and what they say
otherwise is printed:

    PYTHONPATH=tests python tests/named_table.py [--loader PYTHON] [--runtime vllm] [MODEL ...]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

_TESTS = Path(__file__).parent
_FOLDERS = (_TESTS / "families" / "published", _TESTS / "headers", _TESTS / "headers" / "forms")
# Names on the Hub, by the file that holds their headers.
MODELS = {
    "gpt-oss-120b": "gpt-oss-120b",
    "deepseek-v3.2": "DeepSeek-V3.2",
    "deepseek-v4-flash": "DeepSeek-V4-Flash",
    "kimi-k2.5": "Kimi-K2.5",
    "glm-5": "GLM-5",
    "llama-3.3-70b": "Llama-3.3-70B-Instruct",
    "llama-4-maverick": "Llama-4-Maverick",
    "mixtral-8x22b": "Mixtral-8x22B",
    "minimax-m2.5": "MiniMax-M2.5",
    "gemma-4-26b-a4b": "gemma-4-26B-A4B",
    "qwen3-vl-30b-a3b": "Qwen3-VL-30B-A3B",
    "nemotron-3-nano-30b": "Nemotron-3-Nano-30B-A3B",
}
SIZES = (1, 2, 4, 8)
RUNTIMES = ("sglang", "vllm")
COLUMNS = ("as published", "w4a16", "fp8", "nvfp4")


def candidates(checkpoint: Checkpoint, runtime: str) -> tuple[Candidate, ...]:
    """What stands in the columns: of a model without experts, of its linears."""
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
    """A form of a model in a runtime."""

    model: str
    runtime: str
    column: str
    choice: Choice
    real: Choice | None = None

    @property
    def text(self) -> str:
        return said(self.choice)


def said(choice: Choice) -> str:
    if choice.refused:
        return f"not made: {choice.refused}"
    if choice.unknown:
        return f"unknown: {choice.unknown}"
    flag = {one.required_flag for one in choice.answers.values() if one.required_flag}
    sizes = ", ".join(map(str, choice.loads_at))
    text = f"TP {sizes}" if sizes else "no"
    text += "".join(f" {one}" for one in flag)
    for tp, answer in choice.answers.items():
        if answer.verdict != "loads":
            rank = answer.refused
            if rank is not None and rank.refused is not None:
                text += f" [{tp}: {rank.refused.where} {rank.refused.why}]"
            elif answer.cure:
                text += f" [{tp}: {answer.cure}]"
            else:
                last = answer.ranks[-1]
                text += f" [{tp}: unwritten {[*last.missing, *last.empty][:2]} misread {[*last.misread][:2]} ignored {answer.ignored[:2]}]"
            break
    return text


def cells(
    model: str,
    runtimes: Sequence[str] = RUNTIMES,
    loaders: dict[str, RuntimeLoader] | None = None,
    experts: int = 0,
    columns: Sequence[str] = COLUMNS,
    sizes: Sequence[int] = SIZES,
) -> Iterator[Cell]:
    file = next(f for at in _FOLDERS if (f := at / f"{model}.yaml").is_file())
    found = headers.read(file)
    with tempfile.TemporaryDirectory() as folder:
        headers.write_sparse(headers.with_few(found, experts) if experts else found, Path(folder))
        checkpoint = api.open_checkpoint(folder)
        for runtime in runtimes:
            for one, column in zip(candidates(checkpoint, runtime), COLUMNS, strict=True):
                if column not in columns:
                    continue
                asked = checkpoint, one, sizes, Machine(), Consumer(runtime)
                real = considered(*asked, loaders[runtime]) if loaders else None
                yield Cell(model, runtime, column, considered(*asked), real)


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__)
    takes.add_argument("--loader")
    takes.add_argument("--runtime", action="append")
    takes.add_argument("--experts", type=int, default=0)
    takes.add_argument("--column", action="append")
    takes.add_argument("--size", action="append", type=int)
    takes.add_argument("models", nargs="*")
    given = takes.parse_args()
    loaders = loaders_in(given.loader) if given.loader else None
    for model in given.models or MODELS:
        for cell in cells(
            model,
            given.runtime or RUNTIMES,
            loaders,
            given.experts,
            given.column or COLUMNS,
            given.size or SIZES,
        ):
            print(cell.model, cell.runtime, cell.column, "|", cell.text[:400], flush=True)
            if cell.real is not None:
                print("    real:", said(cell.real)[:600], flush=True)


if __name__ == "__main__":
    main()
