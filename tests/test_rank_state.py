"""Folders of ranks for vLLM's loader of sharded states: what each holds by arithmetic on whole arrays,
refusals, and what validation finds. With vLLM's own loader: tests/loaders/test_rank_state.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensor, copied, edit_json, read_tensors, run_cli, write_shard
from loaders.published import published
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.ops.rowwise import Share
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Request, validate_folder

WIDTH = {"BF16": np.uint16, "F8_E4M3": np.uint8, "F32": np.uint32}
LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("ranks")
    for family in ("qwen3_moe", "qwen3_5_moe"):
        published(family, fp8=True).write(room / family)
    return room


def split(source: Path, out: Path, *words: str) -> Path:
    done = run_cli("split", source, out, *words, "--jobs", "1")
    assert done.code == 0, done.err
    return out


@pytest.fixture(scope="module")
def ranks(room: Path) -> Path:
    return split(room / "qwen3_moe", room / "ranks", "--tp", "2")


def arrays(folder: Path) -> dict[str, Any]:
    found = read_tensors(folder)
    return {
        name: np.frombuffer(one.data, WIDTH[one.dtype]).reshape(one.shape)
        for name, one in found.items()
    }


def half(values: Any, rank: int, axis: int) -> Any:
    return np.split(values, 2, axis)[rank]


# --- What a rank holds -----------------------------------------------------------------------------


@pytest.mark.parametrize("of", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
def test_a_share_is_numpys_split(of: int, dtype: str) -> None:
    kind = TensorType(dtype, (37, 24))
    values = np.random.default_rng(0).integers(0, 256, (37, kind.row_nbytes), np.uint8)
    for limit in (None, 1, 5000):
        for share, wanted in enumerate(np.split(values, of, axis=1)):
            (found,), _ = run_op(Share(share, of), [buffer(kind, values.tobytes())], limit)
            assert found == wanted.tobytes()
    with pytest.raises(PlanError, match="in 5 equal shares"):
        Share(0, 5).infer(kind)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("end", ["weight", "weight_scale_inv"])
def test_projections_and_experts(room: Path, ranks: Path, rank: int, end: str) -> None:
    whole, held = arrays(room / "qwen3_moe"), arrays(ranks / f"rank-{rank}-of-2")
    at = f"{LAYER}.self_attn"
    qkv = [half(whole[f"{at}.{name}_proj.{end}"], rank, 0) for name in "qkv"]
    assert np.array_equal(held[f"{at}.qkv_proj.{end}"], np.concatenate(qkv))
    assert np.array_equal(held[f"{at}.o_proj.{end}"], half(whole[f"{at}.o_proj.{end}"], rank, 1))
    experts, made = f"{LAYER}.mlp.experts", held[f"{LAYER}.mlp.experts.routed_experts.w13_{end}"]
    for expert, (both, down) in enumerate(
        zip(made, held[f"{experts}.routed_experts.w2_{end}"], strict=True)
    ):
        gate, up = (
            half(whole[f"{experts}.{expert}.{n}_proj.{end}"], rank, 0) for n in ("gate", "up")
        )
        assert np.array_equal(both, np.concatenate([gate, up]))
        assert np.array_equal(down, half(whole[f"{experts}.{expert}.down_proj.{end}"], rank, 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_whole_what_is_added_and_what_is_cut_by_rows(
    room: Path, ranks: Path, rank: int
) -> None:
    whole, held = arrays(room / "qwen3_moe"), arrays(ranks / f"rank-{rank}-of-2")
    for name in ("model.norm.weight", f"{LAYER}.input_layernorm.weight"):
        assert np.array_equal(held[name], whole[name])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert np.array_equal(held[name], half(whole[name], rank, 0))
    for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
        assert held[f"{LAYER}.self_attn.attn.{name}"].view(np.float32) == 1
    fact = json.loads((ranks / f"rank-{rank}-of-2" / "qconvert.json").read_text())["rank"]
    assert (fact["number"], fact["of"], fact["ep"]) == (rank, 2, 1)
    assert "vllm serve FOLDERS/rank-0-of-2" in (ranks / f"rank-{rank}-of-2/README.md").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_segments_of_linear_attention(room: Path, rank: int) -> None:
    out = room / "qwen3_5_ranks"
    if not out.exists():
        split(room / "qwen3_5_moe", out, "--tp", "2")
    whole, held = arrays(room / "qwen3_5_moe"), arrays(out / f"rank-{rank}-of-2")
    config = json.loads((room / "qwen3_5_moe" / "config.json").read_text())["text_config"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    before = "model.language_model.layers.0.linear_attn"
    at = "language_model.model.layers.0.linear_attn"
    qkv, z = (whole[f"{before}.in_proj_{name}.weight"] for name in ("qkv", "z"))
    q, k, v = qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :]
    wanted = np.concatenate([half(one, rank, 0) for one in (q, k, v, z)])
    assert np.array_equal(held[f"{at}.in_proj_qkvz.weight"], wanted)
    conv = whole[f"{before}.conv1d.weight"]
    parts = conv[:keys], conv[keys : 2 * keys], conv[2 * keys :]
    wanted = np.concatenate([half(one, rank, 0) for one in parts])
    assert np.array_equal(held[f"{at}.conv1d.weight"], wanted)
    assert np.array_equal(held[f"{at}.A_log"], half(whole[f"{before}.A_log"], rank, 0))
    assert not [name for name in held if "mtp" in name]


def test_whole_experts_on_each_rank(room: Path, tmp_path: Path) -> None:
    out = split(room / "qwen3_moe", tmp_path / "out", "--tp", "2", "--ep", "2")
    whole = arrays(room / "qwen3_moe")
    for rank in range(2):
        made = arrays(out / f"rank-{rank}-of-2")[f"{LAYER}.mlp.experts.routed_experts.w2_weight"]
        for slot, values in enumerate(made):
            name = f"{LAYER}.mlp.experts.{rank * len(made) + slot}.down_proj.weight"
            assert np.array_equal(values, whole[name])
        assert not report(out / f"rank-{rank}-of-2", room / "qwen3_moe").findings
    assert "--enable-expert-parallel" in (out / "rank-0-of-2/README.md").read_text()


def test_rows_of_a_padded_vocabulary(tmp_path: Path) -> None:
    """520 rows are 576 for two ranks: the second has 288, of which 232 are the table's."""
    model = published("qwen3_moe")
    model.config["vocab_size"] = 520
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        kind, (_, columns), data = model.tensors[name]
        model.tensors[name] = Tensor(kind, (520, columns), (data * 2)[: 520 * columns * 2])
    model.write(tmp_path / "source")
    out = split(tmp_path / "source", tmp_path / "out", "--tp", "2")
    whole = arrays(tmp_path / "source")["lm_head.weight"]
    first, second = (arrays(out / f"rank-{rank}-of-2")["lm_head.weight"] for rank in range(2))
    assert np.array_equal(first, whole[:288])
    assert np.array_equal(second[:232], whole[288:])
    assert not second[232:].any()
    assert len(second) == 288
    assert not report(out / "rank-1-of-2", tmp_path / "source").findings


def test_validation_of_all_ranks_follows_the_run(room: Path, tmp_path: Path) -> None:
    done = run_cli(
        "split",
        room / "qwen3_moe",
        tmp_path / "out",
        "--tp",
        "2",
        "--validate",
        "full",
        "--jobs",
        "1",
    )
    assert done.code == 0, done.err
    text = done.out + done.err
    assert text.count("parameters of the rank hold its rows and columns of the source") == 2
    (tmp_path / "out" / "rank-0-of-4").mkdir()
    done = run_cli("split", room / "qwen3_moe", tmp_path / "out", "--tp", "2")
    assert done.code == 1
    assert "holds rank-0-of-4, which is not part of this split" in done.err


def test_what_a_program_reads(room: Path, tmp_path: Path) -> None:
    words = ("split", room / "qwen3_moe", tmp_path / "out", "--tp", "2", "--json")
    assert len(json.loads(run_cli(*words, "--dry-run").out)) == 2
    assert not (tmp_path / "out").exists()
    found = json.loads(run_cli(*words, "--jobs", "1").out)
    assert found["folders"] == [str(tmp_path / "out" / f"rank-{rank}-of-2") for rank in range(2)]
    assert "--load-format sharded_state" in found["serve"]


# --- Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tp", "1"], "expected 2 ranks or more"),
        (["--tp", "3"], "cannot be divided among 3 ranks"),
        (["--tp", "2", "--pp", "2"], "by one of"),
        (["--pp", "2", "--for", "vllm", "--ep", "2"], "--ep is of ranks"),
        (["--tp", "4", "--ep", "2"], "expected 2 ranks or more, and --ep 1 or 4"),
        (["--tp", "2", "--for", "sglang"], "ranks are cut for vLLM alone"),
        (["--tp", "2", "--for", "vllm==0.32.0"], "ranks are cut as the loader of vLLM 0.33"),
        (["--tp", "2", "--balance"], "ranks are cut for vLLM alone"),
        (["--tp", "2", "--copy"], "ranks are cut for vLLM alone"),
        ([], "by one of"),
    ],
)
def test_words_that_are_refused(room: Path, tmp_path: Path, words: list[str], why: str) -> None:
    done = run_cli("split", room / "qwen3_moe", tmp_path / "out", *words)
    assert done.code != 0
    assert why in done.err
    assert not (tmp_path / "out").exists()


def test_sources_that_are_refused(room: Path, tmp_path: Path) -> None:
    int4 = tmp_path / "int4"
    published("qwen3_moe").write(tmp_path / "bf16")
    assert run_cli("w4a16", tmp_path / "bf16", int4, "--rtn", "--jobs", "1").code == 0
    done = run_cli("split", int4, tmp_path / "out", "--tp", "2")
    assert "compressed-tensors: which was not compared with its loader" in done.err
    other = copied(room / "qwen3_moe", tmp_path / "other")
    edit_json(other / "config.json", lambda c: c.update(architectures=["OlmoeForCausalLM"]))
    done = run_cli("split", other, tmp_path / "out", "--tp", "2")
    assert "OlmoeForCausalLM: its sharded state was not compared with vLLM's loader" in done.err
    cut = split(room / "qwen3_moe", tmp_path / "cut", "--tp", "2")
    done = run_cli("join", cut, tmp_path / "out")
    assert done.code == 1
    assert "holds ranks that were cut for vLLM" in done.err
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_missing(room: Path, tmp_path: Path) -> None:
    broken = copied(room / "qwen3_moe", tmp_path / "broken")
    held = read_tensors(broken)
    for end in ("weight", "weight_scale_inv"):
        del held[f"{LAYER}.self_attn.k_proj.{end}"]
    for file in broken.glob("*.safetensors*"):
        file.unlink()
    write_shard(broken / "model.safetensors", held)
    done = run_cli("split", broken, tmp_path / "out", "--tp", "2")
    assert done.code == 1
    assert "qkv_proj.weight': expected rows from" in done.err


def test_a_recipe_in_the_same_read(room: Path, tmp_path: Path) -> None:
    out = split(room / "qwen3_moe", tmp_path / "out", "--tp", "2", "--recipe", "dequant-fp8")
    held = read_tensors(out / "rank-1-of-2")
    assert held[f"{LAYER}.self_attn.o_proj.weight"].dtype == "BF16"
    assert not [name for name in held if name.endswith("weight_scale_inv")]


# --- What validation finds -----------------------------------------------------------------------


def report(out: Path, against: Path) -> Any:
    return validate_folder(out, str(against), request=Request("full", jobs=1))


def test_what_is_proved(room: Path, ranks: Path) -> None:
    for rank in range(2):
        found = report(ranks / f"rank-{rank}-of-2", room / "qwen3_moe")
        assert not found.findings
        assert "parameters of the rank hold its rows and columns of the source" in found.proved
        assert any("folders of all ranks together" in line for line in found.not_checked)


def _changed(out: Path, name: str, change: Any) -> None:
    held = read_tensors(out)
    values = np.frombuffer(held[name].data, WIDTH[held[name].dtype]).reshape(held[name].shape)
    made = np.ascontiguousarray(change(values))
    held[name] = Tensor(held[name].dtype, made.shape, made.tobytes())
    write_shard(out / "model.safetensors", held)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("self_attn.qkv_proj.weight", lambda v: np.roll(v, 128, axis=0)),
        ("self_attn.qkv_proj.weight_scale_inv", lambda v: np.roll(v, 1, axis=0)),
        ("self_attn.o_proj.weight", lambda v: np.roll(v, 1, axis=1)),
        ("mlp.experts.routed_experts.w13_weight", lambda v: v[::-1]),
        ("mlp.experts.routed_experts.w13_weight", lambda v: np.roll(v, v.shape[1] // 2, axis=1)),
        ("mlp.experts.routed_experts.w2_weight", lambda v: v[..., ::-1]),
        ("input_layernorm.weight", lambda v: v[::-1]),
    ],
)
def test_parts_in_other_places_are_found(
    room: Path, ranks: Path, tmp_path: Path, name: str, change: Any
) -> None:
    out = copied(ranks / "rank-1-of-2", tmp_path / "out")
    _changed(out, f"{LAYER}.{name}", change)
    found: list[Finding] = report(out, room / "qwen3_moe").findings
    assert ("QC060", f"{LAYER}.{name}") in {(one.rule, one.where) for one in found}


def test_the_rank_that_is_stated_is_compared(room: Path, ranks: Path, tmp_path: Path) -> None:
    out = copied(ranks / "rank-1-of-2", tmp_path / "out")
    edit_json(out / "qconvert.json", lambda found: found["rank"].update(number=0))
    found = report(out, room / "qwen3_moe").findings
    assert ("QC060", "lm_head.weight") in {(one.rule, one.where) for one in found}
