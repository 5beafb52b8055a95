"""Cases a reviewer broke, each through the command line: kept so that they stay mended."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run_cli, tree, watched_reads

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.demo import write_sample


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` and `b`: the same headers, other weights."""
    folder = tmp_path_factory.mktemp("samples")
    for seed, name in enumerate("ab"):
        write_sample(folder / name, seed=seed, shards=6)
    return folder


def ok(*arguments: str | Path) -> str:
    done = run_cli(*arguments)
    assert done.code == 0, done.err
    return done.out


def refused(said: str, *arguments: str | Path, code: int = 1) -> None:
    done = run_cli(*arguments)
    assert (done.code, said in done.err) == (code, True), done.err


def edited(source: Path, to: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other values in its config."""
    shutil.copytree(source, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return to


# ---- what a finished folder is


def test_a_finished_folder_is_of_its_own_source(samples: Path, tmp_path: Path) -> None:
    ok("dequant", samples / "a", tmp_path / "out")
    assert "nothing to do" in ok("dequant", samples / "a", tmp_path / "out")
    refused("finished result of another plan", "dequant", samples / "b", tmp_path / "out")
    done = run_cli("validate", tmp_path / "out", "--against", samples / "b")
    assert (done.code, "QC031" in done.out) == (3, True)


def test_a_changed_side_file_makes_another_source(samples: Path, tmp_path: Path) -> None:
    source = edited(samples / "a", tmp_path / "s")
    ok("dequant", source, tmp_path / "out")
    (source / "chat_template.jinja").write_text("other")
    refused("finished result of another plan", "dequant", source, tmp_path / "out")


# ---- experts


def test_stacking_scales_whose_blocks_would_span_gate_and_up(tmp_path: Path) -> None:
    """I = 192 under 128-row blocks: two grids of two rows are not the grid of 384 rows."""
    source = tmp_path / "ragged"
    write_sample(source, intermediate=192)
    refused("a block would span gate and up", "experts", "stack", source, tmp_path / "out")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("passes: [dequant, stack]")
    ok("run", recipe, source, tmp_path / "out")
    assert run_cli("validate", tmp_path / "out").code == 0


def test_stack_and_unstack_compose_with_dequant(samples: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("passes: [dequant, stack, unstack]")
    ok("run", recipe, samples / "a", tmp_path / "there-and-back")
    ok("dequant", samples / "a", tmp_path / "plain")
    ok("diff", tmp_path / "there-and-back", tmp_path / "plain")


# ---- fuse


def test_the_next_class_order_needs_the_next_class(samples: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("passes: [dequant, {fuse: {consumer: qwen3-next}}]")
    refused("the recipe lacks `as_class", "run", recipe, samples / "a", tmp_path / "out")
    recipe.write_text(
        "passes: [dequant, {fuse: {consumer: qwen3-next}}, {as_class: {to: qwen3_next}}]"
    )
    ok("run", recipe, samples / "a", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "qconvert.json").read_text())["family"] == "qwen3_next"


def test_fused_projections_left_in_bf16_are_listed(samples: Path, tmp_path: Path) -> None:
    """The sample's list does not name in_proj_b and in_proj_a; the fused config must."""
    ok("fuse", samples / "a", tmp_path / "out", "--for", "sglang")
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    at = "model.layers.0.linear_attn"
    listed = block["modules_to_not_convert"]
    assert {f"{at}.in_proj_b", f"{at}.in_proj_a", f"{at}.in_proj_ba"} <= set(listed)
    assert not any("qkvz" in name for name in listed)


def test_two_ignore_keys_become_one(samples: Path, tmp_path: Path) -> None:
    config = json.loads((samples / "a" / "config.json").read_text())["quantization_config"]
    block = {**config, "ignored_layers": ["model.norm"]}
    source = edited(samples / "a", tmp_path / "s", quantization_config=block)
    ok("fuse", source, tmp_path / "out", "--for", "sglang")
    made = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "ignored_layers" not in made
    assert {"lm_head", "model.norm"} <= set(made["modules_to_not_convert"])


def test_usage_errors_name_the_options(samples: Path, tmp_path: Path) -> None:
    refused("--for NAME", "fuse", samples / "a", tmp_path / "out", code=2)
    out = tmp_path / "out"
    refused("unknown consumer 'tgi'", "fuse", samples / "a", out, "--for", "tgi", code=2)
    refused("the name is empty", "join", "", tmp_path / "out", code=2)


# ---- stages


def split(source: Path, out: Path, *more: str) -> str:
    return ok("split", source, out, "--pp", "2,2", *more)


def test_stages_of_different_conversions_are_not_joined(samples: Path, tmp_path: Path) -> None:
    split(samples / "a", tmp_path / "plain")
    for name, source, more in (
        ("bf16", "a", ["--recipe", "dequant-fp8"]),
        ("other", "b", []),
    ):
        split(samples / source, tmp_path / name, *more)
        mixed = tmp_path / f"mixed-{name}"
        for stage, origin in (("stage-00-of-02", "plain"), ("stage-01-of-02", name)):
            shutil.copytree(tmp_path / origin / stage, mixed / stage)
        refused("belongs to another split", "join", mixed, tmp_path / "joined")


def test_split_keeps_out_of_folders_that_hold_other_things(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused("holds notes.txt", "split", samples / "a", tmp_path / "out", "--pp", "2,2")
    split(samples / "a", tmp_path / "stages")
    refused("not part of this split", "split", samples / "a", tmp_path / "stages", "--pp", "1,1,2")
    before = tree(tmp_path / "stages")
    split(samples / "a", tmp_path / "stages")
    assert tree(tmp_path / "stages") == before


def test_a_model_nobody_knows_is_not_split(samples: Path, tmp_path: Path) -> None:
    odd = edited(samples / "a", tmp_path / "odd", model_type="odd")
    refused("model_type 'odd' is not known", "split", odd, tmp_path / "out", "--pp", "2,2")


def test_without_a_runtime_every_stage_has_embeddings(samples: Path, tmp_path: Path) -> None:
    split(samples / "a", tmp_path / "out")
    for stage in (tmp_path / "out").iterdir():
        assert "model.embed_tokens.weight" in Checkpoint.open(stage)


def test_room_is_looked_for_before_the_first_stage(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    small = os.statvfs_result((*real[:1], 4096, real[2], real[3], 1000, *real[5:]))
    monkeypatch.setattr("qconvert.run.folder.workspace.os.statvfs", lambda _: small)
    arguments = ["--pp", "2,2", "--copy"]
    refused("nothing was written", "split", samples / "a", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_where_links_are_forbidden_shards_are_copied(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("qconvert.run.work.files.os.link", forbidden)
    assert "0 of them hard links" in ok(
        "split", samples / "a", tmp_path / "out", "--pp", "2,2", "--dry-run"
    )
    split(samples / "a", tmp_path / "out")
    ok("join", tmp_path / "out", tmp_path / "joined")
    ok("diff", samples / "a", tmp_path / "joined")


def test_an_explicit_shard_size_holds_for_links_too(samples: Path, tmp_path: Path) -> None:
    split(samples / "a", tmp_path / "out", "--max-shard-size", "200KB")
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("*/*.safetensors")]
    assert max(sizes) <= 320_000  # the largest tensor, and a header


def test_stage_folders_are_inspected_and_validated_as_stages(samples: Path, tmp_path: Path) -> None:
    split(samples / "a", tmp_path / "out", "--for", "sglang")
    for number in range(2):
        stage = tmp_path / "out" / f"stage-0{number}-of-02"
        assert json.loads(ok("inspect", stage, "--json"))["missing"] == []
    lost = Checkpoint.open(tmp_path / "out" / "stage-01-of-02")
    assert "mtp.layers.0.mlp.gate.weight" in lost
    assert json.loads(ok("inspect", tmp_path / "out", "--json"))["tensors"] == len(
        Checkpoint.open(samples / "a")
    )


def test_a_stage_that_lost_its_draft_layer_is_found(samples: Path, tmp_path: Path) -> None:
    split(samples / "a", tmp_path / "out", "--for", "sglang")
    stage = Checkpoint.open(tmp_path / "out" / "stage-01-of-02")
    name = "mtp.layers.0.mlp.experts.2.up_proj.weight"
    rest = {key: source for key, source in stage.items() if key != name}
    object.__setattr__(stage, "sources", rest)
    assert stage.absent() == [name]


def test_clean_reaches_into_stages_and_join_names_the_unfinished(
    samples: Path, tmp_path: Path
) -> None:
    split(samples / "a", tmp_path / "out")
    (tmp_path / "out" / "stage-01-of-02" / ".qconvert").mkdir()
    refused("stage-01-of-02 is unfinished", "join", tmp_path / "out", tmp_path / "joined")
    assert "dropped unfinished work" in ok("clean", tmp_path / "out")
    ok("join", tmp_path / "out", tmp_path / "joined")


def test_a_joined_folder_validates_against_its_stages(samples: Path, tmp_path: Path) -> None:
    split(samples / "a", tmp_path / "out")
    ok("join", tmp_path / "out", tmp_path / "joined")
    ok("validate", tmp_path / "joined", "--against", tmp_path / "out", "--level", "full")


# ---- memory


def test_no_read_is_large_when_a_stack_is_cut_and_joined(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = watched_reads(monkeypatch)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("passes: [dequant, stack]")
    ok("run", recipe, samples / "a", tmp_path / "out", "--jobs", "1")
    assert 0 < max(sizes) <= 4 << 20


def test_inspect_says_order_and_stage(samples: Path, tmp_path: Path) -> None:
    ok("fuse", samples / "a", tmp_path / "fused", "--for", "sglang")
    assert "linear-attention projections: fused in 1 group\n" in ok("inspect", tmp_path / "fused")
    split(tmp_path / "fused", tmp_path / "stages")
    said = ok("inspect", tmp_path / "stages" / "stage-01-of-02")
    assert "pipeline stage 1 of 2, counted from 0: layers 2 to 3" in said
    assert "fused in 1 group" in said
