"""Files of tensor-parallel ranks joined: every byte against the tensors that were cut, refusals by name,
and what validation finds. With sglang's own loader: tests/loaders/test_ranks.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_files
from checkpoints import Tensor, copied, edit_json, read_tensors, run_cli, tensor, write_shard
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.ops.gather import Gather, Scatter, SideBySide
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Request, validate_folder

NAME = "model.layers.1.block_sparse_moe.experts.2"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("ranks")
    rank_files.write(room / "parts", 4)
    done = run_cli("join", room / "parts", room / "whole", "--jobs", "1")
    assert done.code == 0, done.err
    return room


# --- The op ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("halves", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
def test_side_by_side_is_numpys_concatenation(halves: int, dtype: str) -> None:
    random, size = np.random.default_rng(0), TensorType(dtype, (1,)).nbytes
    parts = [random.integers(0, 256, (37, 24 * size), np.uint8) for _ in range(halves)]
    ins = [buffer(TensorType(dtype, (37, 24)), part.tobytes()) for part in parts]
    wanted = np.concatenate(parts, axis=1).tobytes()
    for limit in (None, 1, 5000):
        (found,), _ = run_op(Gather(SideBySide(halves)), ins, limit)
        assert found == wanted
        whole = buffer(TensorType(dtype, (37 * halves, 24)), wanted)
        back, _ = run_op(Scatter(SideBySide(halves)), [whole], limit)
        assert back == [part.tobytes() for part in parts]


# --- Folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 8])
def test_joined_is_what_was_cut(ranks: int, tmp_path: Path) -> None:
    source = rank_files.write(tmp_path / "parts", ranks)
    done = run_cli("join", source, tmp_path / "out", "--jobs", "1")
    assert done.code == 0, done.err
    assert read_tensors(tmp_path / "out") == rank_files.whole()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**rank_files.CONFIG, "load_presharded_moe": False}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    manifest = json.loads((tmp_path / "out" / "qconvert.json").read_text())
    assert [step["name"] for step in manifest["passes"]] == ["join_ranks"]
    assert not manifest["lossy_steps"]
    assert not manifest["dropped"]


def test_an_index_is_not_read_where_ranks_have_files(tmp_path: Path) -> None:
    """It has one file for a name."""
    source = rank_files.write(tmp_path / "parts", 2)
    names = dict.fromkeys(rank_files.whole(), "pytorch_model-00002-TP-000.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": names})
    (source / "model.safetensors.index.json").write_text(index)
    assert run_cli("join", source, tmp_path / "out", "--jobs", "1").code == 0
    assert read_tensors(tmp_path / "out") == rank_files.whole()


def test_a_dry_run_and_other_commands(room: Path, tmp_path: Path) -> None:
    done = run_cli("join", room / "parts", tmp_path / "out", "--dry-run")
    assert done.code == 0, done.err
    assert "parts of 4 ranks" in done.out
    assert not (tmp_path / "out").exists()
    for words in (["run", "copy"], ["dequant"], ["fp8"]):
        done = run_cli(*words, room / "parts", tmp_path / "out")
        assert done.code == 1
        assert not (tmp_path / "out").exists()
    assert "qconvert join" in run_cli("run", "copy", room / "parts", tmp_path / "out").err
    assert run_cli("inspect", room / "parts").code == 0


def test_a_recipe_joins_and_goes_on(room: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "passes:\n- join_ranks\n- drop: {match: '*.post_moe_norm.weight', why: a test}\n"
    )
    done = run_cli("run", recipe, room / "parts", tmp_path / "out", "--jobs", "1")
    assert done.code == 0, done.err
    found = read_tensors(tmp_path / "out")
    wanted = {n: t for n, t in rank_files.whole().items() if "post_moe_norm" not in n}
    assert found == wanted


def _without_rank(folder: Path) -> None:
    for file in folder.glob("*-TP-002.safetensors"):
        file.unlink()


def _one_rank(folder: Path) -> None:
    for rank in (1, 2, 3):
        for file in folder.glob(f"*-TP-{rank:03d}.safetensors"):
            file.unlink()


def _change(rank: int, change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / f"pytorch_model-00003-TP-{rank:03d}.safetensors"
        room = folder / "room"
        room.mkdir()
        file.rename(room / "model.safetensors")
        held = read_tensors(room)
        (room / "model.safetensors").unlink()
        room.rmdir()
        change(held)
        write_shard(file, held)

    return apply


def _twice(folder: Path) -> None:
    extra = {f"{NAME}.w1.weight": tensor("BF16", 128, 256)}
    write_shard(folder / "pytorch_model-00009-TP-common.safetensors", extra)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_without_rank, "found none named *-TP-002.safetensors; the download is incomplete"),
        (_one_rank, "found none named *-TP-001.safetensors"),
        (
            _change(3, lambda held: held.pop(f"{NAME}.w2.weight")),
            f"'{NAME}.w2.weight': expected a part",
        ),
        (
            _change(1, lambda held: held.update({f"{NAME}.w1.weight": tensor("BF16", 16, 256)})),
            f"'{NAME}.w1.weight': expected parts alike, found BF16 [32, 256] of rank 0 and BF16 [16, ",
        ),
        (
            _change(0, lambda held: held.update({f"{NAME}.w1.bias": tensor("BF16", 32)})),
            f"'{NAME}.w1.bias': expected a part in the files of each of 4 ranks, found none of rank 1",
        ),
        (_twice, f"'{NAME}.w1.weight': is in a common file, and in parts of ranks"),
        (
            lambda folder: edit_json(
                folder / "config.json", lambda c: c.update(load_presharded_attn=True)
            ),
            "config.json states load_presharded_attn",
        ),
        (
            lambda folder: edit_json(
                folder / "config.json", lambda c: c.update(moe_intermediate_size=256)
            ),
            "expected 256 for all ranks, as config.json states, found 4 parts of 32",
        ),
    ],
)
def test_refusals(room: Path, tmp_path: Path, change: Callable[[Path], None], why: str) -> None:
    broken = copied(room / "parts", tmp_path / "broken")
    change(broken)
    done = run_cli("join", broken, tmp_path / "out")
    assert done.code == 1
    assert why in done.err
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_ranks_cut_in_an_unknown_way(tmp_path: Path) -> None:
    scale = f"{NAME}.w1.weight_scale"
    source = rank_files.write(tmp_path / "parts", 2)
    for rank in range(2):
        file = source / f"pytorch_model-00009-TP-{rank:03d}.safetensors"
        write_shard(file, {scale: tensor("F32", 64, 1)})
    done = run_cli("join", source, tmp_path / "out")
    assert done.code == 1
    assert f"'{scale}': each rank has a part (F32 [64, 1])" in done.err


def test_a_checkpoint_that_is_in_no_parts(room: Path, tmp_path: Path) -> None:
    done = run_cli("join", room / "whole", tmp_path / "out")
    assert done.code == 1
    assert "expected folders named stage-NN-of-NN" in done.err
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("passes:\n- join_ranks\n")
    done = run_cli("run", recipe, room / "whole", tmp_path / "out")
    assert "expected files of tensor-parallel ranks (*-TP-000.safetensors), found none" in done.err


# --- What validation finds -----------------------------------------------------------------------


def report(out: Path, against: Path) -> Any:
    return validate_folder(out, str(against), request=Request("full", jobs=1))


def test_what_is_proved(room: Path) -> None:
    found = report(room / "whole", room / "parts")
    assert not found.findings
    assert "joined experts hold the parts of all ranks" in found.proved
    alone = report(room / "parts", room / "parts")
    assert "joined experts hold the parts of all ranks" not in alone.proved


def _moved(out: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a tensor where it lies, and forget the receipt, which would see it."""
    held = read_tensors(out)
    values = np.frombuffer(held[name].data, np.uint16).reshape(held[name].shape)
    made = np.ascontiguousarray(change(values))
    held[name] = Tensor("BF16", made.shape, made.tobytes())
    for file in out.glob("*.safetensors*"):
        file.unlink()
    for noted in ("qconvert.json", "qconvert.receipt.jsonl"):
        (out / noted).unlink(missing_ok=True)
    write_shard(out / "model.safetensors", held)


def _errors(out: Path, source: Path) -> list[Finding]:
    return [one for one in report(out, source).findings if one.severity == "error"]


@pytest.mark.parametrize(
    ("end", "change", "rule"),
    [
        ("w1", lambda v: np.roll(v, 32, axis=0), "QC060"),
        ("w2", lambda v: np.roll(v, 32, axis=1), "QC060"),
        ("w2", lambda v: v[:, np.r_[0:127, 126]], "QC060"),
        ("w3", lambda v: v[:64], "QC061"),
    ],
)
def test_parts_in_other_places_are_found(
    room: Path, tmp_path: Path, end: str, change: Callable[[Any], Any], rule: str
) -> None:
    out = copied(room / "whole", tmp_path / "out")
    _moved(out, f"{NAME}.{end}.weight", change)
    found = [one for one in _errors(out, room / "parts") if one.rule in ("QC060", "QC061", "QC062")]
    assert [(one.rule, one.where) for one in found] == [(rule, f"{NAME}.{end}.weight")]


def test_a_tensor_that_is_missing_is_found(room: Path, tmp_path: Path) -> None:
    out = copied(room / "whole", tmp_path / "out")
    _moved(out, f"{NAME}.w1.weight", lambda v: v)
    held = read_tensors(out)
    del held[f"{NAME}.w1.weight"]
    write_shard(out / "model.safetensors", held)
    found = {(one.rule, one.where) for one in _errors(out, room / "parts")}
    assert ("QC062", f"{NAME}.w1.weight") in found


def test_a_config_that_takes_experts_for_parts_is_found(room: Path, tmp_path: Path) -> None:
    out = copied(room / "whole", tmp_path / "out")
    edit_json(out / "config.json", lambda config: config.pop("load_presharded_moe"))
    found = [one for one in _errors(out, room / "parts") if one.rule == "QC083"]
    assert len(found) == 1
    assert "load_presharded_moe" in found[0].message
