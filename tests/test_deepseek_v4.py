"""DeepSeek-V4: FP8 beside MXFP4 experts in the simulators, and what passes state of its experts. That
the loaders do the same is shown by tests/loaders/test_deepseek_v4.py and the tables' forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import headers
import pytest
from checkpoints import edit_json, run_cli
from loaders.published import published
from simulated_folders import Config, Tensors, folder

from qconvert.core.dtypes import TensorType
from qconvert.core.family import role_index
from qconvert.core.roles import Kind
from qconvert.layouts.derived.find import family_for
from qconvert.runtimes.classes.record import form_of
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.setting import NotSimulated, Setting
from qconvert.runtimes.sglang import simulator as sglang
from qconvert.runtimes.vllm.simulator import simulate

FLASH = Path(__file__).parent / "families" / "published" / "deepseek-v4-flash.yaml"
EXPERTS = "model.layers.0.ffn.experts.routed_experts"


def small() -> tuple[Config, Tensors]:
    return folder("deepseek_v4", fp8=True)


def in_fp8() -> tuple[Config, Tensors]:
    """Experts in FP8, as `relabel --to fp8` writes them, with scales in F32 as DeepSeek has them."""
    config, tensors = small()
    for name, one in list(tensors.items()):
        if ".experts." in name and name.endswith(".weight"):
            rows, half = one.shape
            scale = f"{name.removesuffix('weight')}scale"
            tensors[name] = TensorType("F8_E4M3", (rows, 2 * half))
            tensors[scale] = TensorType("F32", (-(-rows // 128), -(-2 * half // 128)))
    return {**config, "expert_dtype": "fp8"}, tensors


def at(config: Config, tensors: Tensors, tp: int = 1) -> SimulatedLoad:
    return simulate(config, tensors, Setting(tp=tp, rank=tp - 1))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_flash_loads_as_published(tp: int) -> None:
    """43 layers of published sizes: the model's own tensors are read, the draft's are not."""
    found = headers.with_few(headers.read(FLASH))
    said = at(dict(found.config), dict(found.tensors), tp)
    assert said.whole
    assert {name.partition(".")[0] for name in said.unread} == {"mtp"}
    assert said.ignored == ()
    heads = said.parameters["model.layers.0.attn.attn_sink"]
    assert (heads.dtype, heads.shape) == ("F32", (64,))
    scale = said.parameters["model.layers.0.attn.wq_b.weight_scale_inv"]
    assert (scale.dtype, scale.shape) == ("F8_E8M0", (256 // tp, 8))
    experts = said.parameters[f"{EXPERTS}.w2_weight_scale"]
    assert (experts.dtype, experts.shape[1:]) == ("U8", (4096, 64 // tp))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_flash_loads_in_sglang(tp: int) -> None:
    found = headers.with_few(headers.read(FLASH), 8)
    said = in_sglang(dict(found.config), dict(found.tensors), tp)
    assert said.whole
    assert {name.partition(".")[0] for name in said.unread} == {"mtp"}
    assert said.ignored == ()
    shapes = {name: (one.dtype, one.shape) for name, one in said.parameters.items()}
    at_0 = "model.layers.0"
    assert shapes[f"{at_0}.self_attn.attn_sink"] == ("F32", (64,))
    assert shapes[f"{at_0}.self_attn.wo_a.weight_scale_inv"] == ("F32", (8 // tp, 8, 32))
    assert shapes[f"{at_0}.mlp.experts.w2_weight"] == ("I8", (8, 4096, 1024 // tp))
    assert shapes[f"{at_0}.mlp.experts.w2_weight_scale_inv"] == ("F8_E8M0", (8, 4096, 64 // tp))


def in_sglang(config: Config, tensors: Tensors, tp: int = 1) -> SimulatedLoad:
    return sglang.simulate(config, tensors, Setting(tp=tp, rank=tp - 1))


def test_sglang_computes_with_wo_a_as_with_other_linears() -> None:
    """In BF16 beside FP8 its class does not build; in other blocks than 128 x 128 that is not known."""
    config, tensors = small()
    names = [f"layers.{n}.{at}.wo_a" for n in range(4) for at in ("attn", "self_attn")]
    listed = {"ignored_layers": names}
    for name, one in list(tensors.items()):
        if ".attn.wo_a." in name and name.startswith("layers."):
            tensors[name] = TensorType("BF16", one.shape)
            tensors.pop(name.replace(".weight", ".scale"), None)
    changed = {**config, "quantization_config": {**config["quantization_config"], **listed}}
    refused = in_sglang(changed, tensors).refused
    assert refused is not None
    assert refused.where == "model.layers.0.self_attn.wo_a"
    assert at(changed, tensors).whole
    smaller = {**config["quantization_config"], "weight_block_size": [64, 64]}
    with pytest.raises(NotSimulated, match="dequantizes a part"):
        in_sglang({**config, "quantization_config": smaller}, tensors)


def test_every_published_name_has_a_role() -> None:
    found = headers.with_few(headers.read(FLASH))
    family = family_for(found.config, found.tensors)
    index = role_index(family, found.config, found.tensors)
    unknown = [name for name in found.tensors if index.kind(name) is Kind.UNKNOWN]
    assert unknown == []


def test_experts_of_a_config_that_does_not_state_them_are_in_mxfp4() -> None:
    config, tensors = small()
    del config["expert_dtype"]
    assert at(config, tensors).whole
    assert form_of(config, tensors) == form_of(*small())


@pytest.mark.parametrize(
    ("scale", "word"), [("F32", ""), ("F8_E8M0", "as numbers")], ids=["floats", "exponents"]
)
def test_exponents_of_fp8_experts_are_read_as_numbers(scale: str, word: str) -> None:
    """2^-7 is stored as 120, which the class copies into F32."""
    config, tensors = in_fp8()
    for name in [name for name in tensors if ".experts." in name and name.endswith(".scale")]:
        tensors[name] = TensorType(scale, tensors[name].shape)
    said = at(config, tensors)
    assert said.refused is None
    assert said.whole is not bool(word)
    assert {name.rpartition(".")[2] for name in said.misread} == ({"scale"} if word else set())
    assert all(word in how for how in said.misread.values())
    parameter = said.parameters["model.layers.0.attn.wq_b.weight_scale_inv"]
    assert parameter.dtype == "F32"  # exponents are read right into linears


@pytest.mark.parametrize("stated", ["bf16", None])
def test_experts_in_what_the_class_does_not_know(stated: str | None) -> None:
    config, tensors = small()
    refused = at({**config, "expert_dtype": stated}, tensors).refused
    assert refused is not None
    assert f"expert_dtype is {stated!r}" in refused.why


def test_scales_lead_where_the_config_says() -> None:
    """Beside FP8 experts `scale` is the name of another parameter than beside MXFP4."""
    config, tensors = in_fp8()
    refused = at({**config, "expert_dtype": "fp4"}, tensors).refused
    assert refused is not None
    assert at(config, tensors).whole


def test_unquantized_experts_are_listed() -> None:
    """An ignore list names modules as the checkpoint does, and the class's patterns are no names."""
    config, tensors = small()
    block = config["quantization_config"] | {
        "ignored_layers": [f"layers.{n}.ffn.experts" for n in range(4)]
    }
    for name, one in list(tensors.items()):
        if ".experts." in name and name.startswith("layers."):
            if name.endswith(".scale"):
                del tensors[name]
            else:
                tensors[name] = TensorType("BF16", (one.shape[0], 2 * one.shape[1]))
    said = at({**config, "quantization_config": block}, tensors)
    assert said.whole
    assert said.schemes[EXPERTS] == "UnquantizedFusedMoEMethod"


@pytest.mark.parametrize(
    ("inner", "tp", "why"),
    [(384, 2, "shared experts of 384 rows"), (64, 1, "shared experts of 64 rows")],
)
def test_shared_experts_that_the_class_pads(inner: int, tp: int, why: str) -> None:
    config, tensors = folder("deepseek_v4", fp8=True, inner=inner)
    with pytest.raises(NotSimulated, match=why):
        at(config, tensors, tp)


def test_mxfp4_experts_that_a_kernel_pads() -> None:
    config, tensors = small()
    for name, one in list(tensors.items()):
        if ".experts." in name:
            at_columns = name.split(".")[-2] != "w2"
            rows, columns = one.shape
            smaller = (rows // 16, columns) if at_columns else (rows, columns // 16)
            tensors[name] = TensorType(one.dtype, smaller)
    config |= {"moe_intermediate_size": 64, "n_shared_experts": 16}
    with pytest.raises(NotSimulated, match="of sizes that are padded"):
        at(config, tensors)


@pytest.mark.parametrize(("heads", "held"), [(4, 64), (64, 64), (65, 128), (128, 128)])
def test_sinks_are_padded_to_heads_of_a_kernel(heads: int, held: int) -> None:
    config, tensors = _of_heads(heads)
    sink = at(config, tensors).parameters["model.layers.0.attn.attn_sink"]
    assert sink.shape == (held,)


def _of_heads(heads: int) -> tuple[Config, Tensors]:
    config, tensors = small()
    config |= {"num_attention_heads": heads, "o_groups": 1}
    for name in list(tensors):
        if name.endswith("attn_sink"):
            tensors[name] = TensorType("F32", (heads,))
    return config, tensors


def test_sinks_of_more_heads_than_a_kernel_takes() -> None:
    with pytest.raises(NotSimulated, match="for which no kernel is known"):
        at(*_of_heads(129))


def test_a_sink_of_other_heads_than_the_config_counts() -> None:
    """The loader divides whatever there is."""
    config, tensors = small()
    name = "layers.0.attn.attn_sink"
    tensors[name] = TensorType("F32", (2,))
    assert at(config, tensors).misread == {name: "expected 8 numbers, found 2"}
    tensors[name] = TensorType("F32", (3,))
    refused = at(config, tensors, 2).refused
    assert refused is not None
    assert "expected 8 numbers" in refused.why


# --- what passes state of experts ---------------------------------------------------------------


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize(
    ("command", "experts", "scale"),
    [
        ("dequant", "bf16", ""),
        ("relabel --to fp8", "fp8", "F32"),
        ("relabel --to nvfp4 --dialect modelopt --input-scale 0.5", "fp4", "F8_E4M3"),
    ],
)
def test_a_result_states_what_its_experts_are_in(
    command: str, experts: str, scale: str, stated: bool, tmp_path: Path
) -> None:
    """Also where the source says nothing, as DeepSeek-V4-Pro does: vLLM then takes FP4. Each loads."""
    source, out = _written(tmp_path, stated=stated), tmp_path / "out"
    words = command.split()
    done = run_cli(words[0], source, out, *words[1:], "--jobs", "1")
    assert done.code == 0, done.err
    config, tensors = _read(out)
    kept = stated or experts != "fp4"
    assert config.get("expert_dtype") == (experts if kept else None)
    scales = {t.dtype for n, t in tensors.items() if n.startswith("layers.0.ffn.experts.0.w1.")}
    assert scale in {*scales, ""}
    assert at(config, tensors).whole
    if "nvfp4" not in command:
        assert in_sglang(config, tensors).whole


def test_fp8_of_what_was_dequantized_is_read_as_fp8(tmp_path: Path) -> None:
    """wq_a and wkv are one projection in runtimes, so that both become FP8."""
    source, recipe = _written(tmp_path, stated=True), tmp_path / "recipe.yaml"
    recipe.write_text("passes:\n- dequant: {}\n- fp8: {}\n")
    done = run_cli("run", recipe, source, tmp_path / "out", "--jobs", "1")
    assert done.code == 0, done.err
    config, tensors = _read(tmp_path / "out")
    assert config["expert_dtype"] == "fp8"
    kept = {
        n for n, t in tensors.items() if t.dtype == "F8_E4M3" and n.startswith("layers.0.attn.")
    }
    assert kept == {
        f"layers.0.attn.{name}.weight" for name in ("wq_a", "wkv", "wq_b", "wo_a", "wo_b")
    }
    assert at(config, tensors).whole
    assert in_sglang(config, tensors).whole


def _written(room: Path, *, stated: bool) -> Path:
    source = published("deepseek_v4", fp8=True, experts=2).write(room / "source")
    if not stated:
        edit_json(source / "config.json", lambda config: config.pop("expert_dtype"))
    return source


def _read(out: Path) -> tuple[Any, Any]:
    from loaders.agreement import config_of
    from loaders.agreement import headers as headers_of

    return config_of(out), headers_of(out)
