"""Releases in the forms that others publish: sound ones have no error, of broken ones each has one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import headers
import pytest
from header_checkpoints import checkpoint
from headers import HeaderSet
from sampled import sampled

from qconvert.core.dtypes import TensorType
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, judge_headers, validate_folder

QWEN, MINIMAX = "qwen3.6-35b-a3b-nvfp4", "minimax-m3-nvfp4"
DYNAMIC, PB_WO = "tinyllama-gptq-dynamic", "qwen3-30b-a3b-pb-wo"
MINISTRAL, GEMMA, INKLING = "ministral-3-8b", "gemma-4-26b-a4b", "inkling"
EAGLE, NEXTN, GLM = "eagle3-llama-3.1-8b", "deepseek-v3-nextn", "glm-4.5-air"
# Their names are not those of the classes' kept descriptions, so that a process describes each class
# anew, in 10 s of CPU. MiniMax's is one of them too: it stands for these in `make test`.
_DESCRIBED = (EAGLE, GEMMA, f"{GEMMA}-nvfp4", MINISTRAL)
_L = "model.language_model.layers"
_M = "language_model.model.layers"
_T = "model.layers"
_E = f"{_L}.0.mlp.experts"


def judged(found: HeaderSet) -> list[Finding]:
    """What header rules find, of folders that are not written."""
    made = checkpoint(found.tensors, found.config)
    return [f for f in judge_headers(Folder(made, planned=True)) if f.rule != "QC029"]


def errors(found: HeaderSet) -> list[Finding]:
    return [finding for finding in judged(found) if finding.severity == "error"]


def _cheap(
    cases: Sequence[Any], every: int, model: Callable[[Any], str], name: Callable[[Any], str] = str
) -> list[Any]:
    """Cases as `sampled` takes them, and those of classes that are described anew for `make check`."""
    kept = [case for case in cases if model(case) not in _DESCRIBED]
    others = [case for case in cases if model(case) in _DESCRIBED]
    big = [pytest.param(case, id=name(case), marks=pytest.mark.big) for case in others]
    return [*sampled(kept, every, name=name), *big]


@pytest.mark.big
def test_values_that_are_keys_have_a_scale_of_their_own() -> None:
    """Gemma 4's layers of full attention have no v_proj, and runtimes a scale for their values."""
    found = headers.form(GEMMA)
    keys = [n.removesuffix(".k_proj.weight") for n in found.tensors if n.endswith(".k_proj.weight")]
    assert any(f"{at}.v_proj.weight" not in found.tensors for at in keys)
    scale = TensorType("F32", ())
    added = {f"{at}.{part}_proj.{part}_scale": scale for at in keys for part in "kv"}
    assert errors(replace(found, tensors={**found.tensors, **added})) == []
    lost = {name: one for name, one in added.items() if not name.endswith("k_scale")}
    assert "QC019" in {
        one.rule for one in errors(replace(found, tensors={**found.tensors, **lost}))
    }


@pytest.mark.parametrize("model", _cheap(headers.forms(), 1, str))
def test_a_published_form_has_no_error(model: str) -> None:
    assert errors(headers.form(model)) == []


@pytest.mark.parametrize("model", sampled([QWEN, MINIMAX]))
def test_config_and_modelopts_file_agree(model: str, tmp_path: Path) -> None:
    """Both state the table of layers, and one the KV cache's form."""
    headers.write_sparse(headers.form(model), tmp_path)
    for file in ("preprocessor_config.json", "configuration_minimax_m3_vl.py"):
        (tmp_path / file).write_text("{}\n")
    assert validate_folder(tmp_path).findings == []


def _kept(model: str, kept: Callable[[str], bool], **config: Any) -> HeaderSet:
    """A part of a release, with another config."""
    found = headers.form(model)
    return HeaderSet(
        {**found.config, **config}, {n: t for n, t in found.tensors.items() if kept(n)}, 1
    )


def test_a_draft_alone_is_known_by_its_class_or_by_what_it_has() -> None:
    whole = HeaderSet(**vars(headers.few("qwen3.5-0.8b")))
    assert (
        errors(HeaderSet(whole.config, {n: t for n, t in whole.tensors.items() if "mtp." in n}, 1))
        == []
    )
    assert errors(_kept(NEXTN, lambda name: True, architectures=["DeepseekV3ForCausalLM"])) == []
    shared = _kept(
        NEXTN, lambda name: "embed_tokens" not in name and "shared_head.head" not in name
    )
    assert errors(shared) == []


_TOWER = "vision_tower.encoder.layers"
# Towers and projectors in forms of their own, beside a decoder with split projections.
_BESIDE = {
    f"{_TOWER}.0.self_attn.qkv_proj.weight": (384, 128),
    f"{_TOWER}.0.mlp.gate_up_proj.weight": (512, 128),
    f"{_TOWER}.1.self_attn.qkv_proj.weight": (384, 128),
    f"{_TOWER}.1.mlp.gate_up_proj.weight": (512, 128),
    "mm_projector.0.weight": (4096, 128),
    "mm_projector.2.gate_up_proj.weight": (4096, 4096),
    "mm_projector.4.up_proj.weight": (4096, 4096),
}


_FUSED = {
    "mlp": (("gate_proj", "up_proj"), "gate_up_proj", (4224, 2816)),
    "self_attn": (("q_proj", "k_proj", "v_proj"), "qkv_proj", (14336, 4096)),
}


@pytest.mark.parametrize(
    ("model", "block"),
    [
        (GLM, f"{_T}.9.self_attn"),
        pytest.param(GEMMA, f"{_L}.9.mlp", marks=pytest.mark.big),
        pytest.param(MINISTRAL, f"{_M}.9.mlp", marks=pytest.mark.big),
    ],
)
def test_towers_and_sequences_are_no_layers_of_the_decoder(model: str, block: str) -> None:
    """Other forms there; in a layer of the decoder the same is found."""
    found = headers.form(model) if model in headers.forms() else headers.few(model)
    config = {key: value for key, value in found.config.items() if key != "quantization_config"}
    plain = {
        name: TensorType("BF16", kind.shape)
        for name, kind in found.tensors.items()
        if not name.endswith(("n_scale", "weight_scale_inv"))
    }
    more = {name: TensorType("BF16", shape) for name, shape in _BESIDE.items()}
    assert errors(HeaderSet(config, plain | more, 1)) == []
    gone, name, shape = _FUSED[block.rpartition(".")[2]]
    fused = {
        n: t for n, t in plain.items() if not n.startswith(tuple(f"{block}.{p}" for p in gone))
    }
    fused[f"{block}.{name}.weight"] = TensorType("BF16", shape)
    rules = {finding.rule for finding in errors(HeaderSet(config, fused | more, 1))}
    assert rules & {"QC013", "QC017"}


@pytest.mark.parametrize("model", [QWEN, pytest.param(DYNAMIC, marks=pytest.mark.big)])
def test_a_scale_of_logits_is_none_of_the_head(model: str) -> None:
    found = headers.form(model)
    more = {
        "lm_head.logit_scale": TensorType("F32", (1,)),
        "model.logit_scale": TensorType("F32", ()),
    }
    assert errors(HeaderSet(found.config, found.tensors | more, 1)) == []


def test_torchaos_parts_of_a_weight() -> None:
    """transformers 5.17 (`quantizers/quantizer_torchao.py`) saves them so."""
    found, at = headers.form(DYNAMIC), f"{_T}.5.mlp.up_proj"
    parts = {
        f"{at}._weight_qdata": TensorType("F8_E4M3", (5632, 2048)),
        f"{at}._weight_scale": TensorType("F32", (5632, 1)),
    }
    config = {**found.config, "quantization_config": {"quant_method": "torchao"}}

    def unpaired(lost: str) -> list[str]:
        kept = {name: kind for name, kind in parts.items() if name != lost}
        return [f.where for f in errors(HeaderSet(config, kept, 1)) if f.rule == "QC011"]

    assert unpaired("") == []
    assert unpaired(f"{at}._weight_scale") == [f"{at}._weight_qdata"]


# --- Broken variants -----------------------------------------------------------------------------


@dataclass
class Broken:
    """A release that one thing is changed of."""

    config: dict[str, Any]
    tensors: dict[str, TensorType]

    @property
    def block(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    @property
    def table(self) -> dict[str, Any]:
        found: dict[str, Any] = self.block["quantized_layers"]
        return found

    def typed(self, name: str, dtype: str, *shape: int) -> None:
        assert name in self.tensors, name
        assert self.tensors[name] != TensorType(dtype, shape)
        self.tensors[name] = TensorType(dtype, shape)

    def lose(self, pattern: str) -> None:
        lost = [name for name in self.tensors if re.fullmatch(pattern, name)]
        assert lost, pattern
        for name in lost:
            del self.tensors[name]

    def plain(self, module: str, *shape: int) -> None:
        """A module's weight in BF16, and nothing beside it."""
        self.lose(rf"{re.escape(module)}\.(weight.*|q.*|scales|g_idx|input_scale|activation_scale)")
        self.tensors[f"{module}.weight"] = TensorType("BF16", shape)


@dataclass(frozen=True)
class Mutant:
    what: str
    model: str
    change: Callable[[Broken], object]
    rules: frozenset[str] = field(default_factory=frozenset)


@cache
def _sound(model: str) -> frozenset[tuple[str, str]]:
    return frozenset((f.rule, f.where) for f in judged(headers.form(model)))


def _of(*rules: str) -> frozenset[str]:
    return frozenset(rules)


MUTANTS = (
    # --- modelopt's table: FP8 a tensor beside weights in NVFP4
    Mutant("a scale a row where one a tensor is stated", QWEN,
           lambda b: b.typed(f"{_L}.3.self_attn.q_proj.weight_scale", "F32", 8192, 1), _of("QC015")),
    Mutant("a grid of scales where one a tensor is stated", QWEN,
           lambda b: b.typed(f"{_L}.3.self_attn.q_proj.weight_scale", "F32", 64, 16), _of("QC015")),
    Mutant("block scales of another size", QWEN,
           lambda b: b.typed(f"{_E}.1.up_proj.weight_scale", "F8_E4M3", 512, 64), _of("QC104")),
    Mutant("an expert without its global scale", QWEN,
           lambda b: b.lose(re.escape(f"{_E}.1.up_proj.weight_scale_2")), _of("QC104")),
    Mutant("a layer that the table lacks", QWEN,
           lambda b: b.table.pop(f"{_L}.3.self_attn.q_proj"), _of("QC034")),
    Mutant("experts that the table lacks", QWEN, lambda b: b.table.pop(f"{_E}"), _of("QC034")),
    Mutant("a head that the table lacks", QWEN, lambda b: b.table.pop("lm_head"), _of("QC034", "QC095")),
    Mutant("FP8 stated of NVFP4", QWEN,
           lambda b: b.table.update({f"{_L}.0.mlp.shared_expert.up_proj": {"quant_algo": "FP8"}}),
           _of("QC027")),
    Mutant("NVFP4 stated of FP8", QWEN,
           lambda b: b.table.update({f"{_L}.0.linear_attn.out_proj": {"quant_algo": "W4A16_NVFP4"}}),
           _of("QC027")),
    Mutant("FP8 stated of BF16", QWEN,
           lambda b: b.table.update({f"{_L}.0.linear_attn.in_proj_a": {"quant_algo": "FP8"}}),
           _of("QC035")),
    Mutant("an expert in BF16", QWEN, lambda b: b.plain(f"{_E}.1.up_proj", 512, 2048), _of("QC035")),
    Mutant("activations stated, no scales of them", QWEN,
           lambda b: b.table[_E].update(quant_algo="NVFP4"), _of("QC101")),
    Mutant("an FP8 weight without a scale", QWEN,
           lambda b: b.lose(re.escape(f"{_L}.3.self_attn.q_proj.weight_scale")), _of("QC011")),
    Mutant("a draft without a norm", QWEN, lambda b: b.lose(r"mtp\.norm\.weight"), _of("QC023")),
    Mutant("a router that is lost", QWEN,
           lambda b: b.lose(re.escape(f"{_L}.7.mlp.gate.weight")), _of("QC013")),
    # --- MXFP8 beside NVFP4
    Mutant("scales of blocks where MXFP8 is stated", MINIMAX,
           lambda b: b.typed(f"{_M}.0.mlp.down_proj.weight_scale_inv", "F32", 48, 96),
           _of("QC015", "QC027")),
    Mutant("MXFP8 with scales in BF16", MINIMAX,
           lambda b: b.typed(f"{_M}.0.mlp.down_proj.weight_scale_inv", "BF16", 6144, 384), _of("QC027")),
    Mutant("MXFP8 with a scale a row", MINIMAX,
           lambda b: b.typed(f"{_M}.0.mlp.down_proj.weight_scale_inv", "U8", 6144, 1), _of("QC015")),
    Mutant("MXFP8 stated as FP8 a tensor", MINIMAX,
           lambda b: b.table.update({f"{_M}.0.mlp.down_proj": {"quant_algo": "FP8"}}),
           _of("QC015", "QC027")),
    Mutant("an expert's entry of MXFP8", MINIMAX,
           lambda b: b.table[f"{_M}.3.block_sparse_moe.experts.1.w2"].update(quant_algo="MXFP8"),
           _of("QC027")),
    Mutant("a quantized module that is excluded", MINIMAX,
           lambda b: b.block["exclude_modules"].append(f"{_M}.9.self_attn.o_proj"), _of("QC034")),
    Mutant("an expert without input scale", MINIMAX,
           lambda b: b.lose(re.escape(f"{_M}.3.block_sparse_moe.experts.1.w2.input_scale")),
           _of("QC101")),
    # --- FP8_PB_WO
    Mutant("blocks of 64 where 128 are stated", PB_WO,
           lambda b: b.typed(f"{_T}.0.self_attn.q_proj.weight_scale", "F32", 64, 32), _of("QC015")),
    Mutant("a group_size that scales have not", PB_WO,
           lambda b: b.table[f"{_T}.0.self_attn.q_proj"].update(group_size=64), _of("QC015")),
    Mutant("no grid at all", PB_WO,
           lambda b: b.typed(f"{_T}.0.self_attn.q_proj.weight_scale", "F32"), _of("QC015")),
    # --- GPTQ's dynamic rules
    Mutant("4 bits where a rule states 8", DYNAMIC,
           lambda b: b.typed(f"{_T}.1.mlp.up_proj.qweight", "I32", 256, 5632), _of("QC026", "QC089")),
    Mutant("8 bits where no rule states them", DYNAMIC,
           lambda b: b.typed(f"{_T}.0.mlp.up_proj.qweight", "I32", 512, 5632), _of("QC026", "QC089")),
    Mutant("groups of the block where a rule states 32", DYNAMIC,
           lambda b: b.typed(f"{_T}.1.mlp.up_proj.scales", "F16", 16, 5632), _of("QC089")),
    Mutant("no order of columns where the block states one", DYNAMIC,
           lambda b: b.lose(re.escape(f"{_T}.0.mlp.up_proj.g_idx")), _of("QC088")),
    Mutant("a rule of 3 bits", DYNAMIC,
           lambda b: b.block["dynamic"][r".*\.1\..*"].update(bits=3), _of("QC089")),
    Mutant("a quantized module that a rule leaves out", DYNAMIC,
           lambda b: b.block["dynamic"].update({r"-:.*\.0\.mlp\.up_proj": {}}), _of("QC034")),
    Mutant("an unquantized module that a rule before takes", DYNAMIC,
           lambda b: b.block.update(dynamic={r"+:.*\.9\.mlp\..*": {"bits": 8}, **b.block["dynamic"]}),
           _of("QC035")),
    # --- FP8 with static activations, and what is not quantized
    Mutant("a linear layer in BF16 that no list names", MINISTRAL,
           lambda b: b.plain(f"{_M}.5.self_attn.o_proj", 4096, 4096), _of("QC035")),
    Mutant("a tower that the list lacks", MINISTRAL,
           lambda b: b.block["modules_to_not_convert"].remove("model.vision_tower"), _of("QC035")),
    Mutant("a quantized layer in the list", MINISTRAL,
           lambda b: b.block["modules_to_not_convert"].append(f"{_M}.5.self_attn.o_proj"), _of("QC034")),
    Mutant("experts of fewer columns", GEMMA,
           lambda b: b.typed(f"{_L}.0.experts.gate_up_proj", "BF16", 2, 1408, 2048), _of("QC026")),
    Mutant("an attention layer that lost its output", INKLING,
           lambda b: b.lose(r"model\.llm\.layers\.7\.attn\.wo_ud\.weight"), _of("QC013")),
    Mutant("a stack of experts that is lost", INKLING,
           lambda b: b.lose(r"model\.llm\.layers\.7\.mlp\.experts\.w2_weight"), _of("QC013")),
    # --- Drafts that stand alone
    Mutant("a draft without an expert", NEXTN,
           lambda b: b.lose(re.escape(f"{_T}.0.mlp.experts.1.up_proj.weight")), _of("QC013")),
    Mutant("a draft without what joins it", NEXTN,
           lambda b: b.lose(re.escape(f"{_T}.0.eh_proj.weight")), _of("QC013", "QC023")),
)  # fmt: skip


@pytest.mark.parametrize(
    "mutant", _cheap(MUTANTS, 2, lambda mutant: mutant.model, lambda mutant: mutant.what)
)
def test_a_broken_variant_is_found(mutant: Mutant) -> None:
    sound = headers.form(mutant.model)
    broken = Broken(deepcopy(sound.config), dict(sound.tensors))
    mutant.change(broken)
    found = judged(HeaderSet(broken.config, broken.tensors, 1))
    assert {
        f.rule for f in found if (f.rule, f.where) not in _sound(mutant.model)
    } & mutant.rules, found
