"""Folders of ranks in vLLM's own loader of sharded states: every parameter has the bytes that a load of
the checkpoint itself leaves on that rank. Skips itself without its environment (`make loaders`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import copied, read_tensors, run_cli, write_shard

from loaders.client import PYTHON, Loaded, Rank, Server
from loaders.folders import source
from loaders.published import FAMILIES
from qconvert.passes.rank_state import COMPARED

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM's loader: make loaders"),
]
# Scales of a cache that no checkpoint here has: the harness marks them before a load of the checkpoint,
# which leaves them, and a sharded state sets them.
UNSET = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")


def options(tp: int) -> dict[str, object]:
    pattern = f"../rank-{{rank}}-of-{tp}/model{{part}}.safetensors"
    return {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": pattern}}


def split(origin: Path, folders: Path, tp: int, *more: str) -> Path:
    out = folders / f"ranks {origin.name} {tp}{''.join(more)}"
    if not out.exists():
        done = run_cli("split", origin, out, "--tp", str(tp), *more, "--jobs", "1")
        assert done.code == 0, done.err
    return out


@pytest.mark.parametrize("rank", [Rank(2, 0), Rank(2, 1), Rank(4, 3)], ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_what_a_load_leaves(
    family: str, fp8: bool, rank: Rank, vllm: Server, folders: Path
) -> None:
    origin = source(folders, family, fp8=fp8)
    if family == "deepseek_v3" and fp8 and rank.tp == 4:
        done = run_cli("split", origin, folders / "refused", "--tp", "4")
        assert "a rank's 192 rows cut blocks of 128" in done.err
        return
    out = split(origin, folders, rank.tp)
    whole = vllm.load(origin, rank)
    assert whole.error is None
    assert whole.architecture in COMPARED
    ranks = vllm.load(out / f"rank-0-of-{rank.tp}", rank, flags=options(rank.tp))
    assert ranks.error is None, ranks.error
    assert not ranks.unwritten
    assert ranks.schemes == whole.schemes
    _same(whole, ranks)


def _same(whole: Loaded, ranks: Loaded) -> None:
    kept = {name: held for name, held in whole.parameters.items() if not name.endswith(UNSET)}
    assert {n: h for n, h in ranks.parameters.items() if not n.endswith(UNSET)} == kept


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_ranks_with_whole_experts(family: str, rank: int, vllm: Server, folders: Path) -> None:
    origin, more = source(folders, family, fp8=True), {"enable_expert_parallel": True}
    out = split(origin, folders, 2, "--ep", "2")
    whole = vllm.load(origin, Rank(2, rank), flags=more)
    ranks = vllm.load(out / "rank-0-of-2", Rank(2, rank), flags={**options(2), **more})
    assert ranks.error is None, ranks.error
    _same(whole, ranks)


def test_a_folder_that_lacks_a_parameter_or_has_one_more_ends_the_load(
    vllm: Server, folders: Path
) -> None:
    """So that nothing that `split` leaves out, or names otherwise, would go unseen."""
    out = split(source(folders, "qwen3_moe"), folders, 2)
    name = "model.layers.0.self_attn.o_proj.weight"
    for other in (None, "model.layers.0.self_attn.out_proj.weight"):
        broken = copied(out, folders / f"broken {other}")
        held = read_tensors(broken / "rank-1-of-2")
        values = held.pop(name)
        if other is not None:
            held[other] = values
        write_shard(broken / "rank-1-of-2" / "model.safetensors", held)
        done = vllm.load(broken / "rank-0-of-2", Rank(2, 1), flags=options(2))
        assert (other or name) in str(done.error)
