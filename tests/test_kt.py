"""`qconvert kt`: a CPU and a GPU folder from one read, what their bytes and configs are, what is
refused, and that an interrupted pair goes on. Killed and powerless pairs: test_kt_crash.py.

The oracles: torch's own casts for decoding, `qconvert amx` for the CPU side, the packing op (proved in
test_int4.py) for the GPU side.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import amx_rows
import faults
import pytest
from checkpoints import Model, Result, Tensor, published, read_tensors, run_cli, tree, watched_reads
from int_forms import rtn
from ops_harness import buffer, run_op

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.progress import Bar
from qconvert.core.dtypes import TensorType
from qconvert.runtimes.ktransformers import reads_as_it_is

HIDDEN, INTERMEDIATE, EXPERTS, GROUP, BLOCK = 128, 256, 2, 128, 128
FP8_BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
SIDE_FILES = {
    "tokenizer.json": b'{"version": "1.0"}\n',
    "README.md": b"# The model's own page\n",
}

# --- checkpoints ------------------------------------------------------------------------------


def bf16(name: str, *shape: int) -> dict[str, Tensor]:
    """A bf16 tensor with rows of every awkward kind, or ordinary ones where there is but one row."""
    columns = shape[-1]
    rows = max(1, len(shape) > 1 and shape[0])
    bits = amx_rows.matrix(rows, columns, zlib.crc32(name.encode()))
    return {name: Tensor("BF16", shape, bits.tobytes())}


def fp8(module: str, rows: int, columns: int) -> dict[str, Tensor]:
    made = faults.weight(f"{module}.weight", (rows, columns), zlib.crc32(module.encode()))
    return {name: Tensor(kind.dtype, kind.shape, data) for name, (kind, data) in made.items()}


def linear(module: str, rows: int, columns: int, form: str) -> dict[str, Tensor]:
    return fp8(module, rows, columns) if form == "fp8" else bf16(f"{module}.weight", rows, columns)


def mlp(at: str, hidden: int, intermediate: int, form: str) -> dict[str, Tensor]:
    return {
        **linear(f"{at}.gate_proj", intermediate, hidden, form),
        **linear(f"{at}.up_proj", intermediate, hidden, form),
        **linear(f"{at}.down_proj", hidden, intermediate, form),
    }


def qwen3_moe(
    form: str = "bf16",
    *,
    bf16_modules: tuple[str, ...] = (),
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    layers: int = 2,
    experts: int = EXPERTS,
) -> Model:
    """Every linear layer in bf16 or in block FP8, but for those whose names end as said."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "moe_intermediate_size": intermediate,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    }
    if form == "fp8":
        config["quantization_config"] = FP8_BLOCK
    tensors = bf16("model.embed_tokens.weight", 8, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= bf16(f"{at}.{norm}.weight", hidden)
        for name, rows in (("q_proj", hidden), ("k_proj", 64), ("v_proj", 64), ("o_proj", hidden)):
            module = f"{at}.self_attn.{name}"
            kept = module.endswith(bf16_modules) if bf16_modules else False
            tensors |= linear(module, rows, hidden, "bf16" if kept else form)
        for name in ("q_norm", "k_norm"):
            tensors |= bf16(f"{at}.self_attn.{name}.weight", 32)
        tensors |= bf16(f"{at}.mlp.gate.weight", experts, hidden)
        for expert in range(experts):
            tensors |= mlp(f"{at}.mlp.experts.{expert}", hidden, intermediate, form)
    tensors |= bf16("model.norm.weight", hidden)
    tensors |= bf16("lm_head.weight", 8, hidden)
    return Model(config, tensors, dict(SIDE_FILES))


def deepseek_v3() -> Model:
    """A dense layer, a layer with experts, a draft layer; every linear layer FP8, as published."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "quantization_config": FP8_BLOCK,
    }
    tensors = bf16("model.embed_tokens.weight", 8, HIDDEN)
    for layer in range(3):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= bf16(f"{at}.{norm}.weight", HIDDEN)
        attn = f"{at}.self_attn"
        tensors |= bf16(f"{attn}.q_a_layernorm.weight", 64)
        tensors |= bf16(f"{attn}.kv_a_layernorm.weight", 32)
        tensors |= fp8(f"{attn}.q_a_proj", 64, HIDDEN) | fp8(f"{attn}.q_b_proj", HIDDEN, 64)
        tensors |= fp8(f"{attn}.kv_a_proj_with_mqa", 48, HIDDEN)
        tensors |= fp8(f"{attn}.kv_b_proj", 192, 32) | fp8(f"{attn}.o_proj", HIDDEN, HIDDEN)
        if layer == 0:
            tensors |= mlp(f"{at}.mlp", HIDDEN, INTERMEDIATE, "fp8")
            continue
        tensors |= bf16(f"{at}.mlp.gate.weight", EXPERTS, HIDDEN)
        bias = f"{at}.mlp.gate.e_score_correction_bias"
        tensors[bias] = Tensor("F32", (EXPERTS,), bytes(4 * EXPERTS))
        tensors |= mlp(f"{at}.mlp.shared_experts", HIDDEN, INTERMEDIATE, "fp8")
        for expert in range(EXPERTS):
            tensors |= mlp(f"{at}.mlp.experts.{expert}", HIDDEN, INTERMEDIATE, "fp8")
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors |= bf16(f"model.layers.2.{name}.weight", HIDDEN)
    tensors |= bf16("model.layers.2.embed_tokens.weight", 8, HIDDEN)
    tensors |= bf16("model.layers.2.eh_proj.weight", HIDDEN, 2 * HIDDEN)
    tensors |= bf16("model.layers.2.shared_head.head.weight", 8, HIDDEN)
    tensors |= bf16("model.norm.weight", HIDDEN)
    tensors |= bf16("lm_head.weight", 8, HIDDEN)
    return Model(config, tensors, dict(SIDE_FILES))


def with_two_configs() -> Model:
    """Its quantization is also said in a file beside config.json, as ModelOpt does it."""
    model = qwen3_moe("fp8")
    block = {"quant_algo": "FP8", "weight_block_size": [BLOCK, BLOCK]}
    model.side_files["hf_quant_config.json"] = json.dumps({"quantization": block}).encode()
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "bf16": qwen3_moe,
    "fp8": with_two_configs,
    "mixed": lambda: qwen3_moe("fp8", bf16_modules=("1.self_attn.o_proj",)),
    "deepseek": deepseek_v3,
}
TWO_GROUPS = "mixed"


def kt(
    source: Path,
    cpu: Path,
    gpu: Path | None,
    *more: str,
    method: str = "int4",
    numa: int = 2,
    jobs: int = 1,
) -> Result:
    """The command in this process."""
    words = ["--cpu-out", str(cpu), "--cpu", method, "--numa", str(numa), "--jobs", str(jobs)]
    if gpu is not None:
        words += ["--gpu", "w4a16", "--gpu-out", str(gpu)]
    return run_cli("kt", source, *words, *more)


@dataclass(frozen=True)
class Made:
    """A source and the pair made of it, with what the command said."""

    kind: str
    model: Model
    source: Path
    cpu: Path
    gpu: Path
    said: Result

    def config(self, side: str) -> dict[str, Any]:
        folder = self.cpu if side == "cpu" else self.gpu
        found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        return found

    @property
    def experts(self) -> list[str]:
        """Modules of the routed experts."""
        names = (name for name in self.model.tensors if ".mlp.experts." in name)
        return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]


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


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def decoded(model: Model, module: str) -> bytes:
    """A matrix as bf16 bytes: as it is, or bf16(fp32(code) * fp32(scale)) by torch."""
    dtype, shape, data = model.tensors[f"{module}.weight"]
    if dtype == "BF16":
        return data
    import torch  # here, because test_kt_crash.py forks what it imports, hundreds of times

    codes = torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn).view(shape).float()
    scale = model.tensors[f"{module}.weight_scale_inv"]
    spread = torch.frombuffer(bytearray(scale.data), dtype=torch.float32).view(scale.shape)
    for dim in (0, 1):
        spread = spread.repeat_interleave(BLOCK, dim)
    values = (codes * spread[: shape[0], : shape[1]]).bfloat16()
    return values.view(torch.uint8).numpy().tobytes()


def packed(model: Model, module: str) -> dict[str, Tensor]:
    """What a module's weight becomes in the GPU folder."""
    rows, columns = model.tensors[f"{module}.weight"].shape
    weight = buffer(TensorType("BF16", (rows, columns)), decoded(model, module))
    (words, scale), _ = run_op(rtn(4, GROUP), [weight])
    return {
        f"{module}.weight_packed": Tensor("I32", (rows, columns // 8), words),
        f"{module}.weight_scale": Tensor("BF16", (rows, columns // GROUP), scale),
        f"{module}.weight_shape": Tensor(
            "I64", (2,), rows.to_bytes(8, "little") + columns.to_bytes(8, "little")
        ),
    }


# --- the bytes --------------------------------------------------------------------------------


def test_the_cpu_folder_is_what_amx_makes(made: Made, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    done = run_cli(
        "amx", made.source, alone, "--method", "int4", "--numa", "2", "--jobs", "1"
    )  # fmt: skip
    assert done.code == 0, done.err
    assert shards(made.cpu) == shards(alone) != {}


@pytest.mark.parametrize("mtp", ["keep", "drop"])
def test_draft_experts_go_to_both_folders_or_neither(mtp: str, tmp_path: Path) -> None:
    source = deepseek_v3().write(tmp_path / "source")
    assert kt(source, tmp_path / "cpu", tmp_path / "gpu", "--mtp", mtp).code == 0
    alone = run_cli(
        "amx", source, tmp_path / "alone", "--method", "int4", "--numa", "2", "--mtp", mtp
    )
    assert alone.code == 0, alone.err
    assert shards(tmp_path / "cpu") == shards(tmp_path / "alone")
    kept = mtp == "keep"
    assert any(name.startswith("blk.2.") for name in read_tensors(tmp_path / "cpu")) is kept
    gpu = read_tensors(tmp_path / "gpu")
    assert any(name.startswith("model.layers.2.") for name in gpu) is kept
    ignored = quantization(tmp_path / "gpu")["ignore"]
    assert any(name.startswith("model.layers.2.") for name in ignored) is kept


def test_the_gpu_folder_holds_packed_experts_and_all_else_as_it_was(made: Made) -> None:
    experts = made.experts
    assert len(experts) == 2 * EXPERTS * 3
    wanted: dict[str, Tensor] = {}
    for module in experts:
        wanted |= packed(made.model, module)
    for name, value in made.model.tensors.items():
        if ".mlp.experts." in name:
            continue
        renamed = name.removesuffix("_inv") if made.kind == TWO_GROUPS else name
        wanted[renamed] = value
    found = read_tensors(made.gpu)
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []


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


@pytest.mark.parametrize("size", ["100KB", "5GB"])
def test_workers_make_the_same_pair(size: str, tmp_path: Path) -> None:
    source = qwen3_moe("fp8").write(tmp_path / "source", shards=3)
    for jobs in (1, 2):
        cpu, gpu = tmp_path / f"cpu{jobs}", tmp_path / f"gpu{jobs}"
        done = kt(source, cpu, gpu, "--max-shard-size", size, jobs=jobs)
        assert done.code == 0, done.err
    assert tree(tmp_path / "cpu1") == tree(tmp_path / "cpu2")
    assert tree(tmp_path / "gpu1") == tree(tmp_path / "gpu2")
    assert (len(shards(tmp_path / "cpu1")) > 1) is (size == "100KB")


@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("rounding", ["peer", "search"])
def test_every_method_and_rounding_pairs(method: str, rounding: str, tmp_path: Path) -> None:
    source = qwen3_moe("fp8", layers=1).write(tmp_path / "source")
    cpu, gpu, alone = (tmp_path / name for name in ("cpu", "gpu", "alone"))
    assert kt(source, cpu, gpu, "--rounding", rounding, method=method).code == 0
    words = ["--method", method, "--numa", "2", "--rounding", rounding, "--jobs", "1"]
    assert run_cli("amx", source, alone, *words).code == 0
    assert shards(cpu) == shards(alone)


# --- the configs ------------------------------------------------------------------------------


def quantization(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_bytes())
    found: dict[str, Any] = config["quantization_config"]
    return found


def test_the_experts_are_one_group_of_packed_weights(made: Made) -> None:
    block = quantization(made.gpu)
    assert block["quant_method"] == "compressed-tensors"
    assert block["format"] == "pack-quantized"
    group = block["config_groups"]["group_0"]
    assert group["format"] == "pack-quantized"
    weights = group["weights"]
    assert (weights["num_bits"], weights["type"], weights["group_size"]) == (4, "int", GROUP)
    assert (weights["symmetric"], weights["strategy"]) == (True, "group")
    (target,) = group["targets"]
    pattern = re.compile(target.removeprefix("re:"))
    others = {name.removesuffix(".weight") for name in made.model.tensors} - set(made.experts)
    assert all(pattern.match(module) for module in made.experts)
    assert not any(pattern.match(name) for name in others if ".mlp.experts." not in name)


def test_the_gpu_folder_is_what_the_pass_alone_makes(made: Made, tmp_path: Path) -> None:
    recipe, out = tmp_path / "w4a16.yaml", tmp_path / "out"
    recipe.write_text("passes: [w4a16]\n")
    done = run_cli("run", recipe, made.source, out, "--jobs", "1")
    assert done.code == 0, done.err
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
    assert {name for name in ignored if not name.startswith("re:")} == plain
    patterns = [re.compile(name.removeprefix("re:")) for name in ignored if name.startswith("re:")]
    assert len(patterns) == (made.kind == "deepseek")
    assert not any(pattern.match(module) for pattern in patterns for module in made.experts)


def test_what_is_block_fp8_is_said_in_the_form_runtimes_take(made: Made) -> None:
    block = quantization(made.gpu)
    groups = set(block["config_groups"])
    if made.kind in ("fp8", "deepseek"):
        assert groups == {"group_0"}
        assert block["linear_fp8_config"] == FP8_BLOCK
        return
    assert "linear_fp8_config" not in block
    if made.kind == "bf16":
        assert groups == {"group_0"}
        return
    assert groups == {"group_0", "group_1"}
    second = block["config_groups"]["group_1"]
    assert second["targets"] == ["Linear"]
    assert second["format"] == "float-quantized"
    weights, inputs = second["weights"], second["input_activations"]
    assert (weights["type"], weights["num_bits"], weights["strategy"]) == ("float", 8, "block")
    assert weights["block_structure"] == [BLOCK, BLOCK]
    assert (inputs["strategy"], inputs["group_size"], inputs["dynamic"]) == ("group", BLOCK, True)


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


def test_fp8_without_blocks_beside_packed_experts_is_refused(tmp_path: Path) -> None:
    source = per_channel().write(tmp_path / "source")
    done = kt(source, tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 1
    assert "'model.layers.0.self_attn.k_proj' is FP8 without blocks" in done.err
    assert kt(source, tmp_path / "cpu", None).code == 0


# --- ids, files and places --------------------------------------------------------------------


def pair_of(folder: Path) -> dict[str, str]:
    manifest = json.loads((folder / "qconvert.json").read_bytes())
    found: dict[str, str] = manifest["pair"]
    return found


def test_both_folders_carry_one_id(made: Made) -> None:
    cpu, gpu = pair_of(made.cpu), pair_of(made.gpu)
    assert cpu["id"] == gpu["id"]
    assert (cpu["side"], gpu["side"]) == ("cpu", "gpu")


def test_another_pair_has_another_id(plain: Path, tmp_path: Path) -> None:
    """Weights of one must not be served with the other's folder, even where their bytes agree."""
    ids = []
    for number, (numa, method, more) in enumerate([
        (1, "int4", ()), (2, "int4", ()), (2, "int8", ()), (2, "int4", ("--rounding", "search")),
    ]):  # fmt: skip
        cpu, gpu = tmp_path / f"cpu{number}", tmp_path / f"gpu{number}"
        assert kt(plain, cpu, gpu, *more, method=method, numa=numa).code == 0
        assert pair_of(cpu)["id"] == pair_of(gpu)["id"]
        ids.append(pair_of(cpu)["id"])
    assert len(set(ids)) == len(ids)


def test_halves_of_different_pairs_are_refused(made: Made, tmp_path: Path) -> None:
    """Served together are the halves of one pair, or a CPU folder and the repo it was made from."""
    for gpu in (made.gpu, made.source):
        right = run_cli("validate", made.cpu, "--pair", gpu)
        assert right.code == 0
        assert "this folder and its GPU side belong together" in right.out
    other_cpu, other_gpu = tmp_path / "cpu", tmp_path / "gpu"
    other = kt(made.source, other_cpu, other_gpu, "--rounding", "search")
    assert other.code == 0, other.err
    for cpu, gpu in ((made.cpu, other_gpu), (other_cpu, made.gpu), (made.cpu, other_cpu)):
        wrong = run_cli("validate", cpu, "--pair", gpu, "--json")
        assert wrong.code == 3
        rules = [finding["rule"] for finding in json.loads(wrong.out)["findings"]]
        assert rules == ["QC050"]


def test_a_folder_made_alone_has_no_id(plain: Path, tmp_path: Path) -> None:
    assert kt(plain, tmp_path / "cpu", None).code == 0
    assert "pair" not in json.loads((tmp_path / "cpu" / "qconvert.json").read_bytes())


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


# --- what is refused --------------------------------------------------------------------------


def test_a_gpu_folder_and_its_format_come_together(plain: Path, tmp_path: Path) -> None:
    base = ["kt", str(plain), "--cpu-out", str(tmp_path / "cpu"), "--cpu", "int4", "--numa", "1"]
    for more in (
        ["--gpu", "w4a16"],
        ["--gpu-out", str(tmp_path / "gpu")],
        ["--gpu", "source", "--gpu-out", str(tmp_path / "gpu")],
    ):
        done = run_cli(*base, *more)
        assert done.code == 2
        assert "--gpu w4a16 needs --gpu-out, and only it takes one" in done.err
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_name_is_refused(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset shell variable must not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    common = ["--cpu", "int4", "--numa", "1", "--jobs", "1"]
    for more in (
        ["--cpu-out", ""],
        ["--cpu-out", "cpu", "--gpu", "w4a16", "--gpu-out", ""],
    ):
        assert run_cli("kt", plain, *common, *more).code == 2
        assert os.listdir(tmp_path) == []


FOLDERS: dict[str, tuple[str, str]] = {
    "the same": ("out", "out"),
    "GPU in CPU": ("out", "out/gpu"),
    "CPU in GPU": ("out/cpu", "out"),
    "CPU in the source": ("source/cpu", "gpu"),
    "GPU in the source": ("cpu", "source/gpu"),
    "GPU is the source": ("cpu", "source"),
    "around the source": (".", "gpu"),
}


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(("cpu", "gpu"), FOLDERS.values(), ids=FOLDERS)
def test_folders_in_one_another_are_refused(
    cpu: str, gpu: str, dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    before = tree(tmp_path)
    reads = watched_reads(monkeypatch)
    done = kt(source, tmp_path / cpu, tmp_path / gpu, *(["--dry-run"] if dry else []))
    assert done.code == 1
    assert "must lie apart from" in done.err
    assert reads == []
    assert tree(tmp_path) == before


@pytest.mark.parametrize("busy", ["cpu", "gpu"])
def test_a_folder_that_is_not_empty_is_refused_before_anything_is_read(
    busy: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / busy).mkdir()
    (tmp_path / busy / "letter.txt").write_text("dear")
    before = tree(tmp_path)
    reads = watched_reads(monkeypatch)
    done = kt(plain, tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 1
    assert f"{tmp_path / busy} is not empty (letter.txt)" in done.err
    assert reads == []
    # The other folder may have been made before this one was looked at; nothing may lie in it.
    left = {name: data for name, data in tree(tmp_path).items() if data is not None}
    assert left == {name: data for name, data in before.items() if data is not None}


def test_numa_counts_that_do_not_fit_are_refused_while_planning(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = watched_reads(monkeypatch)
    for gpu in (tmp_path / "gpu", None):
        done = kt(plain, tmp_path / "cpu", gpu, numa=3)
        assert done.code == 1
        assert f"size {INTERMEDIATE} cannot be cut for 3 NUMA nodes" in done.err
        assert "supported counts: 1, 2" in done.err
    assert reads == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("hidden", "intermediate", "module"),
    [(192, 128, "0.gate_proj"), (128, 192, "0.down_proj")],
)
def test_columns_that_are_no_whole_groups_are_refused_naming_the_module(
    hidden: int, intermediate: int, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMXINT8 takes multiples of 64; groups of 128 do not."""
    model = qwen3_moe(hidden=hidden, intermediate=intermediate, layers=1)
    source = model.write(tmp_path / "source")
    reads = watched_reads(monkeypatch)
    done = kt(source, tmp_path / "cpu", tmp_path / "gpu", method="int8", numa=1)
    assert done.code == 1
    assert f"model.layers.0.mlp.experts.{module}: expected columns in whole groups" in done.err
    assert reads == []
    assert sorted(os.listdir(tmp_path)) == ["source"]
    assert kt(source, tmp_path / "cpu", None, method="int8", numa=1).code == 0


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    model = qwen3_moe(layers=1)
    del model.tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    done = kt(model.write(tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 1
    assert "layer 0: up_proj of expert 1 is missing" in done.err


# --- what kt-kernel reads as it is ------------------------------------------------------------


def per_channel() -> Model:
    """FP8 with a scale a row, as compressed-tensors writes it."""
    model = qwen3_moe("fp8", layers=1)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    tensors = {}
    for name, value in model.tensors.items():
        if not name.endswith("_scale_inv"):
            tensors[name] = value
            continue
        rows = model.tensors[name.removesuffix("_scale_inv")].shape[0]
        tensors[name.removesuffix("_inv")] = Tensor("F32", (rows, 1), b"\0\0\0\x3f" * rows)
    model.tensors = tensors
    return model


def per_tensor() -> Model:
    model = per_channel()
    group = model.config["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["strategy"] = "tensor"
    model.tensors = {
        name: Tensor("F32", (), b"\0\0\0\x3f") if name.endswith("weight_scale") else value
        for name, value in model.tensors.items()
    }
    return model


def blocks(rows: int, columns: int, scale: str = "weight_scale_inv") -> Model:
    """Block FP8, its scales under either name; hidden and intermediate sizes of two blocks of 128."""
    model = qwen3_moe("fp8", hidden=256, layers=1)
    if scale == "weight_scale_inv":
        model.config["quantization_config"] = {**FP8_BLOCK, "weight_block_size": [rows, columns]}
    else:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "symmetric": True}
        weights["block_structure"] = [rows, columns]
        model.config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
    tensors = {}
    for name, value in model.tensors.items():
        if not name.endswith("_scale_inv"):
            tensors[name] = value
            continue
        height, width = model.tensors[name.removesuffix("_scale_inv")].shape
        grid = -(-height // rows), -(-width // columns)
        named = name.replace("weight_scale_inv", scale)
        tensors[named] = Tensor("F32", grid, b"\0\0\0\x3f" * (grid[0] * grid[1]))
    model.tensors = tensors
    return model


def kimi(*, scales: bool = True) -> Model:
    """Experts in compressed-tensors' INT4, groups of 32."""
    model = qwen3_moe(layers=1)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    weights["group_size"] = 32
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    tensors = {}
    for name, value in model.tensors.items():
        if ".mlp.experts." not in name:
            tensors[name] = value
            continue
        rows, columns = value.shape
        codes = Tensor("I32", (rows, columns // 8), bytes(range(256)) * (rows * columns // 512))
        tensors[f"{name}_packed"] = codes
        if scales:
            grid = (rows, columns // 32)
            tensors[f"{name}_scale"] = Tensor("BF16", grid, b"\0\x3f" * (grid[0] * grid[1]))
        shape = rows.to_bytes(8, "little") + columns.to_bytes(8, "little")
        tensors[f"{name}_shape"] = Tensor("I64", (2,), shape)
    model.tensors = tensors
    return model


def stacked() -> Model:
    """Experts of a layer in 3-D stacks, gate rows first."""
    model = qwen3_moe(layers=1)
    at = "model.layers.0.mlp.experts"
    kept = {name: value for name, value in model.tensors.items() if at not in name}
    weights = {name: value.data for name, value in model.tensors.items() if at in name}
    halves = [
        weights[f"{at}.{expert}.{kind}.weight"]
        for expert in range(EXPERTS)
        for kind in ("gate_proj", "up_proj")
    ]
    downs = [weights[f"{at}.{expert}.down_proj.weight"] for expert in range(EXPERTS)]
    shape = (EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    kept[f"{at}.gate_up_proj"] = Tensor("BF16", shape, b"".join(halves))
    kept[f"{at}.down_proj"] = Tensor("BF16", (EXPERTS, HIDDEN, INTERMEDIATE), b"".join(downs))
    model.tensors = kept
    return model


def cast(dtype: str) -> Model:
    """Experts in a float type kt-kernel has no loader for."""
    model = qwen3_moe(layers=1)
    size = TensorType(dtype, (1,)).nbytes
    model.tensors = {
        name: Tensor(dtype, value.shape, bytes(len(value.data) // 2 * size))
        if ".mlp.experts." in name
        else value
        for name, value in model.tensors.items()
    }
    return model


READ: dict[str, tuple[Callable[[], Model], str | None]] = {
    "bf16": (qwen3_moe, "BF16"),
    "deepseek": (deepseek_v3, "FP8"),
    "blocks of 128": (lambda: blocks(128, 128), "FP8"),
    "blocks of 64": (lambda: blocks(64, 64), None),
    "blocks of 128 x 64": (lambda: blocks(128, 64), None),
    # kt_kernel 0.7.2 tells blocks from channels by the scale's shape, not by its name.
    "blocks of 128, compressed-tensors": (lambda: blocks(128, 128, "weight_scale"), "FP8"),
    "blocks of 64, compressed-tensors": (lambda: blocks(64, 64, "weight_scale"), None),
    "a scale a row": (per_channel, "FP8_PERCHANNEL"),
    "a scale a tensor": (per_tensor, None),
    "packed int4": (kimi, "RAWINT4"),
    "packed int4 without scales": (lambda: kimi(scales=False), None),
    "stacks": (stacked, None),
    "fp16": (lambda: cast("F16"), None),
    "fp32": (lambda: cast("F32"), None),
}


@pytest.mark.parametrize(("make", "known"), READ.values(), ids=READ)
def test_what_kt_kernel_reads_without_conversion(
    make: Callable[[], Model], known: str | None, tmp_path: Path
) -> None:
    assert reads_as_it_is(Checkpoint.open(make().write(tmp_path / "source"))) == known


def test_the_second_lossy_step_of_int4_is_named(tmp_path: Path) -> None:
    source = kimi().write(tmp_path / "source")
    done = kt(source, tmp_path / "cpu", None)
    assert done.code == 0, done.err
    assert "--kt-method RAWINT4" in done.out
    assert "INT4 to AMX is a second lossy step" in done.out


def test_experts_that_are_int4_are_not_packed_again(tmp_path: Path) -> None:
    source = kimi().write(tmp_path / "source")
    done = kt(source, tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 1
    assert "is packed integers already" in done.err
    assert "--gpu source" in done.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"symmetric": False}, "weight_zero_point' is missing"),
        ({"actorder": "group"}, "weight_g_idx' is missing"),
        ({"actorder": "sorted"}, "expected actorder static, weight or group, found 'sorted'"),
        ({"group_size": 64}, "expected scales"),
        ({"group_size": 0}, "expected a group_size, found 0"),
        ({"num_bits": 8}, "expected scales"),
        ({"num_bits": 3}, "4 or 8 bits"),
        ({"strategy": "tensor"}, "found strategy 'tensor'"),
    ],
)
def test_integers_of_another_kind_are_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    model = kimi()
    groups = model.config["quantization_config"]["config_groups"]
    groups["group_0"]["weights"] |= change
    done = kt(model.write(tmp_path / "source"), tmp_path / "cpu", None)
    assert done.code == 1
    assert says in done.err


@pytest.mark.parametrize("key", ["transform_config", "sparsity_config"])
def test_int4_that_was_transformed_is_refused(key: str, tmp_path: Path) -> None:
    model = kimi()
    model.config["quantization_config"][key] = {"config_groups": {"r1": {}}}
    done = kt(model.write(tmp_path / "source"), tmp_path / "cpu", None)
    assert done.code == 1
    assert key in done.err


def test_asymmetric_int4_is_refused_by_its_zero_points(tmp_path: Path) -> None:
    model = kimi()
    name = next(n for n in model.tensors if n.endswith(".weight_packed"))
    zeros = name.replace("weight_packed", "weight_zero_point")
    model.tensors[zeros] = Tensor("I32", (1, 1), bytes(4))
    done = kt(model.write(tmp_path / "source"), tmp_path / "cpu", None)
    assert done.code == 1
    assert "weight_zero_point" in done.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"activation_scheme": "static"}, "activation_scheme static"),
        ({"scale_fmt": "ue8m0"}, None),
    ],
)
def test_fp8_settings_of_the_source_are_kept_or_refused(
    change: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    model = deepseek_v3()
    model.config["quantization_config"] = FP8_BLOCK | change
    done = kt(model.write(tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu")
    if says is not None:
        assert done.code == 1
        assert says in done.err
        return
    assert done.code == 0, done.err
    assert quantization(tmp_path / "gpu")["linear_fp8_config"]["scale_fmt"] == "ue8m0"


def test_a_draft_layer_without_its_experts_is_missed(tmp_path: Path) -> None:
    model = deepseek_v3()
    gone = [name for name in model.tensors if name.startswith("model.layers.2.mlp.experts.")]
    assert gone
    for name in gone:
        del model.tensors[name]
    done = kt(model.write(tmp_path / "source"), tmp_path / "cpu", None)
    assert done.code == 1
    assert "MTP layer 2: its experts are missing" in done.err


def test_an_expert_the_config_does_not_count_is_refused(tmp_path: Path) -> None:
    model = qwen3_moe()
    model.tensors |= mlp(f"model.layers.0.mlp.experts.{EXPERTS}", HIDDEN, INTERMEDIATE, "bf16")
    done = kt(model.write(tmp_path / "source"), tmp_path / "cpu", None)
    assert done.code == 1
    assert f"experts.{EXPERTS}." in done.err


def test_stacked_experts_make_the_same_pair_as_experts_apart(tmp_path: Path) -> None:
    apart = qwen3_moe(layers=1).write(tmp_path / "apart")
    stacks = stacked().write(tmp_path / "stacks")
    for name, source in (("a", apart), ("s", stacks)):
        done = kt(source, tmp_path / f"{name}-cpu", tmp_path / f"{name}-gpu")
        assert done.code == 0, done.err
    for side in ("cpu", "gpu"):
        assert read_tensors(tmp_path / f"a-{side}") == read_tensors(tmp_path / f"s-{side}")


# --- interrupted ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two folders, and the command that fills them."""

    source: Path
    cpu: Path
    gpu: Path

    def run(self) -> Result:
        return kt(self.source, self.cpu, self.gpu, "--max-shard-size", "200KB")

    @property
    def trees(self) -> tuple[object, object]:
        return tree(self.cpu), tree(self.gpu)

    def interrupted(self, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C at the n-th thing that is told, every unit reported by itself."""
        count = 0

        def wrote(_bar: Bar, _nbytes: int) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("qconvert.run.run_units.BATCH_BYTES", 1)
            patched.setattr(Bar, "wrote", wrote)
            done = self.run()
        assert done.code == 130, done
        assert "finished work is kept, the same command goes on" in done.err
        assert published(self.cpu) == published(self.gpu) == []


def test_halves_of_two_interrupted_pairs_do_not_make_one(
    plain: Path,
    tmp_path: Path,
    undisturbed: tuple[object, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are of the same plan, and each has done another part of it."""
    a, b, c, d = (tmp_path / name for name in "abcd")
    Pair(plain, a, b).interrupted(14, monkeypatch)
    Pair(plain, c, d).interrupted(4, monkeypatch)
    crossed = Pair(plain, a, d)
    done = crossed.run()
    assert done.code == 0, done.err
    assert crossed.trees == undisturbed


def test_both_folders_must_fit_on_one_disk(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for either is not room for both."""
    pair = Pair(plain, tmp_path / "cpu", tmp_path / "gpu")
    assert pair.run().code == 0
    sizes = [sum(f.stat().st_size for f in folder.iterdir()) for folder in (pair.cpu, pair.gpu)]
    free = max(sizes) + min(sizes) // 2
    real = os.statvfs(tmp_path)

    class Tight:
        f_bavail, f_frsize = free // real.f_frsize, real.f_frsize

    monkeypatch.setattr("qconvert.run.workspace.os.statvfs", lambda _path: Tight)
    done = Pair(plain, tmp_path / "cpu2", tmp_path / "gpu2").run()
    assert done.code == 1
    assert "bytes, the disk has" in done.err


def test_workers_hold_the_locks_of_both_folders(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    def noted(_setup: object, _jobs: int, _batches: object, locks: list[int]) -> object:
        held.extend(locks)
        raise KeyboardInterrupt

    monkeypatch.setattr("qconvert.run.run_units.run_workers", noted)
    done = kt(plain, tmp_path / "cpu", tmp_path / "gpu", jobs=2)
    assert done.code == 130
    assert len(set(held)) == 2


@pytest.fixture(scope="module")
def undisturbed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    pair = Pair(plain, folder / "cpu", folder / "gpu")
    assert pair.run().code == 0
    return pair.trees


@pytest.fixture
def pair(plain: Path, tmp_path: Path) -> Pair:
    return Pair(plain, tmp_path / "cpu", tmp_path / "gpu")


@pytest.mark.parametrize("at", [1, 2, 5, 9, 14, 20])
def test_an_interrupted_pair_goes_on(
    at: int, pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.interrupted(at, monkeypatch)
    done = pair.run()
    assert done.code == 0, done.err
    assert ("units from before" in done.out) is (at > 2)
    assert pair.trees == undisturbed


def test_interrupted_again_and_again(
    pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        pair.interrupted(4, monkeypatch)
    assert pair.run().code == 0
    assert pair.trees == undisturbed


def test_interrupted_as_publishing_begins(
    pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def phase(_bar: Bar, _text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Bar, "phase", phase)
        assert pair.run().code == 130
    assert published(pair.cpu) == published(pair.gpu) == []
    reads = watched_reads(monkeypatch)
    assert pair.run().code == 0
    assert reads == []
    assert pair.trees == undisturbed


def test_what_was_written_is_not_read_again(
    pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.interrupted(12, monkeypatch)
    reads = watched_reads(monkeypatch)
    assert pair.run().code == 0
    size = sum(len(value.data) for value in read_tensors(pair.source).values())
    assert 0 < sum(reads) < size
    assert pair.trees == undisturbed


def test_a_finished_pair_is_left_alone(
    pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.run().code == 0
    reads = watched_reads(monkeypatch)
    done = pair.run()
    assert done.code == 0
    for folder in (pair.cpu, pair.gpu):
        assert f"{folder} already holds this very result; nothing to do" in done.out
    assert reads == []
    assert pair.trees == undisturbed


@pytest.mark.parametrize("gone", ["cpu", "gpu"])
def test_one_half_alone_is_refused_naming_both(
    gone: str, pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could belong to files that are not the source's any more; both are made again."""
    assert pair.run().code == 0
    lost, left = (pair.cpu, pair.gpu) if gone == "cpu" else (pair.gpu, pair.cpu)
    shutil.rmtree(lost)
    before = tree(left)
    reads = watched_reads(monkeypatch)
    done = pair.run()
    assert done.code == 1
    assert f"{left} is finished, and the other folder of its run, {lost}, is not" in done.err
    assert reads == []
    assert tree(left) == before
    assert published(lost) == []
    shutil.rmtree(left)
    assert pair.run().code == 0
    assert pair.trees == undisturbed


def test_a_refusal_leaves_no_work_folder_behind(pair: Pair) -> None:
    assert pair.run().code == 0
    shutil.rmtree(pair.gpu)
    assert pair.run().code == 1
    assert not pair.gpu.exists() or os.listdir(pair.gpu) == []


@pytest.mark.parametrize("sides", [("cpu",), ("gpu",), ("cpu", "gpu")])
@pytest.mark.parametrize("at", [1, 9])
def test_cleaned_on_either_side_it_begins_anew(
    at: int,
    sides: tuple[str, ...],
    pair: Pair,
    undisturbed: tuple[object, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair.interrupted(at, monkeypatch)
    for side in sides:
        assert "dropped unfinished work" in run_cli("clean", getattr(pair, side)).out
    done = pair.run()
    assert done.code == 0, done.err
    assert "units from before" not in done.out
    assert pair.trees == undisturbed


def test_unfinished_work_of_another_pair_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.interrupted(9, monkeypatch)
    before = pair.trees
    done = kt(pair.source, pair.cpu, pair.gpu, "--max-shard-size", "200KB", numa=1)
    assert done.code == 1
    assert "holds unfinished work of another plan" in done.err
    assert "numa=1" in done.err
    assert pair.trees == before


def test_a_finished_half_of_another_pair_is_refused(pair: Pair) -> None:
    """Same bytes, another id: its CPU folder is for another count of NUMA nodes."""
    elsewhere = pair.cpu.parent / "elsewhere"
    assert kt(pair.source, elsewhere, pair.gpu, numa=1).code == 0
    before = tree(pair.gpu)
    done = kt(pair.source, pair.cpu, pair.gpu, numa=2)
    assert done.code == 1
    assert "already holds the finished result of another plan" in done.err
    assert tree(pair.gpu) == before
