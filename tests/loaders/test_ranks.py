"""Files of tensor-parallel ranks and what `join` makes of them, in sglang's own loader. Skips itself
without its environment (`make loaders`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_files
from checkpoints import edit_json, run_cli

from loaders.client import PYTHON, Rank, Server

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

# Its class multiplies the head by the config's output_multiplier_scale before it copies it, so that no
# copy of a tensor of the folder is seen.
HEAD = ("lm_head.weight",)


@pytest.fixture(scope="module")
def parts(folders: Path) -> Path:
    return rank_files.write(folders / "grok-parts", 2)


@pytest.fixture(scope="module")
def joined(parts: Path, folders: Path) -> Path:
    done = run_cli("join", parts, folders / "grok-whole", "--jobs", "1")
    assert done.code == 0, done.err
    return folders / "grok-whole"


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_holds_the_same_bytes(
    rank: int, hopper: Server, parts: Path, joined: Path
) -> None:
    before = hopper.load(parts, Rank(2, rank))
    after = hopper.load(joined, Rank(2, rank))
    assert before.error is None, before.error
    assert after.whole, (after.error, after.unwritten)
    assert after.unused == HEAD
    assert after.parameters == before.parameters


@pytest.mark.parametrize("rank", [Rank(), Rank(4, 3)], ids=str)
def test_joined_loads_in_other_numbers_of_ranks(rank: Rank, hopper: Server, joined: Path) -> None:
    done = hopper.load(joined, rank)
    assert done.whole, (done.error, done.unwritten)
    assert done.unused == HEAD


def test_parts_in_another_number_of_ranks_are_read_wrong(
    hopper: Server, folders: Path, joined: Path
) -> None:
    """sglang#36438: two of four ranks are read, without an error. Whole experts end the load unless the
    config has the setting that `join` writes."""
    four = rank_files.write(folders / "grok-four", 4)
    wrong, right = hopper.load(four, Rank(2, 1)), hopper.load(joined, Rank(2, 1))
    assert wrong.error is None
    assert wrong.parameters != right.parameters
    done = run_cli("join", four, folders / "grok-unmarked", "--jobs", "1")
    assert done.code == 0, done.err
    edit_json(folders / "grok-unmarked" / "config.json", lambda c: c.pop("load_presharded_moe"))
    unmarked = hopper.load(folders / "grok-unmarked", Rank(2, 1))
    assert "must match the size" in str(unmarked.error)
