"""inspect knows what qconvert made, and shows packed weights as what they are; so does a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Model, edit_json, fp8_moe, ran, run_cli, tensor
from gdn_models import model as gdn_model
from models import nvfp4_moe, qwen3_moe

from qconvert.cli.inspect_report import provenance_lines


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = qwen3_moe(layers=2)
    for name, value in model.tensors.items():  # 1 and 0.5: no scale is beyond a format's range
        data = b"\x80\x3f\x00\x3f" * (len(value.data) // 4)
        model.tensors[name] = value._replace(data=data)
    model.side_files["README.md"] = b"---\nbase_model: org/model\n---\n# A model\n"
    return model.write(tmp_path_factory.mktemp("inspect") / "moe")


_CASES = {
    "AMXINT4": (
        "amx --method int4 --numa 1",
        "AMXINT4",
        "AMXINT4 for 1 NUMA node, reference rounding",
    ),
    "AMXINT8": ("amx --method int8 --numa 2", "AMXINT8", "AMXINT8 for 2 NUMA nodes"),
    "INT4": (
        "w4a16 --rtn --group-size 128",
        "INT4 g128 (packed)",
        "rounds bf16 to int4 in groups of 128",
    ),
    "INT4 zeros": (
        "w4a16 --rtn --group-size 128 --asymmetric",
        "INT4 g128, zero points (packed)",
        "zero point",
    ),
    "INT8": ("w4a16 --rtn --bits 8 --group-size channel", "INT8 per channel (packed)", "int8"),
    "GPTQ": ("w4a16 --rtn --packing gptq --group-size 32", "GPTQ INT4 g32", "groups of 32"),
    "NVFP4": ("nvfp4 --dialect modelopt", "NVFP4", "rounds bf16 to NVFP4"),
    "NVFP4 ct": ("nvfp4 --dialect compressed-tensors", "NVFP4", "rounds bf16 to NVFP4"),
}


@pytest.mark.parametrize(("line", "label", "said"), _CASES.values(), ids=_CASES)
def test_a_packed_format_is_named(
    line: str, label: str, said: str, moe: Path, tmp_path: Path
) -> None:
    command, *words = line.split()
    out = tmp_path / "out"
    plan = run_cli(command, moe, out, *words, "--dry-run")
    assert f"BF16 -> {label} " in plan.out
    made = run_cli(command, moe, out, *words, "--jobs", "1")
    assert made.code == 0, made.err
    found = json.loads(run_cli("inspect", out, "--json").out)
    assert found["formats"][label]["tensors"] == 12 * (2 if "--numa 2" in line else 1)
    for key in ("dtypes", "formats"):
        assert sum(entry["bytes"] for entry in found[key].values()) == found["bytes"], key
        assert sum(entry["tensors"] for entry in found[key].values()) == found["tensors"], key
    assert found["unknown"] == []
    text = run_cli("inspect", out).out
    assert f"dtype {label} " in text
    assert said in text
    assert "made from org/model (headers " in text
    packed = {"I8", "U8"} if "GPTQ" in label or "INT" in label else {"U8"}
    assert not packed & {line.split()[1] for line in text.splitlines() if line[:5] == "dtype"}


def test_layers_in_different_formats_lack_nothing(moe: Path, tmp_path: Path) -> None:
    """Some layers alone may be packed; a tensor that is there in no form is missing."""
    words = ("--rtn", "--targets", "re:model.layers.0.mlp.experts")
    made = run_cli("w4a16", moe, tmp_path / "mixed", *words, "--jobs", "1")
    assert made.code == 0, made.err
    assert json.loads(run_cli("inspect", tmp_path / "mixed", "--json").out)["missing"] == []
    plan = run_cli("dequant", tmp_path / "mixed", tmp_path / "none", "--dry-run")
    assert (plan.code, "missing" in plan.out) == (0, False)

    lost = "model.layers.1.self_attn.o_proj.weight"
    model = qwen3_moe(layers=2)
    del model.tensors[lost]
    folder = model.write(tmp_path / "lacking")
    assert json.loads(run_cli("inspect", folder, "--json").out)["missing"] == [lost]


def test_a_folder_says_how_it_was_made(moe: Path, tmp_path: Path) -> None:
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    done = run_cli("kt", moe, "--cpu", "int4", "--numa", "1", "--gpu", "w4a16", "--cpu-out", cpu,
                   "--gpu-out", gpu, "--jobs", "1")  # fmt: skip
    assert done.code == 0, done.err
    assert "cpu side of the pair " in run_cli("inspect", cpu).out
    assert "gpu side of the pair " in run_cli("inspect", gpu).out
    assert run_cli("split", moe, tmp_path / "st", "--pp", "1,1", "--jobs", "1").code == 0
    stage = run_cli("inspect", tmp_path / "st" / "stage-01-of-02").out
    assert "pipeline stage 1 of 2, counted from 0: layers 1 to 1 (partition 1,1)" in stage
    fused = gdn_model().write(tmp_path / "gdn")
    assert run_cli("fuse", fused, tmp_path / "f", "--for", "sglang", "--jobs", "1").code == 0
    assert "projections: fused in 1 group\n" in run_cli("inspect", tmp_path / "f").out
    source = nvfp4_moe().write(tmp_path / "nv")
    assert run_cli("prepare", "trtllm-gen", source, tmp_path / "p", "--jobs", "1").code == 0
    text = run_cli("inspect", tmp_path / "p").out
    assert "experts prepared for trtllm-gen (modelopt), for tensor parallel 1" in text
    assert "dtype NVFP4 (trtllm-gen) " in text
    assert "role  experts.w13 " in text
    assert "unknown" not in text


@pytest.mark.parametrize(
    "facts",
    [{"stage": 5}, {"amx": []}, {"pair": 1}, {"gdn_groups": "x"}, {"stage": {"layers": ["a", 2]}},
     {"calibration": {}}, {"lossy_steps": 3}, {"lossy_steps": {"a": "b"}}, {"trtllm_gen": {"x": 1}}],
)  # fmt: skip
def test_a_manifest_is_anyone_s_text(facts: dict[str, Any]) -> None:
    base = {"identity": {}, "passes": [5, {"options": 1}], "dropped": {"a": 1}}
    assert list(provenance_lines({**base, **facts}, None))


def test_a_config_that_says_nothing_of_packed_words(moe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_cli("w4a16", moe, out, "--rtn", "--jobs", "1").code == 0
    edit_json(out / "config.json", lambda value: value.pop("quantization_config"))
    assert "packed integers" in json.loads(run_cli("inspect", out, "--json").out)["formats"]


# --- diff ----------------------------------------------------------------------------------------


def test_diff_tells_by_role_and_at_most_a_screen(tmp_path: Path) -> None:
    a, b = fp8_moe(), fp8_moe()
    for name, value in b.tensors.items():
        if ".experts." in name and not name.endswith("_inv"):
            b.tensors[name] = value._replace(data=bytes(len(value.data)))
    del b.tensors["lm_head.weight"]
    one, two = a.write(tmp_path / "a"), b.write(tmp_path / "b")
    told = run_cli("diff", one, two)
    lines = told.out.splitlines()
    assert (told.code, len(lines)) == (3, 5)
    first = "model.layers.0.mlp.experts.0.down_proj.weight: first differing byte"
    assert any(
        line.startswith(f"experts.down_proj: 4 tensors differ in bytes (first: {first}")
        for line in lines
    )
    assert "lm_head: 1 tensor is only in A (lm_head.weight: BF16 [10, 8])" in lines
    assert lines[-1] == f"13 differences; {len(a.tensors) - 13} tensors are equal"
    every = run_cli("diff", one, two, "--all").out.splitlines()
    assert len(every) == 14
    listed = json.loads(run_cli("diff", one, two, "--json").out)
    assert [f"{d['kind']:<8} {d['tensor']}: {d['detail']}" for d in listed] == every[:-1]
    assert {d["role"] for d in listed} == {line.split(":")[0] for line in lines[:-1]}


def _settings(folder: Path, config: str = "config.json", **changes: Any) -> Path:
    """The folder, some keys of a file of it changed; None: taken away."""

    def change(value: dict[str, Any]) -> None:
        value.update(changes)
        for key in [key for key, one in changes.items() if one is None]:
            del value[key]

    edit_json(folder / config, change)
    return folder


def test_diff_of_a_config(tmp_path: Path) -> None:
    """A runtime computes otherwise with one expert a token than with two, from the same tensors."""
    model = fp8_moe()
    files = {"generation_config.json": b'{"top_k": 20, "transformers_version": "5"}'}
    files |= {"tokenizer.json": b'{"a": 1}', "README.md": b"mine", "modeling_x.py": b"A = 1"}
    one, two = model.write(tmp_path / "a"), model.write(tmp_path / "b")
    for folder in (one, two):
        for name, data in files.items():
            (folder / name).write_bytes(data)
    # What tells who wrote it says nothing of how the model computes.
    _settings(two, transformers_version="9.9")
    _settings(two, "generation_config.json", transformers_version="9.9")
    (two / "README.md").write_text("theirs")
    (two / "notes.txt").write_text("of two alone")
    told = run_cli("diff", one, two)
    equal = f"{len(model.tensors)} tensors are equal"
    left = "files     that differ, or are in one alone, and are not counted: notes.txt\n"
    names = "config.json, generation_config.json, chat_template.jinja, modeling_x.py and 1 more"
    assert (told.code, told.out) == (0, f"no difference: {equal}, and so are {names}\n{left}")
    (one / "notes.txt").write_text("of one alone")  # as long
    assert run_cli("diff", one, two).out.endswith(left)
    (one / "notes.txt").write_text("of two alone")
    assert run_cli("diff", one, two).out.endswith(" and 1 more\n")
    _settings(two, num_experts_per_tok=1, rope_scaling={"factor": 2.0}, eos_token_id=True)
    _settings(one, num_experts_per_tok=2, rope_scaling={"factor": 4.0}, eos_token_id=1)
    _settings(two, "generation_config.json", top_k=None)
    (two / "tokenizer.json").write_text('{"a": 2}')
    (two / "modeling_x.py").unlink()
    told = run_cli("diff", one, two)
    assert told.code == 3
    assert sorted(told.out.splitlines()) == [
        f"6 differences; {equal}",
        "config.json differs: eos_token_id: 1 and True",
        "config.json differs: num_experts_per_tok: 2 and 1",
        "config.json differs: rope_scaling.factor: 4.0 and 2.0",
        "generation_config.json differs: top_k: 20 and nothing",
        "modeling_x.py is only in A",
        "tokenizer.json differs in bytes (first differing byte 6)",
    ]
    listed = json.loads(run_cli("diff", two, one, "--json").out)
    assert {(d["tensor"], d["kind"]) for d in listed} == {
        ("config.json", "config"), ("generation_config.json", "config"),
        ("modeling_x.py", "file-b"), ("tokenizer.json", "file"),
    }  # fmt: skip
    told = run_cli("diff", one, two, "--headers")
    assert (told.code, told.out) == (0, f"no difference: {equal} in name, dtype and shape\n")


def test_lists_of_what_is_not_quantized_are_named(moe: Path, tmp_path: Path) -> None:
    """They are not compared: a conversion and its reverse spell them otherwise. But said to differ."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        ran("w4a16", moe, folder, "--rtn", "--group-size", "32", "--jobs", "1")
    assert "lists" not in ran("diff", *folders).out
    edit_json(folders[1] / "config.json", lambda c: c["quantization_config"].update(ignore=[]))
    said = ran("diff", *folders).out
    assert "no difference but in lists: " in said
    assert "are not compared: config.json: quantization_config.ignore; " in said


def test_diff_of_a_thousand_roles_is_a_screen(tmp_path: Path) -> None:
    """Names that no family knows are roles of their own."""
    names = [f"odd_{chr(97 + n // 26)}{chr(97 + n % 26)}.weight" for n in range(200)]
    for folder, seed in (("a", 1), ("b", 2)):
        tensors = {name: tensor("U8", 4, seed=seed) for name in names}
        Model({"model_type": "x"}, tensors).write(tmp_path / folder, 1)
    lines = run_cli("diff", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert len(lines) == 32
    assert lines[-2:] == [
        "... and 170 tensors of 170 other groups",
        "200 differences; 0 tensors are equal",
    ]
