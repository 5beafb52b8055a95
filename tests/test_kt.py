"""`qconvert kt`: a CPU and a GPU folder from one read, what their bytes and configs are, what the
command says. What is refused: test_kt_refused.py; interrupted
pairs: test_kt_resume.py; killed and powerless ones: crash/.

The oracles: `qconvert amx` for the CPU side, `w4a16` (proved in test_w4a16.py) for the GPU side.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from checkpoints import ran, read_tensors, run_cli, tree, watched_reads
from kt_pair import Made, kt, quantization, shards
from models import (
    FP8_BLOCK,
    MODELS,
    SIDE_FILES,
    deepseek_v3,
    qwen3_moe,
)


@pytest.fixture(scope="module", params=sorted(MODELS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param]()
    source = model.write(folder / "source")
    cpu, gpu = folder / "cpu", folder / "gpu"
    said = kt(source, cpu, gpu)
    assert said.code == 0, said.err
    return Made(request.param, model, source, cpu, gpu, said)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bf16 source, for what does not depend on how weights are stored."""
    return qwen3_moe(layers=1).write(tmp_path_factory.mktemp("plain") / "source")


# --- the bytes --------------------------------------------------------------------------------


def test_the_cpu_folder_is_what_amx_makes(made: Made, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    ran(
        "amx", made.source, alone, "--method", "int4", "--numa", "2", "--jobs", "1"
    )  # fmt: skip
    assert shards(made.cpu) == shards(alone) != {}


@pytest.mark.parametrize("mtp", ["keep", "drop"])
def test_draft_experts_go_to_both_folders_or_neither(mtp: str, tmp_path: Path) -> None:
    source = deepseek_v3().write(tmp_path / "source")
    assert kt(source, tmp_path / "cpu", tmp_path / "gpu", "--mtp", mtp).code == 0
    ran("amx", source, tmp_path / "alone", "--method", "int4", "--numa", "2", "--mtp", mtp)
    assert shards(tmp_path / "cpu") == shards(tmp_path / "alone")
    kept = mtp == "keep"
    assert any(name.startswith("blk.2.") for name in read_tensors(tmp_path / "cpu")) is kept
    gpu = read_tensors(tmp_path / "gpu")
    assert any(name.startswith("model.layers.2.") for name in gpu) is kept
    ignored = quantization(tmp_path / "gpu")["ignore"]
    assert any(name.startswith("model.layers.2.") for name in ignored) is kept


def test_the_source_is_read_once(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = watched_reads(monkeypatch)
    assert kt(made.source, tmp_path / "cpu", tmp_path / "gpu").code == 0
    assert sum(reads) == sum(len(value.data) for value in made.model.tensors.values())
    reads.clear()
    assert kt(made.source, tmp_path / "cpu alone", None).code == 0
    assert sum(reads) == sum(
        len(value.data) for name, value in made.model.tensors.items() if ".mlp.experts." in name
    )


def test_workers_make_the_same_pair(tmp_path: Path) -> None:
    source = qwen3_moe("fp8").write(tmp_path / "source", shards=3)
    for jobs in (1, 2):
        cpu, gpu = tmp_path / f"cpu{jobs}", tmp_path / f"gpu{jobs}"
        done = kt(source, cpu, gpu, "--max-shard-size", "100KB", jobs=jobs)
        assert done.code == 0, done.err
    assert tree(tmp_path / "cpu1") == tree(tmp_path / "cpu2")
    assert tree(tmp_path / "gpu1") == tree(tmp_path / "gpu2")
    assert len(shards(tmp_path / "cpu1")) > 1


# --- the configs ------------------------------------------------------------------------------


def test_the_gpu_folder_is_what_the_pass_alone_makes(made: Made, tmp_path: Path) -> None:
    recipe, out = tmp_path / "w4a16.yaml", tmp_path / "out"
    recipe.write_text("passes: [w4a16]\n")
    ran("run", recipe, made.source, out, "--jobs", "1")
    assert shards(out) == shards(made.gpu)
    assert (out / "config.json").read_bytes() == (made.gpu / "config.json").read_bytes()


def test_every_bf16_matrix_is_ignored_and_nothing_quantized_is(made: Made) -> None:
    ignored = quantization(made.gpu)["ignore"]
    matrices = {
        name.removesuffix(".weight"): value.dtype
        for name, value in made.model.tensors.items()
        if name.endswith(".weight") and len(value.shape) == 2 and ".mlp.experts." not in name
    }
    plain = {module for module, dtype in matrices.items() if dtype == "BF16"}
    if made.kind == "deepseek":  # its draft layer is FP8 in part, so that a pattern would not do
        at = "model.layers.2."
        plain |= {f"model.decoder.{m.removeprefix(at)}" for m in plain if m.startswith(at)}
    assert {name for name in ignored if not name.startswith("re:")} == plain
    patterns = [re.compile(name.removeprefix("re:")) for name in ignored if name.startswith("re:")]
    assert patterns == []


def test_the_rest_of_the_config_stays(made: Made) -> None:
    kept = {k: v for k, v in made.model.config.items() if k != "quantization_config"}
    assert made.config("cpu") == kept
    gpu = made.config("gpu")
    del gpu["quantization_config"]
    assert gpu == kept


def test_no_old_quantization_block_is_left(tmp_path: Path) -> None:
    """Of a multi-modal config's nested blocks either, under any of their names."""
    model = qwen3_moe("fp8", layers=1)
    text = {key: value for key, value in model.config.items() if key != "model_type"}
    model.config = {
        "model_type": "qwen3_moe",
        **text,
        "text_config": {**text, "model_type": "qwen3_moe", "compression_config": FP8_BLOCK},
    }
    source = model.write(tmp_path / "source")
    done = kt(source, tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 0, done.err
    cpu = (tmp_path / "cpu" / "config.json").read_text()
    assert "quantization_config" not in cpu
    assert "compression_config" not in cpu
    gpu = json.loads((tmp_path / "gpu" / "config.json").read_bytes())
    assert gpu["quantization_config"]["quant_method"] == "compressed-tensors"
    assert not {"quantization_config", "compression_config"} & set(gpu["text_config"])


# --- ids, files and places --------------------------------------------------------------------


def pair_of(folder: Path) -> dict[str, str]:
    manifest = json.loads((folder / "qconvert.json").read_bytes())
    found: dict[str, str] = manifest["pair"]
    return found


def test_another_pair_has_another_id(plain: Path, tmp_path: Path) -> None:
    """Weights of one must not be served with the other's folder, even where their bytes agree. The CPU
    folder is what `amx` makes with these options."""
    ids = []
    for number, (numa, method, more) in enumerate([
        (1, "int4", ()), (2, "int4", ()), (2, "int8", ()), (2, "int4", ("--rounding", "search")),
    ]):  # fmt: skip
        cpu, gpu = tmp_path / f"cpu{number}", tmp_path / f"gpu{number}"
        assert kt(plain, cpu, gpu, *more, method=method, numa=numa).code == 0
        found = pair_of(cpu)["id"]
        assert pair_of(cpu) == {"id": found, "side": "cpu"}
        assert pair_of(gpu) == {"id": found, "side": "gpu"}
        ids.append(found)
        alone = tmp_path / f"alone{number}"
        words = ("--method", method, "--numa", str(numa), *more, "--jobs", "1")
        assert run_cli("amx", plain, alone, *words).code == 0
        assert shards(cpu) == shards(alone)
    assert len(set(ids)) == len(ids)


def test_halves_of_different_pairs_are_refused(made: Made, tmp_path: Path) -> None:
    """Served together are the halves of one pair, or a CPU folder and the repo it was made from."""
    for gpu in (made.gpu, made.source):
        right = ran("validate", made.cpu, "--pair", gpu)
        assert "this folder and its GPU side belong together" in right.out
    other_cpu, other_gpu = tmp_path / "cpu", tmp_path / "gpu"
    other = kt(made.source, other_cpu, other_gpu, "--rounding", "search")
    assert other.code == 0, other.err
    for cpu, gpu in ((made.cpu, other_gpu), (other_cpu, made.gpu), (made.cpu, other_cpu)):
        wrong = run_cli("validate", cpu, "--pair", gpu, "--json")
        assert wrong.code == 3
        rules = [finding["rule"] for finding in json.loads(wrong.out)["findings"]]
        assert rules == ["QC050"]


def test_the_same_pair_elsewhere_is_the_same_to_the_byte(made: Made, tmp_path: Path) -> None:
    """Another day, another machine: other folders, and files of another age."""
    moved = tmp_path / "other place" / "named otherwise"
    shutil.copytree(made.source, moved)
    for file in moved.iterdir():
        os.utime(file, ns=(1, 1))
    cpu, gpu = tmp_path / "a" / "b", tmp_path / "c"
    assert kt(moved, cpu, gpu).code == 0
    assert tree(cpu) == tree(made.cpu)
    assert tree(gpu) == tree(made.gpu)
    for folder in (cpu, gpu):
        for file in folder.iterdir():
            if file.suffix != ".safetensors":
                assert str(tmp_path) not in file.read_text()
                assert str(made.source.parent) not in file.read_text()


def test_a_readme_in_the_cpu_folder_says_how_to_serve_it(made: Made) -> None:
    text = (made.cpu / "README.md").read_text()
    for said in ("--kt-method AMXINT4", "--kt-threadpool-count 2", "--kt-weight-path CPU"):
        assert said in text
    assert "the folder made together with this one" in text
    layers = sorted({int(name.split(".")[2]) for name in made.experts})
    assert f"layers {layers[0]} to {layers[-1]}" in text


def test_what_becomes_of_side_files_is_said(made: Made) -> None:
    cpu, gpu = (
        json.loads((folder / "qconvert.json").read_bytes())["dropped_files"]
        for folder in (made.cpu, made.gpu)
    )
    stale = {"hf_quant_config.json"} if made.kind == "fp8" else set()
    assert cpu["README.md"] == "amx: replaced by how to serve this folder"
    assert set(cpu) == {"README.md", *stale}
    assert set(gpu) == {"README.md", *stale}
    for folder in (made.cpu, made.gpu):
        assert (folder / "tokenizer.json").read_bytes() == SIDE_FILES["tokenizer.json"]
        assert not (folder / "hf_quant_config.json").exists()
    assert "the GPU side of a folder of experts" in (made.gpu / "README.md").read_text()


def test_every_dropped_tensor_has_a_rule(made: Made) -> None:
    cpu, gpu = (
        json.loads((folder / "qconvert.json").read_bytes())["dropped"]
        for folder in (made.cpu, made.gpu)
    )
    others = {name for name in made.model.tensors if ".mlp.experts." not in name}
    (rule,) = cpu
    assert rule.startswith("elsewhere: ")
    assert set(cpu[rule]) == others
    assert gpu == {}


# --- what the command says --------------------------------------------------------------------


def test_the_launch_line_is_printed(made: Made) -> None:
    line = next(text for text in made.said.out.splitlines() if text.startswith("python -m sglang"))
    assert f"--model {made.gpu} " in line
    assert f"--kt-weight-path {made.cpu} " in line
    assert "--kt-method AMXINT4 " in line
    assert "--kt-threadpool-count 2 " in line
    known = {"bf16": "BF16", "fp8": "FP8", "mixed": "FP8", "deepseek": "FP8"}[made.kind]
    assert f"as it is, without conversion: --kt-method {known} " in made.said.out


def test_without_a_gpu_folder_the_source_is_the_gpu_side(plain: Path, tmp_path: Path) -> None:
    done = kt(plain, tmp_path / "cpu", None, method="int8", numa=1)
    assert done.code == 0
    assert f"--model {plain} " in done.out
    assert "--kt-method AMXINT8 --kt-threadpool-count 1 " in done.out
    assert "the repo this was made from" in (tmp_path / "cpu" / "README.md").read_text()
    assert "pair" not in json.loads((tmp_path / "cpu" / "qconvert.json").read_bytes())


def test_a_dry_run_writes_nothing(plain: Path, tmp_path: Path) -> None:
    before = tree(plain)
    for gpu in (tmp_path / "gpu", None):
        done = kt(plain, tmp_path / "cpu", gpu, "--dry-run")
        assert done.code == 0, done.err
        assert "serve with:" in done.out
        sides = ["pass    amx: "] + (["pass    w4a16: "] if gpu else [])
        assert all(side in done.out for side in sides)
    assert os.listdir(tmp_path) == []
    assert tree(plain) == before


def test_a_dry_run_that_is_refused_says_how_to_serve_all_the_same(
    plain: Path, tmp_path: Path
) -> None:
    (tmp_path / "cpu").write_text("a file")
    done = kt(plain, tmp_path / "cpu", None, "--dry-run")
    assert done.code == 1
    assert "pass    amx: " in done.out
    assert "serve with:" in done.out


def test_json_has_an_object_a_folder(plain: Path, tmp_path: Path) -> None:
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    planned = json.loads(kt(plain, cpu, gpu, "--json", "--dry-run").out)
    assert len(planned) == 2
    assert not cpu.exists()
    done = json.loads(kt(plain, cpu, gpu, "--json").out)
    assert [entry["out"] for entry in done] == [str(cpu), str(gpu)]
    for entry, folder in zip(done, (cpu, gpu), strict=True):
        assert set(entry["files"]) == set(tree(folder))
        assert entry["already_done"] is False
        manifest = json.loads((folder / "qconvert.json").read_bytes())
        assert entry["fingerprint"] == manifest["identity"]["fingerprint"]
    again = json.loads(kt(plain, cpu, gpu, "--json").out)
    assert [entry["already_done"] for entry in again] == [True, True]
    alone = json.loads(kt(plain, tmp_path / "alone", None, "--json").out)
    assert alone["out"] == str(tmp_path / "alone")
