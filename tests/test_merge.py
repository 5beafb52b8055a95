"""merge: adapters become a part of the weights. What is computed is held to float64 here, and to peft in
test_merge_peer.py; wrong lines of it are found (test_mutants.py)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import f32, lora, of_experts, write
from checkpoints import Tensor, edit_json, ran, read_tensors, refused, run_cli, write_shard
from loaders.published import published
from made_once import made_once
from models import qwen3_moe

from qconvert import api
from qconvert.passes.experts import Stack, Unstack
from qconvert.passes.merge import Merge

QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def base() -> Path:
    return made_once(
        "merge/base", lambda at: published("qwen3_moe", experts=2, inner=128).write(at)
    )


def numbers(folder: Path, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A BF16 or F32 tensor."""
    found = read_tensors(folder)[name]
    data = np.frombuffer(found.data, "<u2" if found.dtype == "BF16" else "<f4")
    wide = data.astype("<u4") << 16 if found.dtype == "BF16" else data
    return wide.view("<f4").astype(np.float64).reshape(found.shape)


def merged(base: Path, out: Path, *adapters: Path, **options: Any) -> Path:
    return api.run(Merge(tuple(map(str, adapters)), **options), base, out, jobs=1).folder


def test_only_what_an_adapter_names_changes(base: Path, tmp_path: Path) -> None:
    adapter = lora(base, tmp_path / "adapter", rf"{QUERY}|.*layers.1.*down_proj")
    done = ran("merge", base, adapter, tmp_path / "out", "--scale", "0.5", "--jobs", "1")
    before, after = read_tensors(base), read_tensors(tmp_path / "out")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"{QUERY}.weight"} | {n for n in before if "1.mlp" in n and "down_proj" in n}
    at = f"base_model.model.{QUERY}.lora_"
    a, b = (numbers(adapter, f"{at}{one}.weight") for one in "AB")
    exact = numbers(base, f"{QUERY}.weight") + 0.5 * 6 / 4 * b @ a
    off = np.abs(numbers(tmp_path / "out", f"{QUERY}.weight") - exact)
    assert (off <= 2.0**-8 * np.exp2(np.floor(np.log2(np.abs(exact)))) + 1e-7).all()
    assert f"--adapter {adapter}" in done.err
    sent = ("upload", tmp_path / "out", "me/model", "--dry-run", "--level", "headers")
    against = (*sent, "--against", base)
    assert "QC031" in run_cli(*against).err
    assert "--adapter ADAPTER" in (tmp_path / "out" / "README.md").read_text()
    assert "0 errors" in ran(*against, "--adapter", adapter).out
    assert run_cli(*sent, "--adapter", adapter).code == 2
    manifest = json.loads((tmp_path / "out" / "qconvert.json").read_text())
    (record,) = manifest["merge"]
    assert (record["name"], record["scale"], len(record["digest"])) == ("adapter", 0.5, 64)
    assert manifest["passes"][0]["options"]["adapters"] == [record]
    sources = (tmp_path / "out" / "qconvert.receipt.jsonl").read_text()
    assert f'"adapter-0/{at}A.weight"' in sources


def test_parts_of_any_size_make_the_same(base: Path, tmp_path: Path) -> None:
    adapter = lora(base, tmp_path / "adapter", use_dora=True)
    whole = read_tensors(merged(base, tmp_path / "one", adapter))
    small = api.run(Merge((str(adapter),)), base, tmp_path / "two", jobs=1, memory="64MiB").folder
    assert read_tensors(small) == whole


def test_a_delta_and_tensors_in_place_of_others(base: Path, tmp_path: Path) -> None:
    norm = "model.norm.weight"
    plain = write(tmp_path / "delta", {norm: np.ones_like(numbers(base, norm))})
    own = np.full_like(numbers(base, norm), 0.75)
    saved = write(tmp_path / "saved", {f"base_model.model.{norm}": own}, r=4)
    out = merged(base, tmp_path / "out", plain, scale=(0.5,))
    assert np.allclose(numbers(out, norm), numbers(base, norm) + 0.5, rtol=2.0**-8)
    out = merged(base, tmp_path / "other", saved)
    assert np.array_equal(numbers(out, norm), own)
    dropped = json.loads((out / "qconvert.json").read_text())["dropped"]
    assert dropped == {"merge: replaced by the adapter's own tensor": [norm]}
    for folder, adapter in ((tmp_path / "out", plain), (out, saved)):
        report = api.validate(folder, base, adapter=[str(adapter)], level="full", jobs=1)
        assert report.findings == []


def _edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path, Path], Path]:
    def make(base: Path, at: Path) -> Path:
        adapter = lora(base, at)
        edit_json(adapter / "adapter_config.json", change)
        return adapter

    return make


def _of_other_sizes(base: Path, at: Path) -> Path:
    made = {f"base_model.model.{QUERY}.lora_A.weight": np.ones((4, 24)),
            f"base_model.model.{QUERY}.lora_B.weight": np.ones((256, 4))}  # fmt: skip
    return write(at, made, r=4)


REFUSED: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "another method": (
        _edited(lambda c: c.update(peft_type="IA3")), "expected peft_type LORA, found 'IA3'"
    ),
    "a changed base": (_edited(lambda c: c.update(init_lora_weights="pissa")), "path_initial_model"),
    "arithmetic of its own": (_edited(lambda c: c.update(use_qalora=True)), "use_qalora is set"),
    "another rank": (_edited(lambda c: c.update(r=3)), "expected rank 3 of adapter_config.json"),
    "no such module": (
        lambda base, at: write(
            at, {f"base_model.model.layers.9.q_proj.lora_{x}.weight": np.ones((4, 4)) for x in "AB"}, r=4
        ),
        "is for 'layers.9.q_proj', which",
    ),
    "other sizes": (
        _of_other_sizes, "found F32 [4, 24] and F32 [256, 4]; the adapter is of another base"
    ),
    "a rank that is none": (
        _edited(lambda c: c.update(r="four")), "expected r to be a rank, found 'four'"
    ),
    "a broken pattern": (
        _edited(lambda c: c.update(rank_pattern={"(": 4})), "rank_pattern to be ranks by pattern"
    ),
    "no matrix": (
        lambda base, at: write(
            at, {f"base_model.model.{QUERY}.lora_{x}.weight": np.ones(4) for x in "AB"}, r=4
        ),
        "expected A and B to be matrices",
    ),
    "half of a pair": (
        lambda base, at: write(
            at, {f"base_model.model.{QUERY}.lora_A.weight": np.ones((4, 256))}, r=4
        ),
        f"{QUERY}.lora_B is missing",
    ),
    "a bias where the base has none": (
        lambda base, at: write(
            at, {
                f"base_model.model.{QUERY}.lora_A.weight": np.ones((4, 256)),
                f"base_model.model.{QUERY}.lora_B.weight": np.ones((256, 4)),
                f"base_model.model.{QUERY}.lora_B.bias": np.ones(256),
            }, r=4, lora_bias=True,
        ),
        "has not: serve the adapter beside the model, or train it without one (lora_bias)",
    ),
    "no tensor of LoRA": (
        lambda base, at: write(at, {f"base_model.model.{QUERY}.hada_w1": np.ones((4, 4))}, r=4),
        "is no part of a LoRA adapter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, base: Path, tmp_path: Path) -> None:
    make, said = REFUSED[what]
    assert said in refused("merge", base, make(base, tmp_path / "adapter"), tmp_path / "out")


def _with(base: Path, at: Path, tensors: dict[str, Tensor]) -> Path:
    """The same folder with other tensors."""
    shutil.copytree(base, at, ignore=shutil.ignore_patterns("*.safetensors*"))
    write_shard(at / "model.safetensors", tensors)
    return at


def test_a_sum_beyond_the_bases_dtype(base: Path, tmp_path: Path) -> None:
    """F16 ends at 65504: the words say what may be less, a dtype may not be chosen."""
    parts = read_tensors(base)
    numbers_of = np.frombuffer(parts[f"{QUERY}.weight"].data, np.uint16).astype(np.uint32) << 16
    data = numbers_of.view(np.float32).astype(np.float16).tobytes()
    parts[f"{QUERY}.weight"] = Tensor("F16", parts[f"{QUERY}.weight"].shape, data)
    half = _with(base, tmp_path / "half", parts)
    made = {f"base_model.model.{QUERY}.lora_A.weight": np.full((4, 256), 1e3),
            f"base_model.model.{QUERY}.lora_B.weight": np.full((512, 4), 1e3)}  # fmt: skip
    said = refused("merge", half, write(tmp_path / "adapter", made, r=4), tmp_path / "out")
    assert (
        "beyond F16 (65504 at most); it is the sum with an adapter: give a smaller --scale" in said
    )


def test_a_head_of_its_own_beside_tied_embeddings(base: Path, tmp_path: Path) -> None:
    parts = read_tensors(base)
    head = parts.pop("lm_head.weight")
    tied = _with(base, tmp_path / "tied", parts)
    edit_json(tied / "config.json", lambda c: c.update(tie_word_embeddings=True))
    made = {"base_model.model.lm_head.weight": np.ones(head.shape)}
    said = refused("merge", tied, write(tmp_path / "adapter", made, r=4), tmp_path / "out")
    assert "store the head apart first (a copy of the embeddings as 'lm_head.weight'" in said


def test_another_adapter_than_was_merged_is_told(base: Path, tmp_path: Path) -> None:
    one = lora(base, tmp_path / "one")
    other = lora(base, tmp_path / "other", lora_alpha=7)
    out = merged(base, tmp_path / "out", one)
    report = api.validate(out, base, adapter=[str(other)], jobs=1)
    assert [f.rule for f in report.findings] == ["QC031"]
    (finding,) = api.validate(out, base, jobs=1).findings
    assert "--adapter ADAPTER" in finding.message


def test_a_head_in_place_of_a_quantized_one(base: Path, tmp_path: Path) -> None:
    """Rounded to BF16, and quantized as the one before."""
    quantized = tmp_path / "fp8"
    ran("fp8", base, quantized, "--jobs", "1")
    own = np.random.default_rng(3).normal(0, 0.5, numbers(base, f"{QUERY}.weight").shape)
    saved = write(tmp_path / "saved", {f"base_model.model.{QUERY}.weight": own}, r=4)
    out = merged(quantized, tmp_path / "out", saved)
    assert read_tensors(out)[f"{QUERY}.weight"].dtype == "F8_E4M3"
    report = api.validate(out, quantized, adapter=[str(saved)], level="full", jobs=1)
    assert report.findings == []
    off = next(m for m in report.measures if m.tensor == f"{QUERY}.weight")
    assert 0.01 < off.rms < 0.04


def test_a_matrix_no_larger_than_a_block_keeps_its_scale_of_a_block(tmp_path: Path) -> None:
    """One scale is no sign of a scheme with one for each matrix: the config tells."""
    quantized = qwen3_moe("fp8").write(tmp_path / "fp8")
    adapter = lora(quantized, tmp_path / "adapter", r".*k_proj")
    out = merged(quantized, tmp_path / "out", adapter)
    before, after = read_tensors(quantized), read_tensors(out)
    changed = {f"model.layers.{n}.self_attn.k_proj.weight" for n in range(2)}
    scales = {f"{name}_scale_inv" for name in changed}
    assert {name for name in before if after[name] != before[name]} == changed | scales
    assert {(after[name].dtype, after[name].shape) for name in scales} == {("F32", (1, 1))}
    report = api.validate(out, quantized, adapter=[str(adapter)], level="full", jobs=1)
    assert report.findings == []


def test_biases_of_an_adapter(tmp_path: Path) -> None:
    """peft's `bias="all"` names a trained bias by its wrapped layer; `lora_bias` adds B's, times the
    factor, to it. Both are rounded once."""
    base = published("glm4_moe", experts=2, inner=128).write(tmp_path / "base")
    adapter = lora(base, tmp_path / "adapter", re.escape(QUERY), lora_bias=True, bias="all")
    random, at = np.random.default_rng(5), f"base_model.model.{QUERY}"
    trained, added = random.normal(0, 1, (2, *numbers(base, f"{QUERY}.bias").shape))
    parts = read_tensors(adapter) | {
        f"{at}.base_layer.bias": f32(trained), f"{at}.lora_B.bias": f32(added),
    }  # fmt: skip
    write_shard(adapter / "adapter_model.safetensors", parts)
    out = merged(base, tmp_path / "out", adapter)
    exact = trained + 6 / 4 * added
    off = np.abs(numbers(out, f"{QUERY}.bias") - exact)
    assert (off <= 2.0**-9 * np.exp2(np.ceil(np.log2(np.abs(exact)))) + 1e-6).all()
    report = api.validate(out, base, adapter=[str(adapter)], level="full", jobs=1)
    assert report.findings == []


def test_experts_that_share_a_factor(base: Path, tmp_path: Path) -> None:
    """A of all experts, and a B for each: stacks of matrices."""
    random, at = np.random.default_rng(4), "model.layers.0.mlp.experts"
    shape = read_tensors(base)[f"{at}.0.down_proj.weight"].shape
    a, b = random.normal(0, 0.2, (1, 4, shape[1])), random.normal(0, 0.2, (2, shape[0], 4))
    made = {f"base_model.model.{at}.lora_A.weight": a, f"base_model.model.{at}.lora_B.weight": b}
    adapter = write(tmp_path / "adapter", made, target_parameters=["mlp.experts.down_proj"])
    out = merged(base, tmp_path / "out", adapter)
    for expert in range(2):
        name = f"{at}.{expert}.down_proj.weight"
        exact = numbers(base, name) + 1.5 * b[expert] @ a[0]
        assert np.abs(numbers(out, name) - exact).max() < 2.0**-8 * np.abs(exact).max()
    report = api.validate(out, base, adapter=[str(adapter)], level="full", jobs=1)
    assert report.findings == []


def test_a_recipe_is_the_same(base: Path, tmp_path: Path) -> None:
    adapter = lora(base, tmp_path / "adapter")
    told = ran("merge", base, adapter, "out", "--scale", "2", "--print-recipe")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(told.out)
    ran("run", recipe, base, tmp_path / "one", "--jobs", "1")
    two = merged(base, tmp_path / "two", adapter, scale=(2.0,))
    assert read_tensors(tmp_path / "one") == read_tensors(two)


def test_quantized_stacks_are_merged_as_matrices_are(tmp_path: Path) -> None:
    """Blocks of FP8 in [E, 2I, H], each expert with factors of its own."""
    apart = published("qwen3_moe", fp8=True, experts=4, inner=128).write(tmp_path / "apart")
    stacked = api.run(Stack(), apart, tmp_path / "stacked", jobs=1).folder
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    adapter = of_experts(apart, tmp_path / "adapter", parameters=parts)
    both = [merged(one, tmp_path / f"merged {one.name}", adapter) for one in (apart, stacked)]
    again = api.run(Unstack(), both[1], tmp_path / "again", jobs=1).folder
    assert api.diff(again, both[0]) == []
    report = api.validate(both[1], stacked, adapter=(str(adapter),), level="full", jobs=1)
    assert (report.errors, report.warnings) == (0, 0)
