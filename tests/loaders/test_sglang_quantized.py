"""sglang's own loader over what qconvert quantizes, started with the options that its card prints. Skips
itself without its environment (`make loaders`).

CI loads a sample of every kind of cell; QCONVERT_ALL=1 loads all families, forms and ranks, and
QCONVERT_TABLE=FILE appends what became of each.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensor, run_cli, write_shard

from loaders.client import PYTHON, Loaded, Rank, Server
from loaders.published import INNER, published

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

NO_FUSION = "--disable-shared-experts-fusion"
STATS = "STATS"  # stands for a folder of statistics of the cell's model
HOPPER, BLACKWELL = "9.0", "10.0"
ALL_RANKS = (Rank(), Rank(2, 0), Rank(2, 1), Rank(4, 0), Rank(4, 3))
SOME_RANKS = (Rank(), Rank(4, 3))
FORMS: dict[str, tuple[str, ...]] = {
    "w4a16": ("w4a16", "--rtn"),
    "w4a16 g32": ("w4a16", "--rtn", "--group-size", "32"),
    "w4a16 channel": ("w4a16", "--rtn", "--group-size", "channel"),
    "w8a16": ("w4a16", "--rtn", "--bits", "8"),
    "w4a16 Linear": ("w4a16", "--rtn", "--targets", "Linear"),
    "w4a16 keep": ("w4a16", "--rtn", "--shared-experts", "keep"),
    "w4a16 asymmetric": ("w4a16", "--rtn", "--asymmetric"),
    "gptq": ("w4a16", "--rtn", "--packing", "gptq"),
    "gptq Linear": ("w4a16", "--rtn", "--packing", "gptq-v2", "--targets", "Linear"),
    "fp8": ("fp8",),
    "fp8 exponents": ("fp8", "--ue8m0"),
    "fp8 packed": ("fp8", "--dialect", "compressed-tensors"),
    "fp8 rows": ("fp8", "--channel"),
    "fp8 tensor": ("fp8", "--tensor"),
    "fp8 tensor inputs": ("fp8", "--tensor", "--input-scale", "2.5"),
    "fp8 packed inputs": (
        "fp8",
        "--tensor",
        "--dialect",
        "compressed-tensors",
        "--input-scale",
        "2.5",
    ),
    "fp8 stats": ("fp8", "--tensor", "--targets", "experts", "--stats", STATS),
    "fp8 packed stats": (
        "fp8",
        "--tensor",
        "--dialect",
        "compressed-tensors",
        "--targets",
        "experts",
        "--stats",
        STATS,
    ),
    "int8 Linear": ("int8",),
    "mxfp4": ("mx",),
    "kt": ("kt", "--cpu", "int4", "--numa", "1", "--gpu", "w4a16"),
    "nvfp4 ct": ("nvfp4", "--dialect", "compressed-tensors"),
    "nvfp4 ct keep": ("nvfp4", "--dialect", "compressed-tensors", "--shared-experts", "keep"),
    "nvfp4 ct inputs": ("nvfp4", "--dialect", "compressed-tensors", "--stats", STATS),
    "nvfp4 ct Linear": ("nvfp4", "--dialect", "compressed-tensors", "--targets", "Linear"),
    "nvfp4 modelopt": ("nvfp4", "--dialect", "modelopt"),
    "nvfp4 modelopt keep": ("nvfp4", "--dialect", "modelopt", "--shared-experts", "keep"),
    "nvfp4 modelopt inputs": ("nvfp4", "--dialect", "modelopt", "--stats", STATS),
}
# Parameters that a kernel never reads, or that are made of others after the load.
_UNREAD = ("_g_idx", "_g_idx_sort_indices", "_blockscale_swizzled")
_INPUT_SCALES = ("input_scale", "input_global_scale")
# What a draft model takes from the model it drafts for.
_BORROWED = {"lm_head.weight", "model.embed_tokens.weight"}
_NUMBERED_DRAFTS = ("deepseek_v3", "glm4_moe")


@dataclass(frozen=True)
class Cell:
    """A small published checkpoint and a form of FORMS."""

    family: str
    form: str
    fp8: bool = False
    experts: int = 4

    @property
    def inner(self) -> int:
        """Rows of an expert's gate; 256 experts of 512 rows would take minutes."""
        return INNER if self.experts == 4 else 128

    @property
    def draft(self) -> str:
        """How names of its draft layer begin, "" for a family without one."""
        if self.family == "qwen3_moe":
            return ""
        return "model.layers.3." if self.family in _NUMBERED_DRAFTS else "mtp."

    @property
    def capability(self) -> str:
        return BLACKWELL if self.form.startswith("nvfp4") else HOPPER

    def __str__(self) -> str:
        experts = f" {self.experts}" if self.experts != 4 else ""
        return f"{self.family}{experts} {'fp8' if self.fp8 else 'bf16'} {self.form}"


_MODELS = (
    ("qwen3_moe", 4), ("qwen3_next", 4), ("qwen3_5_moe", 4), ("qwen3_5_moe_text", 4),
    ("glm4_moe", 4), ("deepseek_v3", 4), ("deepseek_v3", 256),
)  # fmt: skip
_DENSE = ("qwen3_5", "qwen3_5_text")


def _all_cells() -> list[Cell]:
    found = [
        Cell(family, form, fp8, experts)
        for family, experts in _MODELS
        for fp8 in (False, True)
        for form in FORMS
        # Of experts in BF16 alone, and of models without a draft: others are refused.
        if not form.endswith(" stats") or (family == "qwen3_moe" and not fp8)
    ]
    linear = [form for form in FORMS if form.endswith("Linear")]
    return found + [Cell(f, form, fp8) for f in _DENSE for fp8 in (False, True) for form in linear]


_SAMPLE = [
    Cell("qwen3_moe", "w4a16 g32"),
    Cell("qwen3_next", "w4a16"),
    Cell("qwen3_next", "w4a16 Linear"),
    Cell("qwen3_next", "gptq Linear"),
    Cell("qwen3_next", "nvfp4 modelopt"),
    Cell("qwen3_next", "nvfp4 modelopt", fp8=True),
    Cell("qwen3_5_moe", "w4a16 channel", fp8=True),
    Cell("qwen3_5_moe_text", "w4a16 Linear", fp8=True),
    Cell("qwen3_5_moe_text", "nvfp4 ct inputs"),
    Cell("qwen3_5", "w4a16 Linear"),
    Cell("glm4_moe", "w4a16"),
    Cell("glm4_moe", "w4a16 keep", fp8=True),
    Cell("glm4_moe", "w4a16 Linear", fp8=True),
    Cell("glm4_moe", "w4a16 asymmetric"),
    Cell("glm4_moe", "kt"),
    Cell("glm4_moe", "nvfp4 modelopt"),
    Cell("glm4_moe", "nvfp4 ct Linear"),
    Cell("glm4_moe", "gptq"),
    Cell("glm4_moe", "w4a16", fp8=True),
    Cell("deepseek_v3", "w8a16"),
    Cell("deepseek_v3", "gptq Linear"),
    Cell("qwen3_moe", "gptq Linear", fp8=True),
    Cell("deepseek_v3", "nvfp4 modelopt inputs", fp8=True),
    Cell("deepseek_v3", "w4a16", fp8=True, experts=256),
    Cell("deepseek_v3", "nvfp4 modelopt", fp8=True, experts=256),
    Cell("glm4_moe", "nvfp4 ct", fp8=True),
    Cell("deepseek_v3", "fp8"),
    Cell("deepseek_v3", "fp8 rows", fp8=True),
    Cell("glm4_moe", "fp8 rows"),
    Cell("qwen3_next", "fp8 exponents", fp8=True),
    Cell("qwen3_next", "fp8 rows"),
    Cell("qwen3_5_moe", "fp8 packed"),
    Cell("qwen3_moe", "fp8 tensor"),
    Cell("qwen3_5_moe", "fp8 tensor inputs"),
    Cell("qwen3_next", "fp8 tensor inputs"),
    Cell("deepseek_v3", "fp8 tensor inputs", fp8=True),
    Cell("glm4_moe", "fp8 packed inputs"),
    Cell("qwen3_moe", "fp8 stats"),
    Cell("qwen3_moe", "fp8 packed stats"),
    Cell("qwen3_5", "int8 Linear"),
    Cell("qwen3_moe", "int8 Linear"),
    Cell("qwen3_moe", "mxfp4"),
]
WHOLE_MATRIX = os.environ.get("QCONVERT_ALL") == "1"
CELLS = _all_cells() if WHOLE_MATRIX else _SAMPLE
RANKS = ALL_RANKS if WHOLE_MATRIX else SOME_RANKS


def note(cell: Cell, what: object, became: str) -> None:
    """A line of the table of cells, for a person to read."""
    where = os.environ.get("QCONVERT_TABLE")
    if where:
        with Path(where).open("a") as table:
            table.write(f"{cell} | {what} | {became}\n")


def source(folders: Path, cell: Cell) -> Path:
    """The published checkpoint, written once."""
    folder = folders / f"{cell.family} {cell.experts}{' fp8' if cell.fp8 else ''}"
    if folder.is_dir():
        return folder
    made = published(cell.family, fp8=cell.fp8, experts=cell.experts, inner=cell.inner)
    return made.write(folder)


def stats(folders: Path, cell: Cell) -> Path:
    """A calibration's statistics for every layer that has experts."""
    folder = folders / f"stats {cell.experts}"
    if not folder.is_dir():
        folder.mkdir()
        tensors = {}
        for layer in range(4):
            for kind, width in (("gate_up", 256), ("down", cell.inner)):
                values = np.full((cell.experts, width), 3.5, "<f4").tobytes()
                shape = cell.experts, width
                tensors[f"layers.{layer}.{kind}.absmax"] = Tensor("F32", shape, values)
        write_shard(folder / "layer-0.safetensors", tensors)
    return folder


@dataclass(frozen=True)
class Made:
    """A conversion: its folder, the options of sglang's launch line (None: the card has none), and the
    tensor-parallel sizes that the card lists. `refusal` is the plan's."""

    folder: Path
    flags: Mapping[str, Any] | None
    sizes: tuple[int, ...]
    refusal: str = ""


def made(folders: Path, cell: Cell) -> Made:
    origin = source(folders, cell)
    out = folders / f"{cell} made"
    command, *options = FORMS[cell.form]
    options = [str(stats(folders, cell)) if word == STATS else word for word in options]
    card = out
    if command == "kt":
        card = folders / f"{cell} cpu"
        options += ["--cpu-out", str(card), "--gpu-out", str(out)]
        done = run_cli(command, origin, *options, "--jobs", "1")
    else:
        done = run_cli(command, origin, out, *options, "--jobs", "1")
    if done.code == 1:
        return Made(out, None, (), done.err)
    assert done.code == 0, done.err
    return Made(out, launch_flags(card), tp_sizes(out))


def launch_flags(folder: Path) -> dict[str, Any] | None:
    """sglang's own options in a card's launch line that say what is loaded."""
    text = (folder / "README.md").read_text()
    line = re.search(r"sglang\.launch_server (.*)", text)
    if line is None:
        return None
    return {"disable_shared_experts_fusion": True} if NO_FUSION in line[1].split() else {}


def tp_sizes(folder: Path) -> tuple[int, ...]:
    """The sizes that a manifest lists, which a card repeats."""
    sizes: list[int] = json.loads((folder / "qconvert.json").read_text())["tp_sizes"]
    return tuple(sizes)


def unread(cell: Cell) -> tuple[str, ...]:
    """Ends of parameters that need no bytes: input scales too, of weights alone."""
    return _UNREAD if cell.form.endswith("inputs") else (*_UNREAD, *_INPUT_SCALES)


def faults(loaded: Loaded, cell: Cell) -> str:
    """What did not load, "" for a folder that loaded whole."""
    if loaded.error is not None:
        return f"{loaded.step}: {loaded.error} {loaded.at[-1:]}"
    unwritten = [name for name in loaded.unwritten if not name.endswith(unread(cell))]
    draft = cell.draft or "no draft"
    unused = [name for name in loaded.unused if not name.startswith(draft)]
    found = {"unwritten": unwritten, "unused": unused, "empty": list(loaded.empty)}
    return "; ".join(f"{what} {names}" for what, names in found.items() if names)


def holds_nothing(cell: Cell, rank: Rank) -> bool:
    """Whether the ranks before this one take all rows of an expert: for trtllm each gets
    a multiple of 64 (sglang 0.5.23, `modelopt_quant.py`, `create_weights`)."""
    padded = cell.capability == BLACKWELL and cell.form.startswith("nvfp4 modelopt")
    return padded and rank.rank * 64 >= cell.inner


def draft_faults(loaded: Loaded, original: Loaded, cell: Cell) -> str:
    """The same for the draft model, which reads its own layer alone, and of that what it reads of the
    original."""
    if loaded.error is not None:
        return f"{loaded.step}: {loaded.error} {loaded.at[-1:]}"
    scales = unread(cell)
    unwritten = [n for n in loaded.unwritten if not n.endswith(scales) and n not in _BORROWED]

    def left(one: Loaded) -> set[str]:
        names = [name for name in one.unused if name.startswith(cell.draft)]
        return {name.rpartition(".")[0] for name in names}

    found = {"unwritten": unwritten, "unused": sorted(left(loaded) - left(original))}
    return "; ".join(f"{what} {names}" for what, names in found.items() if names)


def _foretold(cell: Cell, out: Made) -> str:
    """Why our plan refuses a cell, or its card names no launch line; "" for one that is to load."""
    if cell.form == "w4a16 asymmetric":
        assert out.flags is None, "sglang takes no experts with zero points"
        return "no launch line in the card: experts with zero points"
    if cell.form == "mxfp4" or (cell.form.startswith("int8") and cell.family not in _DENSE):
        assert out.flags is None, "sglang has no class for these"
        return "no launch line in the card: experts in MXFP4 or INT8"
    if "Linear" in cell.form and cell.form.startswith("nvfp4 modelopt") and cell.fp8:
        assert "modelopt's dialect has no place" in out.refusal
        return "refused: modelopt has no place for FP8 beside other linears"
    if cell.form == "fp8" and cell.fp8:
        assert "is FP8 in blocks of 128x128 already" in out.refusal
        return "refused: it is FP8 in these blocks already"
    stays = cell.form == "gptq" or cell.draft
    if cell.form.startswith("gptq") and cell.fp8 and stays:
        assert "is FP8, and GPTQ's form has no place for it" in out.refusal
        return "refused: GPTQ's form has no place for FP8"
    assert out.refusal == ""
    return ""


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_loads_with_the_launch_line_of_its_card(
    cell: Cell, hopper: Server, blackwell: Server, folders: Path
) -> None:
    server = blackwell if cell.capability == BLACKWELL else hopper
    out = made(folders, cell)
    why = _foretold(cell, out)
    if why:
        note(cell, "plan", why)
        return
    origin, wrong = source(folders, cell), {}
    for rank in RANKS:
        if rank.tp not in out.sizes:
            note(cell, rank, f"foretold: loads at {out.sizes} alone")
            continue
        loaded = server.load(out.folder, rank, flags=out.flags)
        said = faults(loaded, cell)
        if said and "is not divisible by weight quantization block" in said:
            assert "is not divisible" in str(server.load(origin, rank).error)
            note(cell, rank, "not runnable: FP8 blocks of the source are cut, too")
            continue
        if said.startswith("unused") and holds_nothing(cell, rank):
            note(cell, rank, "whole: ranks are padded to 64 rows, and this one holds zeros")
            continue
        note(cell, rank, said or "whole")
        if said:
            wrong[str(rank)] = said
    if cell.family == "qwen3_next" and cell.form.endswith("inputs") and "nvfp4" in cell.form:
        note(cell, "draft", "foretold: the plan says that sglang's draft class does not load it")
        told = json.loads(
            run_cli(
                "nvfp4", origin, folders / "told", "--dialect", "modelopt", "--stats",
                stats(folders, cell), "--dry-run", "--json",
            ).out
        )  # fmt: skip
        assert "which sglang's draft class does not load beside NVFP4" in json.dumps(told)
    elif cell.draft:
        original = server.load(origin, draft=True)
        said = draft_faults(server.load(out.folder, draft=True, flags=out.flags), original, cell)
        note(cell, "draft", said or "whole")
        if said:
            wrong["draft"] = said
    assert wrong == {}


def test_groups_that_ranks_would_cut_are_foretold(hopper: Server, folders: Path) -> None:
    """Of 256 columns a rank of four has half a group of 128: sglang makes scales of no element, without
    a word."""
    origin = published("qwen3_moe", inner=256).write(folders / "small experts")
    out = folders / "small experts made"
    done = run_cli("w4a16", origin, out, "--rtn", "--jobs", "1")
    assert done.code == 0, done.err
    assert tp_sizes(out) == (1, 2)
    card = (out / "README.md").read_text()
    assert "sglang 0.5.23 does not load it at tp 4: " in card
    cell = Cell("qwen3_moe", "w4a16")
    assert faults(hopper.load(out, Rank(2, 1)), cell) == ""
    cut = hopper.load(out, Rank(4, 3))
    assert cut.error is not None or cut.empty or cut.unwritten
    refused = run_cli("w4a16", origin, folders / "refused", "--rtn", "--tp", "4", "--jobs", "1")
    assert refused.code == 1
    assert "group 32 fits at 4" in refused.err


@pytest.mark.parametrize("form", ["w4a16", "w4a16 keep"])
@pytest.mark.parametrize("stage", [0, 1])
def test_stages_of_a_quantized_folder_are_its_parts(
    form: str, stage: int, hopper: Server, folders: Path
) -> None:
    """glm4_moe builds a head in every stage, and only the last stage has one to read."""
    cell = Cell("glm4_moe", form)
    whole = folders / f"{cell} made"
    if not whole.is_dir():
        made(folders, cell)
    stages = folders / f"{cell} stages"
    if not stages.is_dir():
        done = run_cli("split", whole, stages, "--pp", "2,1", "--for", "sglang", "--jobs", "1")
        assert done.code == 0, done.err
    part = stages / f"stage-{stage:02d}-of-02"
    variables = json.loads((part / "qconvert.json").read_text())["stage"]["environment"]
    rank, flags = Rank(pp=2, stage=stage), launch_flags(part)
    assert flags == launch_flags(whole)
    of_part = hopper.load(part, rank, flags=flags, environment=variables)
    of_whole = hopper.load(whole, rank, flags=flags, environment=variables)
    assert of_part.error is None, of_part.error
    head = {"lm_head.weight"} if stage == 0 else set()
    left = {name for name in of_part.unwritten if not name.endswith(unread(cell))}
    assert left == head
    written = [n for n in of_part.parameters if n not in head and not n.endswith(unread(cell))]
    assert {n: of_part.parameters[n] for n in written} == {
        n: of_whole.parameters[n] for n in written
    }
