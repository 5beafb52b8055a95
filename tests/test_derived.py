"""Families that are read from transformers' classes: the package's own descriptions, and the process
that describes another config."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import Model, run_cli, tensor
from header_checkpoints import checkpoint

from qconvert.core import own_process
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.family import Family, role_index
from qconvert.core.roles import Kind
from qconvert.layouts.derived import find, transformers_class
from qconvert.layouts.derived.description import family_of, parsed
from qconvert.layouts.derived.find import derive, family_for, representatives
from qconvert.layouts.derived.kinds import Parameter, kind_of
from qconvert.layouts.derived.transformers_class import kind
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan, run_passes
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder
from qconvert.validators.headers.counts import counts
from qconvert.validators.headers.shapes import shapes as shape_rules

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
}  # fmt: skip


CLASSES = Path(str(resources.files("qconvert.layouts.derived"))) / "classes"


def mixtral_names(layers: int = 2) -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield from (f"{at}.self_attn.{one}_proj.weight" for one in "qkvo")
        yield from (f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight")
        yield f"{at}.block_sparse_moe.gate.weight"
        for expert in range(2):
            yield from (f"{at}.block_sparse_moe.experts.{expert}.w{n}.weight" for n in (1, 2, 3))


def test_a_class_of_the_package_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_run", None)
    family = family_for(MIXTRAL, mixtral_names())
    index = role_index(family, MIXTRAL, mixtral_names())
    assert (family.name, index.unknown, index.absent()) == ("mixtral", (), [])
    at = "model.layers.1.block_sparse_moe"
    # w2 is down (transformers 5.17, conversion_mapping.py, "mixtral").
    kinds = [index.kind(f"{at}.experts.1.w{n}.weight") for n in (1, 2, 3)]
    assert kinds == [Kind.EXPERT_GATE, Kind.EXPERT_DOWN, Kind.EXPERT_UP]
    assert index.kind(f"{at}.gate.weight") is Kind.ROUTER
    assert index.dims.num_experts == 2
    assert index.dims.moe_intermediate_size == 96
    assert index.dims.groups["moe"] == (0, 1)


@pytest.mark.parametrize(
    "lacking",
    [
        "model.layers.1.block_sparse_moe.experts.1.w3.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ],
)
def test_what_a_block_lacks_is_missed(lacking: str) -> None:
    names = [name for name in mixtral_names() if name != lacking]
    family = family_for(MIXTRAL, names)
    assert role_index(family, MIXTRAL, names).absent() == [lacking]


def test_buffers_of_old_repos_are_of_their_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_run", None)
    buffers = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(2)]
    names = [*mixtral_names(), *buffers]
    index = role_index(family_for(MIXTRAL, names), MIXTRAL, names)
    assert (index.unknown, index.absent()) == ((), [])
    assert [(index.kind(name), index.places[name].layer) for name in buffers] == [
        (Kind.BUFFER, 0), (Kind.BUFFER, 1),
    ]  # fmt: skip


# Names and what each is: the text model by a file of `layouts/`, the tower by the class that holds it; a
# list of unlike modules, of which few have a bias; experts of a tower, whose layers differ.
TOWERS: dict[str, tuple[str, dict[str, Kind]]] = {
    "minicpmv4_7": ("qwen3_5_text", {
        "model.language_model.layers.3.self_attn.k_proj.weight": Kind.KEY,
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight": Kind.VISION,
        "model.merger.mlp.0.linear_1.weight": Kind.VISION,
    }),
    "unlimited_ocr": ("", {
        "model.sam_model.neck.0.weight": Kind.CONV, "model.sam_model.neck.1.bias": Kind.CONV,
        "model.sam_model.neck.1.weight": Kind.CONV, "model.sam_model.neck.2.weight": Kind.CONV,
    }),
    "dots3_note": ("", {
        "vision_encoder.blocks.1.mlp.experts.0.fc1.weight": Kind.VISION,
        "vision_encoder.blocks.3.mlp.experts.0.fc1.weight": Kind.VISION,
        "vision_encoder.blocks.3.mlp.experts.1.fc1.weight": Kind.VISION,
    }),
    "inkling2": ("", {"model.llm.unembed.weight": Kind.HEAD}),
}  # fmt: skip


@pytest.mark.parametrize("model_type", TOWERS)
def test_towers_and_heads_of_other_classes(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "_run", None)
    text, kinds = TOWERS[model_type]
    config: dict[str, Any] = {"model_type": model_type, "num_hidden_layers": 4}
    if text:
        config["text_config"] = {"model_type": text, "num_hidden_layers": 4}
    index = role_index(family_for(config, kinds), config, list(kinds))
    assert {name: index.kind(name) for name in kinds} == kinds
    assert not [name for name in index.absent() if "vision" in name or "sam_model" in name]


def test_experts_of_a_tower_are_counted_by_none() -> None:
    """As Dots 3 has 64 in its tower; the config's count is of the text model."""
    config = {
        "model_type": "dots3_note", "num_hidden_layers": 4,
        "text_config": {"model_type": "dots3_note_text", "n_routed_experts": 2, "num_hidden_layers": 4},
    }  # fmt: skip
    names = [
        f"{at}.mlp.experts.2.{matrix}.weight"
        for at, matrix in (("vision_encoder.blocks.3", "fc1"), ("model.layers.3", "gate_proj"))
    ]
    found = counts(Folder(checkpoint(dict.fromkeys(names, TensorType("BF16", (8, 8))), config)))
    told = [one for one in found if isinstance(one, Finding)]
    assert [one.where for one in told if one.rule == "QC019"] == names[1:]


@pytest.mark.parametrize(
    ("model_type", "more", "names", "layers"),
    [
        # A first stage of a model whose config lists the kinds of its layers alone.
        (
            "nemotron_h", {"layers_block_type": ["linear_attention", "moe"] * 2},
            ["backbone.layers.0.norm.weight", "backbone.layers.1.norm.weight"], 4,
        ),
        ("dots3_note", {}, ["model.layers.1.input_layernorm.weight",
                            "vision_encoder.blocks.5.norm_1.weight"], 2),
    ],
)  # fmt: skip
def test_layers_that_no_config_counts(
    model_type: str, more: dict[str, Any], names: list[str], layers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(find, "_run", None)
    config = {"model_type": model_type, **more}
    assert family_for(config, names).dims(config).num_layers == layers


def test_suffixes_of_encodings_are_no_part_of_a_name() -> None:
    names = [
        "model.layers.0.mlp.up_proj.weight_packed", "model.layers.3.mlp.up_proj.weight_scale",
        "model.layers.0.mlp.experts.gate_up_proj_scale_inv", "model.layers.0.linear_attn.A_log",
        "model.layers.1.mlp.down_proj.weight_scale_inv",
    ]  # fmt: skip
    assert representatives(names) == [
        "model.layers.0.linear_attn.A_log", "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight",
    ]  # fmt: skip


def test_a_model_that_no_one_knows_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_run", None)
    assert derive({"model_type": "new_moe"}, mixtral_names()) == "model_type 'new_moe' is not known"
    for foreign in ("../../mixtral", "", 'x", '):
        found = derive({"model_type": foreign}, mixtral_names())
        assert found == f"model_type {foreign!r} is not known"


def test_names_of_no_class_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of CPU kernels' tiles keeps the config of its model."""
    monkeypatch.setattr(find, "_run", None)
    found = derive(
        MIXTRAL, ["blk.0.ffn_up_exps.0.numa.0.weight", "blk.0.ffn_up_exps.0.numa.0.scale"]
    )
    assert found == "its tensors have no name that its class in transformers has"


def test_a_base_model_is_published_without_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's names, as openai-community/gpt2 has them, and no process."""
    monkeypatch.setattr(find, "_run", None)
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64}
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    names = [f"{name}.{end}" for name in ("wte", "wpe") for end in ("weight",)]
    names += [f"ln_f.{end}" for end in ("weight", "bias")]
    for layer in range(2):
        names += [f"h.{layer}.{part}.{end}" for part in parts for end in ("weight", "bias")]
    family = family_for(config, names)
    index = role_index(family, config, names)
    assert (family.name, family.class_name, index.unknown) == ("gpt2", "GPT2LMHeadModel", ())
    assert index.kind("wte.weight") is Kind.EMBEDDING
    assert index.kind("wpe.weight") is Kind.POSITION
    lost = "h.1.attn.c_proj.weight"
    assert role_index(family, config, [n for n in names if n != lost]).absent() == [lost]


@pytest.mark.big
def test_other_names_are_asked_of_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the answer is kept. transformers reads w1 to w3 under the class's own name of the block,
    too; the package's description, of what it saves, does not say so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = MIXTRAL | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    names = [name.replace("block_sparse_moe", "mlp") for name in mixtral_names()]
    family = derive(config, names)
    assert isinstance(family, Family)
    index = role_index(family, config, names)
    assert (index.unknown, index.absent()) == ((), [])
    assert index.kind("model.layers.1.mlp.experts.0.w3.weight") is Kind.EXPERT_UP
    (kept,) = (tmp_path / "qconvert" / "families").iterdir()
    assert json.loads(kept.read_bytes())["class"] == "MixtralForCausalLM"
    monkeypatch.setattr(find, "_run", None)
    assert isinstance(derive(config, names), Family)


def test_a_class_that_cannot_be_built_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "_cache", lambda: tmp_path)
    monkeypatch.setattr(find, "_run", lambda request: {"cannot": "ValueError: no heads"})
    found = derive({"model_type": "dbrx"}, mixtral_names())
    assert isinstance(found, str)
    assert found.endswith("cannot build model_type 'dbrx' (ValueError: no heads)")


def test_experts_that_are_not_told_apart_are_refused_with_the_cause(tmp_path: Path) -> None:
    at = "model.layers.0"
    stacks = {
        f"{at}.mlp.experts.gate_up_proj": tensor("BF16", 2, 64, 192),
        f"{at}.mlp.experts.down_proj": tensor("BF16", 2, 96, 64),
        f"{at}.input_layernorm.weight": tensor("BF16", 64),
    }
    config = MIXTRAL | {"model_type": "gpt_oss", "num_hidden_layers": 1}
    source = Model(config, stacks).write(tmp_path / "source", 1)
    refused = run_cli("w4a16", source, tmp_path / "out", "--rtn")
    assert refused.code == 1
    assert "its experts interleave the rows of gate and up" in refused.err


@pytest.mark.parametrize(
    ("parameter", "kind"),
    [
        (Parameter("m.layers.0.attn.q_proj.weight", (8, 8), ("M", "LlamaAttention", "Linear"), True),
         Kind.QUERY),
        (Parameter("m.layers.0.mix.q_proj.weight", (8, 8), ("M", "KimiLinearAttention", "Linear"), True),
         Kind.LINEAR),
        (Parameter("m.layers.0.mlp.w2.weight", (8, 8), ("M", "FeedForwardMLP", "Linear"), True),
         Kind.DOWN),
        (Parameter("m.layers.0.mlp.w2.weight", (8, 8), ("M", "Other", "Linear"), True), Kind.LINEAR),
        (Parameter("m.wte.weight", (8, 8), ("M", "Embedding"), embedding=True), Kind.POSITION),
        (Parameter("m.c_attn.weight", (8, 24), ("M", "Conv1D")), Kind.UNKNOWN),
        (Parameter("m.blocks.0.qkv.weight", (8, 8), ("M", "Attention", "Linear"), True, language=False),
         Kind.VISION),
        (Parameter("m.mlp.experts.up_bias", (4, 8), ("M", "X"), num_experts=4), Kind.EXPERT_UNKNOWN),
    ],
    ids=lambda value: value.name if isinstance(value, Parameter) else "",
)  # fmt: skip
def test_the_owner_says_what_a_parameter_is(parameter: Parameter, kind: Kind) -> None:
    assert kind_of(parameter) is kind


def test_two_modules_of_one_layer_are_two_roles() -> None:
    """longcat_flash has two attentions a layer: as one role, one of them would be lost."""
    names = [f"m.layers.0.attn.{n}.{p}_proj.weight" for n in (0, 1) for p in "qo"]
    family = family_of(
        parsed(
            {
                "model_type": "x", "class": "X", "keys": {}, "stacked_transposed": False,
                "experts_unread": "", "not_on_cpus": "",
                "modules": {
                    "m.layers.{L}.attn.{I}.q_proj": "QUERY 1", "m.layers.{L}.norm.{I}": "NORM 1",
                    "m.layers.{L}.attn.{I}.o_proj": "OUTPUT 1",
                },
            }
        ),
        [*names, "m.layers.0.norm.0.weight"],
    )  # fmt: skip
    index = role_index(family, {"num_hidden_layers": 1}, [*names, "m.layers.0.norm.0.weight"])
    assert (index.unknown, index.absent()) == ((), [])
    assert index.kind("m.layers.0.norm.0.weight") is Kind.NORM
    assert {index.kind(name) for name in names} == {Kind.LINEAR}
    assert len({index.places[name].role for name in names}) == len(names)


def test_hand_written_families_come_first() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 2, "hidden_size": 8}
    family = family_for(config, ["model.layers.0.input_layernorm.weight"])
    assert (family.name, family.class_name) == ("qwen3_moe", "")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        ({"text_config": {"num_experts": 10**6}}, "num_experts 1000000"),
        ({"layer_types": ["full_attention"] * 5000}, "5000 entries of layer_types"),
    ],
    ids=["layers", "experts", "a list"],
)
def test_a_class_of_no_models_size_is_not_built(
    setting: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "_run", None)
    found = derive({"model_type": "dbrx"} | setting, mixtral_names())
    assert found == f"model_type 'dbrx' is not known, and its class is not built with {said}"


def test_a_class_that_takes_too_long_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of CPU, not of time by the clock."""
    (tmp_path / "transformers.py").write_text("while True:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(find, "_SECONDS", 1)
    assert find._run("{}") == {"failed": "it took more than 1 s of CPU"}


# What a process does in place of describing the class, and what is said of it.
ENDS = {
    "killed": ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL, as where the machine's memory"),
    "ended": ("import os; os.kill(os.getpid(), 15)", "killed by SIGTERM"),
    "crashed": ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
    "memory": ("raise MemoryError", "it had too little memory: MemoryError"),
    "torch": ("raise RuntimeError('DefaultCPUAllocator: not enough memory')", "too little memory"),
    "import": ("import no_such_module", "what it imports is not as installed: ModuleNotFoundError"),
    "exit": ("raise SystemExit(3)", "exit status 3: no message"),
    "torn": ("print('{', end='')", "the class's description"),
}  # fmt: skip


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have the class's process run this."""
    start = {"args": [sys.executable, "-I", "-c", code], "env": dict(os.environ)}
    monkeypatch.setattr(own_process, "python", lambda *words, **variables: start)


@pytest.mark.parametrize("end", ENDS)
def test_only_answers_are_kept(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that did not answer says nothing of the class: the next one may."""
    monkeypatch.setattr(find, "_cache", lambda: tmp_path / "kept")
    code, said = ENDS[end]
    with monkeypatch.context() as once:
        instead(once, code)
        found = derive({"model_type": "dbrx"}, mixtral_names())
    assert isinstance(found, str)
    assert said in found
    assert found.endswith("run the command again")
    assert "cannot build" not in found
    assert not (tmp_path / "kept").exists()
    instead(monkeypatch, f"print({json.dumps(json.dumps(ANSWER))})")
    assert isinstance(derive({"model_type": "dbrx"}, mixtral_names()), Family)
    monkeypatch.setattr(find, "_run", None)
    assert isinstance(derive({"model_type": "dbrx"}, mixtral_names()), Family)


ANSWER = json.loads((CLASSES / "mixtral.json").read_bytes())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"class": "Acme"}', '{"modules": 3}'])
def test_a_kept_file_without_an_answer_is_written_anew(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine leaves it that lost its power, or whose disk was full."""
    monkeypatch.setattr(find, "_cache", lambda: tmp_path)
    monkeypatch.setattr(find, "_run", lambda request: ANSWER)
    assert isinstance(derive({"model_type": "dbrx"}, mixtral_names()), Family)
    (kept,) = tmp_path.iterdir()
    kept.write_text(text)
    assert isinstance(derive({"model_type": "dbrx"}, mixtral_names()), Family)
    assert json.loads(kept.read_bytes()) == ANSWER


@pytest.mark.parametrize("cause", [MemoryError(), ImportError("no mamba_ssm"), OSError(5, "disk")])
def test_what_the_machine_lacks_is_no_answer_about_a_class(
    cause: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(values: Any, names: Any) -> Any:
        try:
            raise cause
        except Exception as error:
            raise transformers_class.CannotBuild(str(error)) from error

    monkeypatch.setattr(transformers_class, "described", fails)
    monkeypatch.setattr(resource, "setrlimit", lambda *limits: None)
    monkeypatch.setattr(sys, "argv", ["transformers_class", "1", "1"])
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"config": {}}'))
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with pytest.raises(type(cause)):
        transformers_class.main()
    assert "cannot" not in capsys.readouterr().out


def test_experts_under_names_that_a_class_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_run", lambda request: {"failed": "not in this test"})
    kind = TensorType("BF16", (64, 64))
    at = re.compile(r"experts\.(\d)\.(w\d)")
    names = {at.sub(r"experts.\2.\1", name): kind for name in mixtral_names()}
    plan = Plan.identity(checkpoint(names, MIXTRAL))
    read = r"lacks 'model\.layers\.0\.block_sparse_moe\.experts\.0\.w1\.weight'"
    with pytest.raises(PlanError, match=rf"experts\.w1\.0\.weight' \(and 11 more\).* {read}"):
        plan.check()


def test_experts_that_a_pass_takes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a class does not save, of tensors that it does: runtimes read them."""
    monkeypatch.setattr(find, "_run", lambda request: {"failed": "not in this test"})
    config = {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 1,
        "num_local_experts": 2, "hidden_size": 64, "intermediate_size": 32,
        "interleave_moe_layer_step": 1,
    }  # fmt: skip
    at = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (128, 64), "model.norm.weight": (64,), "lm_head.weight": (128, 64),
        **{f"{at}.self_attn.{one}_proj.weight": (64, 64) for one in "qkvo"},
        f"{at}.input_layernorm.weight": (64,), f"{at}.post_attention_layernorm.weight": (64,),
        f"{at}.feed_forward.router.weight": (2, 64),
        f"{at}.feed_forward.experts.gate_up_proj": (2, 64, 64),
        f"{at}.feed_forward.experts.down_proj": (2, 32, 64),
        **{f"{at}.feed_forward.shared_expert.{one}_proj.weight": (32, 64) for one in ("gate", "up")},
        f"{at}.feed_forward.shared_expert.down_proj.weight": (64, 32),
    }  # fmt: skip
    stored = {name: TensorType("BF16", shape) for name, shape in shapes.items()}
    made = run_passes(Plan.identity(checkpoint(stored, config)), [ExpertsToW4A16(group_size=32)])
    assert f"{at}.feed_forward.experts.1.down_proj.weight_packed" in made.tensors


# --- Towers --------------------------------------------------------------------------------------

# Components of names of towers, and of what joins one to the language model.
_SEES = re.compile(
    r"(^|[._])(vision|visual|image|img|audio|speech|tower|patch|projector|multi_modal|mm|qformer"
    r"|perceiver|resampler|connector|aligner)([._]|$)"
)
# Experts of the decoder's layers that vision tokens are sent to; runtimes load them as the others.
_OF_TOKENS = ".mlp.vision_moe.experts."


def test_nothing_in_a_tower_is_quantized() -> None:
    """By what the descriptions call a tower's, and by names, in every class that there is."""
    wrong = [
        f"{file.stem}: {name}"
        for file in sorted(CLASSES.iterdir())
        for name, module in parsed(json.loads(file.read_bytes())).modules.items()
        if module.kind.quantizable and _OF_TOKENS not in name
        and (module.tower or _SEES.search(name))
    ]  # fmt: skip
    assert wrong == []


TOWER = "model.vision.layers.0"
MADE_OF: dict[str, tuple[str, tuple[int, ...], list[str], list[str], list[str]]] = {
    "qkv": ("attn.q_proj.weight", (8, 8), ["Chunk"], ["qkv.weight"],
            ["q_proj.weight", "k_proj.weight", "v_proj.weight"]),
    # Of parts of their own sizes, as Sarvam's `query_key_value` (transformers 5.24).
    "grouped": ("attn.q_proj.weight", (8, 8), ["Split"], ["query_key_value"],
                ["q_proj", "k_proj", "v_proj"]),
    "gate_up": ("mlp.gate_proj.weight", (8, 8), ["Chunk"], ["gate_up.weight"],
                ["gate_proj.weight", "up_proj.weight"]),
    "experts": ("mlp.experts.gate_up_proj", (4, 16, 8), ["MergeModulelist", "Concatenate"],
                ["gate_proj.weight", "up_proj.weight"], ["gate_up_proj"]),
    "transposed": ("mlp.experts.down_proj", (4, 8, 8), ["Transpose"], ["down_proj"], ["down_proj"]),
    "parts": ("attn.qkv_proj.weight", (24, 8), ["Concatenate"],
              ["q_proj.weight", "k_proj.weight", "v_proj.weight"], ["qkv_proj.weight"]),
}  # fmt: skip


@pytest.mark.parametrize("form", MADE_OF)
@pytest.mark.parametrize("language", [True, False])
def test_a_conversion_tells_no_kind_in_a_tower(form: str, language: bool) -> None:
    """Of whatever published tensors transformers makes the parameter."""
    end, shape, ops, sources, targets = MADE_OF[form]
    name = f"{TOWER}.{end}"
    parameter = Parameter(
        name, shape, ("Model", "Layer", "VisionAttention", "Linear"), linear=len(shape) == 2,
        language=language, num_experts=4,
    )  # fmt: skip
    operations = [type(op, (), {"dim": 1})() for op in ops]
    converter = SimpleNamespace(
        operations=operations, source_patterns=sources, target_patterns=targets
    )
    found: Any = SimpleNamespace(
        read=lambda name: (name, converter, 0), parameters={name: parameter}, experts=None
    )
    told = kind(found, name)
    assert told is not None
    assert (told is Kind.VISION) is not language
    assert told.quantizable is language
    assert language or kind_of(parameter) is Kind.VISION


def test_the_head_of_a_model_within_another() -> None:
    """NemotronH_Omni_Reasoning_V3 (transformers 5.24) says that it has no head, and holds a model that
    has one."""

    def model(head: object) -> Any:
        return SimpleNamespace(get_output_embeddings=lambda: head)

    head, other = object(), object()
    outer, inner, plain = model(None), model(head), object()
    modules = {"": outer, "vision_model": plain, "language_model": inner}
    assert transformers_class._head(outer, modules) is head
    assert transformers_class._head(model(other), {"language_model": inner}) is other
    assert transformers_class._head(outer, {"": outer}) is None


@pytest.mark.big
def test_a_number_that_the_class_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A projector published as `nn.Sequential` numbers it (`mlp1.1`), and its class names it."""
    shape = {"mlp1.0.weight": (8,), "mlp1.1.weight": (8, 8)}
    layer = "model.layers.{}.self_attn.o_proj.weight"
    own = {"mlp1.0.weight": "projector.norm.weight", "mlp1.1.weight": "projector.linear_1.weight"}
    owners = ("Model", "Attention", "Linear")
    numbered = [layer.format(n) for n in (0, 1)]
    parameters = {n: Parameter(n, (8, 8), owners, linear=True) for n in numbered}
    for name, target in own.items():
        parameters[target] = Parameter(target, shape[name], owners, linear=True, language=False)
    config = SimpleNamespace(
        model_type="own", get_text_config=lambda: SimpleNamespace(to_dict=dict)
    )
    found: Any = transformers_class.Class(
        SimpleNamespace(config=config),
        parameters,
        {},
        [],
        [],
        {"hidden_size": 8, "num_layers": 2},
        None,
    )
    monkeypatch.setattr(transformers_class.Class, "read", lambda self, n: (own.get(n, n), None, 0))
    monkeypatch.setattr(transformers_class.Class, "published", lambda self: [*own, *numbered])
    monkeypatch.setattr(transformers_class, "build", lambda values: found.model)
    monkeypatch.setattr(transformers_class, "read_class", lambda model: found)
    monkeypatch.setattr(transformers_class, "why_not_run", lambda model: "")
    answer = transformers_class.described({}, None)
    assert answer["layers"] == {"mlp1.{L}": [0, 1], "model.layers.{L}.self_attn.o_proj": [0, 1]}
    family = family_of(parsed(answer), [*own, *numbered])
    index = role_index(family, {"num_hidden_layers": 2}, own)
    assert index.unknown == ()


def test_tables_of_a_class_of_its_own_have_sizes_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Molmo2 stores added words apart, and Dory a scale for each logit (transformers 5.24): no key of
    a config states how many. A weight has the vocabulary's size."""
    answer = {
        "class": "Own", "model_type": "own", "keys": {}, "stacked_transposed": False,
        "experts_unread": "", "not_on_cpus": "",
        "modules": {"wte.embedding": "EMBEDDING 0", "wte.new_embedding": "EMBEDDING 0",
                    "lm_head": "HEAD 0", "lm_head.logit_scale": "HEAD 0"},
    }  # fmt: skip
    monkeypatch.setattr(find, "derive", lambda config, names: family_of(parsed(answer), names))
    shapes = {"wte.embedding": (32, 8), "wte.new_embedding": (4, 8), "lm_head.logit_scale": (32,)}
    config = {"model_type": "own", "hidden_size": 8, "vocab_size": 32}
    for rows, wrong in ((32, []), (16, ["lm_head.weight"])):
        every = {**shapes, "lm_head.weight": (rows, 8)}
        stored = {name: TensorType("BF16", shape) for name, shape in every.items()}
        made = shape_rules(Folder(checkpoint(stored, config)))
        found = [one for one in made if isinstance(one, Finding)]
        assert [f.where for f in found if f.rule == "QC026"] == wrong


@pytest.mark.parametrize("name", ["model.norm", "backbone.norm_f", "transformer.ln_f"])
def test_the_last_norm_is_known_by_any_of_its_names(name: str) -> None:
    """A stage of a split has it."""
    answer = {
        "class": "Own", "model_type": "own", "keys": {}, "stacked_transposed": False,
        "experts_unread": "", "not_on_cpus": "", "modules": {name: "NORM 0"},
    }  # fmt: skip
    family = family_of(parsed(answer), [f"{name}.weight"])
    assert [role.name for role in family.roles] == ["norm"]
