"""Rules on headers, configs and side files: what each looks at, and that none cries wolf over published
repos. That each is provoked by a broken repo is tests/test_corpus.py's to show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gdn_models
import headers
import pytest
from checkpoints import bf16_moe, edit_json, fp8_moe, run_cli, tensor, without
from sampled import sampled

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.checkpoint.prepared import QUANT_METHOD
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError
from qconvert.core.family import vision_config
from qconvert.core.graph import Source
from qconvert.core.names import parse
from qconvert.validation.findings import Finding
from qconvert.validation.runner import (
    _KINDS,
    Folder,
    Level,
    NotChecked,
    Request,
    validate_folder,
    validators,
    validators_of,
)
from qconvert.validators.formats.packed import PackedInts, ints_of
from qconvert.validators.headers import (
    counts,
    manifest_claims,
    projections,
    quantization_config,
    shapes,
    side_files,
    structure,
)
from qconvert.validators.reading.quantization import Listed, ignored, judged, targets

MODULES = (
    structure, projections, counts, shapes, quantization_config, manifest_claims, side_files,
)  # fmt: skip
HEAD = "lm_head.weight"


def written(model: str, folder: Path) -> Path:
    """A published model with the files that its repo has beside what `headers` writes."""
    headers.write_sparse(headers.few(model), folder)
    for file in ("preprocessor_config.json", "configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / file).write_text("{}\n")
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Checkpoint]:
    root = tmp_path_factory.mktemp("published")
    found = {}
    for model in headers.names():
        (root / model).mkdir()
        found[model] = Checkpoint.open(written(model, root / model))
    return found


def findings(checkpoint: Checkpoint, modules: Iterable[Any] = MODULES) -> list[Finding]:
    found: list[Finding] = []
    alone = (one for one in validators_of(modules) if one.needs <= {"model", "files"})
    for validator in alone:
        try:
            made = validator(Folder(checkpoint))
            found += [one for one in made if isinstance(one, Finding)]
        except NotChecked:
            assert validator is manifest_claims.manifest_claims
    return found


def changed(checkpoint: Checkpoint, **types: TensorType | None) -> Checkpoint:
    """With tensors of other types, and more tensors; None takes one away."""
    sources = dict(checkpoint.sources)
    any_source = next(iter(sources.values()))
    for name, kind in types.items():
        if kind is None:
            del sources[name]
        else:
            sources[name] = replace(sources.get(name, any_source), name=name, type=kind)
    return replace(checkpoint, sources=sources)


def configured(checkpoint: Checkpoint, **config: Any) -> Checkpoint:
    return replace(checkpoint, config={**checkpoint.config, **config})


# --- Published repos -----------------------------------------------------------------------------


# Validators of every kind of folder, contrib's too: none but these can meet a folder at `headers`.
_OF_HEADERS = [v for v in validators() if v.needs <= set(_KINDS) - {"runtime"}]


def all_rules(checkpoint: Checkpoint) -> set[str]:
    """The rules that find anything, each asked whether or not the folder is of its kind."""
    found = set()
    for validator in _OF_HEADERS:
        try:
            found |= {f.rule for f in validator(Folder(checkpoint)) if isinstance(f, Finding)}
        except NotChecked:
            continue
    return found


_PREPARED_RULES = {"QC105", "QC106", "QC107", "QC108", "QC109"}


@pytest.mark.parametrize("model", sampled(headers.names()))
def test_no_validator_fails_on_a_folder_of_another_kind(
    model: str, published: Mapping[str, Checkpoint]
) -> None:
    """As it is, and with experts in other names: as Inkling publishes them, as runtimes have them."""
    whole = published[model]
    assert not all_rules(whole) & _PREPARED_RULES
    for dtype in ("BF16", "U8"):
        for parts in (
            {"w13_weight", "w2_weight"},
            {"w13_weight", "w13_weight.scale", "w2_weight_packed"},
        ):
            at = "model.llm.layers.0.mlp.experts"
            more = {
                f"{at}.{part}": Source(f"{at}.{part}", TensorType(dtype, (2, 8, 4)), 0, 4096)
                for part in parts
            }
            foreign = replace(whole, sources={**whole.sources, **more})
            assert not all_rules(foreign) & _PREPARED_RULES
            alone = replace(whole, sources=more, config={"model_type": "a class of none"})
            assert not all_rules(alone) & _PREPARED_RULES


def test_a_marker_of_prepared_experts_without_any(published: Mapping[str, Checkpoint]) -> None:
    block = {"quant_method": QUANT_METHOD, "layout": {}, "replaced": []}
    marked = configured(published["qwen3.5-0.8b"], quantization_config=block)
    assert "QC106" in all_rules(marked)


@pytest.mark.parametrize("model", sampled(headers.names()))
def test_published_repos_have_no_finding(model: str, published: Mapping[str, Checkpoint]) -> None:
    assert findings(published[model]) == []
    assert validate_folder(published[model].root).findings == []


def test_published_repos_with_drafts_left_out(published: Mapping[str, Checkpoint]) -> None:
    """transformers leaves drafts out on saving. The counts that configs state are a warning; of
    Qwen3-Next's, which states none, nothing is said."""
    said = {}
    for model in ("deepseek-v3", "glm-4.5-air", "qwen3-next-80b-a3b", "qwen3.5-0.8b"):
        whole = published[model]
        family, dims = whole.role_index.family, whole.role_index.dims
        gone = dict.fromkeys(n for n in whole if family.is_mtp(n, dims))
        said[model] = [(f.rule, f.severity) for f in findings(changed(whole, **gone))]
    draft = [("QC023", "warning")]
    assert said == {
        "deepseek-v3": draft, "glm-4.5-air": draft, "qwen3-next-80b-a3b": [], "qwen3.5-0.8b": draft,
    }  # fmt: skip


@pytest.mark.parametrize("model", ["deepseek-v3", "glm-4.5-air", "qwen3.5-35b-a3b"])
def test_a_draft_layer_lacks_nothing_that_the_model_has(
    model: str, published: Mapping[str, Checkpoint]
) -> None:
    """Lose the draft layers' tensors of one role after the other. What drafts may share with the model
    is none of them."""
    whole = published[model]
    role_index = whole.role_index
    roles = {p.role for p in role_index.places.values() if p.role.name.startswith("mtp.")}
    assert len(roles) > 15
    for role in roles:
        gone = [n for n, place in role_index.places.items() if place.role == role]
        rules = {f.rule for f in findings(changed(whole, **dict.fromkeys(gone)))}
        shared = role.name in ("mtp.embed_tokens", "mtp.shared_head.head")
        experts = ".experts." in role.module
        assert rules == (set() if shared else {"QC018"} if experts else {"QC023"}), role.name


# --- Shapes --------------------------------------------------------------------------------------

_JUDGED = [
    "deepseek-v3",
    "glm-4.5-air",
    "kimi-k2-thinking",
    "qwen3-30b-a3b-fp8",
    "qwen3-next-80b-a3b",
    "qwen3.5-27b-fp8",
    "qwen3.5-35b-a3b",
]


@pytest.mark.parametrize("model", _JUDGED)
def test_every_weight_is_held_to_the_config(
    model: str, published: Mapping[str, Checkpoint]
) -> None:
    """One tensor of each role gets a last dimension more: found, but for what no config states."""
    whole = published[model]
    first: dict[str, str] = {}
    for name, place in whole.role_index.places.items():
        if place.parameter in ("", "weight", "weight_packed"):
            first.setdefault(place.role.name, name)
    wider = {}
    for name in first.values():
        kind = whole[name].type
        wider[name] = TensorType(kind.dtype, (*kind.shape[:-1], kind.shape[-1] + 1))
    found = findings(changed(whole, **wider), [shapes])
    known = {first[role] for role in first if not role.startswith("vision.")}
    assert known - {f.where for f in found if f.rule == "QC026"} == set()


@pytest.mark.parametrize("model", headers.names())
def test_attention_is_held_to_the_config_s_heads(
    model: str, published: Mapping[str, Checkpoint]
) -> None:
    """Another number of heads: all that has a row or column for each is found, and nothing is where
    the config does not say how large a head is."""
    whole = published[model]
    latent = "kv_lora_rank" in whole.config
    nested = "text_config" in whole.config
    text = dict(whole.config["text_config"] if nested else whole.config)

    def with_text(text: Mapping[str, Any]) -> Checkpoint:
        config = {**whole.config, "text_config": text} if nested else text
        return replace(whole, config=config)

    text["num_attention_heads"] *= 2
    text["num_key_value_heads"] *= 2
    at = {
        parse(f.where).template.partition("self_attn.")[2]
        for f in findings(with_text(text), [shapes])
    }
    heads = {"q_b_proj", "kv_b_proj"} if latent else {"q_proj", "k_proj", "v_proj"}
    biases = {f"{name}.bias" for name in heads} if model == "glm-4.5-air" else set()
    assert at == {f"{name}.weight" for name in heads | {"o_proj"}} | biases
    for size in ("head_dim", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"):
        text.pop(size, None)
    assert findings(with_text(text), [shapes]) == []


@pytest.mark.parametrize("model", ["glm-4.5-air", "kimi-k2-thinking", "qwen3.5-35b-a3b"])
def test_experts_of_another_width(model: str, published: Mapping[str, Checkpoint]) -> None:
    """Half of hidden_size, which no key of the config states: sound beside linears that lead there and
    back, whatever they are called."""
    whole = published[model]
    hidden = whole.role_index.dims.hidden_size
    narrow, linears = dict[str, TensorType](), dict[str, TensorType]()
    for name, source in whole.items():
        block, _, rest = name.partition(".experts.")
        kind, parameter = source.type, parse(name).template.rpartition(".")[2]
        if not rest or parameter == "weight_shape":
            continue
        axis = -2 if "down_proj" in rest else -1
        shape = list(kind.shape)
        shape[axis] //= 2
        narrow[name] = TensorType(kind.dtype, tuple(shape))
        linears[f"{block}.narrowing.weight"] = TensorType("BF16", (hidden // 2, hidden))
        linears[f"{block}.widening.weight"] = TensorType("BF16", (hidden, hidden // 2))
    assert findings(changed(whole, **narrow, **linears), [shapes]) == []
    found = findings(changed(whole, **narrow), [shapes])
    assert {f.where for f in found if f.rule == "QC026"} == {n for n in narrow if "scale" not in n}
    linears = {n: TensorType(k.dtype, (*k.shape, 1)) for n, k in linears.items()}
    assert {f.rule for f in findings(changed(whole, **narrow, **linears), [shapes])} == {"QC026"}


@pytest.mark.parametrize("swap", [False, True])
def test_transposed_stacks_may_lie_either_way(
    swap: bool, published: Mapping[str, Checkpoint]
) -> None:
    """What transformers saves of Qwen3-VL has rows first, what is published columns."""
    whole = published["qwen3-vl-30b-a3b"]
    stacks = {n: s.type for n, s in whole.items() if ".experts." in n}
    turned = {
        n: TensorType(k.dtype, (k.shape[0], k.shape[2], k.shape[1])) for n, k in stacks.items()
    }
    assert findings(changed(whole, **(turned if swap else {}))) == []
    longer = {n: TensorType(k.dtype, (k.shape[0] + 1, *k.shape[1:])) for n, k in stacks.items()}
    rules = [f.rule for f in findings(changed(whole, **longer))]
    assert rules == ["QC026"] * len(stacks)


@pytest.mark.parametrize(
    ("part", "kind", "rule"),
    [
        ("weight_packed", TensorType("I32", (2048, 896, 1)), "QC026"),
        ("weight_scale", TensorType("BF16", (1024, 224)), "QC027"),
        ("weight_scale", TensorType("I32", (2048, 224)), "QC027"),
        ("weight_scale", TensorType("BF16", (2048, 112)), "QC038"),
        ("weight_shape", TensorType("BF16", (2,)), "QC027"),
        ("weight_shape", TensorType("I64", (3,)), "QC027"),
    ],
)
def test_packed_weights(
    part: str, kind: TensorType, rule: str, published: Mapping[str, Checkpoint]
) -> None:
    name = f"model.layers.5.mlp.experts.1.up_proj.{part}"
    found = findings(changed(published["kimi-k2-thinking"], **{name: kind}))
    assert rule in {f.rule for f in found}
    assert {f.where for f in found} == {name}


def test_what_int4_configs_state(tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"

    def stated(*weights: Mapping[str, Any]) -> PackedInts | None:
        """By a config that has a block for each, nested and not."""
        model = bf16_moe()
        blocks = [
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4, **one}}},
            }
            for one in weights
        ]
        model.config["quantization_config"] = blocks[0]
        for one in blocks[1:]:
            model.config["text_config"] = {"quantization_config": one}
        return ints_of(Checkpoint.open(model.write(tmp_path / str(weights))), module)

    by_group, by_row = {"strategy": "group", "group_size": 32}, {"strategy": "channel"}
    assert stated(by_group) == PackedInts(4, 32, True, False)
    assert stated(by_row) == PackedInts(4, None, True, False)
    assert stated(by_group, by_row) is None
    assert stated({"strategy": "group", "group_size": "32"}) is None


# --- Quantization blocks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "module", "named"),
    [
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.3.mlp.gate_up_proj", False),
        ("visual", "model.visual.blocks.0.attn.qkv", True),
        ("model.layers.3", "model.layers.3.self_attn.q_proj", True),
        ("model.layers.3", "model.layers.31.self_attn.q_proj", False),
        ("lm_head", "lm_head", True),
        ("re:.*mlp.*", "model.layers.3.mlp.gate", True),
    ],
)
def test_fp8_lists_match_by_segments(entry: str, module: str, named: bool) -> None:
    assert Listed("fp8", (entry,)).names(module) is named


@pytest.mark.parametrize(
    ("entry", "module", "named"),
    [
        ("lm_head", "lm_head", True),
        ("self_attn.q_proj", "model.layers.0.self_attn.q_proj", False),
        (r"re:.*mlp\.(gate|up)_proj.*", "model.layers.0.mlp.up_proj", True),
        (r"re:.*mlp\.(gate|up)_proj.*", "model.layers.1.mlp.experts.0.up_proj", False),
        (r"re:mlp", "model.mlp", False),
        ("re:(", "model.mlp", False),
    ],
)
def test_compressed_tensors_lists_match_whole_names(entry: str, module: str, named: bool) -> None:
    assert Listed("compressed-tensors", (entry,)).names(module) is named


def test_modelopt_lists_are_shell_patterns() -> None:
    listed = Listed("modelopt", ("lm_head", "model.layers.3.self_attn*", "*.gate"))
    for module in ("lm_head", "model.layers.3.self_attn.q_proj", "model.layers.1.mlp.gate"):
        assert listed.names(module)
    assert not listed.names("model.layers.4.self_attn.q_proj")


def test_which_key_and_block_count() -> None:
    both = {"quant_method": "fp8", "ignored_layers": ["a"], "modules_to_not_convert": ["b"]}
    assert ignored(QuantConfig("x", both)).entries == ("a",)
    theirs = QuantConfig("hf_quant_config.json", {"quant_method": "modelopt"})
    ours = QuantConfig("config.json: quantization_config", {"quant_method": "fp8"})
    assert judged([theirs, ours]) == ours
    assert judged([theirs]) == theirs
    assert judged([QuantConfig("x", {"quant_method": "gptq"})]) is None
    assert targets(ours) is None


def test_layers_in_bf16_that_the_list_names_are_sound(tmp_path: Path) -> None:
    """Some releases leave whole layers unquantized: their scales are not missing."""
    model = fp8_moe()
    listed = []
    for name in [
        n for n in model.tensors if n.startswith("model.layers.0.") and n.endswith("_inv")
    ]:
        weight = name.removesuffix("_scale_inv")
        model.tensors[weight] = tensor("BF16", *model.tensors[weight].shape)
        listed.append(weight.removesuffix(".weight"))
        del model.tensors[name]
    model.config["quantization_config"]["modules_to_not_convert"] = [*listed, "lm_head"]
    assert validate_folder(model.write(tmp_path / "a")).findings == []
    model.config["quantization_config"]["modules_to_not_convert"] = [*listed[1:], "lm_head"]
    ((rule, where),) = [
        (f.rule, f.where) for f in validate_folder(model.write(tmp_path / "b")).findings
    ]
    assert (rule, where) == ("QC035", "model.layers.0.self_attn.q_proj.weight")


def test_a_nested_block_that_says_the_same_is_sound(published: Mapping[str, Checkpoint]) -> None:
    whole = published["qwen3.5-27b-fp8"]
    block = whole.config["quantization_config"]
    text = {**whole.config["text_config"], "quantization_config": block}
    assert findings(configured(whole, text_config=text)) == []
    stale = {**block, "weight_block_size": [64, 64]}
    text["quantization_config"] = stale
    assert {f.rule for f in findings(configured(whole, text_config=text))} == {"QC037"}


def test_lists_that_differ_contradict(published: Mapping[str, Checkpoint]) -> None:
    whole = published["qwen3.5-27b-fp8"]
    block = {**whole.config["quantization_config"], "modules_to_not_convert": ["lm_head"]}
    text = {**whole.config["text_config"], "quantization_config": block}
    assert {f.rule for f in findings(configured(whole, text_config=text))} == {"QC037"}


@pytest.mark.parametrize("lost", ["in_proj_b", "in_proj_a", "in_proj_ba"])
def test_every_name_of_a_set_is_asked_for(lost: str, published: Mapping[str, Checkpoint]) -> None:
    whole = published["qwen3.5-27b-fp8"]
    block = whole.config["quantization_config"]
    kept = [n for n in block["modules_to_not_convert"] if n.rpartition(".")[2] != lost]
    found = findings(
        configured(whole, quantization_config={**block, "modules_to_not_convert": kept})
    )
    assert {f.rule for f in found} == {"QC035"}
    assert all(lost in f.message for f in found)
    # Runtimes that fuse ask for the parts; only some ask for the fused name as well.
    assert {f.severity for f in found} == {"warning" if lost == "in_proj_ba" else "error"}


def test_qwen3_next_needs_the_stored_name_only(published: Mapping[str, Checkpoint]) -> None:
    listed = published["qwen3-next-80b-a3b-fp8"].config["quantization_config"]
    names = {n.rpartition(".")[2] for n in listed["modules_to_not_convert"]}
    assert "in_proj_ba" in names
    assert "in_proj_b" not in names


def test_what_no_target_names_need_not_be_listed(published: Mapping[str, Checkpoint]) -> None:
    """compressed-tensors builds layers that no target names as they are."""
    whole = published["kimi-k2-thinking"]
    block = whole.config["quantization_config"]
    (group,) = block["config_groups"].values()

    def targeting(*named: str) -> list[Finding]:
        groups = {"group_0": {**group, "targets": list(named)}}
        changed_block = {**block, "config_groups": groups, "ignore": ["lm_head"]}
        return findings(configured(whole, quantization_config=changed_block), [quantization_config])

    experts = r"re:.*mlp\.experts\..*_proj$"
    assert targeting(experts) == []
    assert {f.rule for f in targeting("Linear")} == {"QC035"}
    some = targeting(experts, r"re:.*layers\.1\.self_attn\.o_proj$")
    assert [(f.rule, f.where) for f in some] == [
        ("QC035", "model.layers.1.self_attn.o_proj.weight")
    ]


def test_scale_names_by_method(published: Mapping[str, Checkpoint]) -> None:
    """One block of each dialect, and both under one roof: then nothing is said."""
    whole = published["qwen3.5-27b-fp8"]
    own = whole.config["quantization_config"]
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    group = {"targets": ["Linear"], "weights": weights}
    other = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}

    def rules(block: Mapping[str, Any]) -> set[str]:
        return {f.rule for f in findings(configured(whole, quantization_config=block), [structure])}

    assert rules(own) == set()
    assert rules(other) == {"QC011"}
    assert rules({**other, "linear_fp8_config": own}) == set()


# --- Prefixes, ties, counts ----------------------------------------------------------------------


def test_the_rarer_prefix_stands_out_once_a_layer(published: Mapping[str, Checkpoint]) -> None:
    whole = published["qwen3.5-0.8b"]
    old, new = "model.language_model.layers.", "model.layers."
    sources = {
        name.replace(old, new) if name.startswith((f"{old}1.", f"{old}3.")) else name: source
        for name, source in whole.sources.items()
    }
    found = findings(replace(whole, sources=sources), [structure])
    assert {f.rule for f in found} == {"QC046"}
    assert sorted(parse(f.where).layer or 0 for f in found) == [1, 3]


@pytest.mark.parametrize(
    ("root", "nested", "tied", "rules"),
    [
        (False, True, False, {"QC044"}),
        (True, False, True, {"QC044"}),
        (None, True, True, set()),
        (True, None, True, set()),
        (None, None, False, set()),
    ],
)
def test_the_root_s_flag_ties(
    root: bool | None,
    nested: bool | None,
    tied: bool,
    rules: set[str],
    published: Mapping[str, Checkpoint],
) -> None:
    """transformers 5.17 loads so what it saved of Qwen3-VL, whose text_config ties by default."""
    for model in ("qwen3-vl-30b-a3b", "qwen3.5-35b-a3b"):
        whole = published[model]
        text = {k: v for k, v in whole.config["text_config"].items() if k != "tie_word_embeddings"}
        text |= {} if nested is None else {"tie_word_embeddings": nested}
        config = {k: v for k, v in whole.config.items() if k != "tie_word_embeddings"}
        config |= {} if root is None else {"tie_word_embeddings": root}
        now = replace(whole, config={**config, "text_config": text})
        assert now.role_index.dims.tied is tied
        assert {f.rule for f in findings(now, [structure])} == rules


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ("vision_config", "depth"),
        ("text_config", "num_hidden_layers"),
        ("text_config", "mtp_num_hidden_layers"),
    ],
)
@pytest.mark.parametrize("count", [65_537, 2**63, 10**30])
def test_counts_of_no_model(
    block: str, key: str, count: int, published: Mapping[str, Checkpoint], tmp_path: Path
) -> None:
    """One finding, before a layer is listed."""
    config = dict(published["qwen3.5-0.8b"].config)
    config[block] = {**config[block], key: count}
    headers.write_sparse(replace(headers.load("qwen3.5-0.8b"), config=config), tmp_path)
    (found,) = validate_folder(tmp_path).findings
    assert (found.rule, found.severity) == ("QC001", "error")
    assert key in found.message
    assert "at most 65536" in found.message


def test_counts_of_no_tower() -> None:
    """Kimi's, by the key that its published configs have."""
    with pytest.raises(
        CheckpointError, match="vt_num_hidden_layers to be at most 65536, found 9223372036854775808"
    ):
        vision_config({"vision_config": {"vt_num_hidden_layers": 2**63}})


# --- Linear attention ----------------------------------------------------------------------------


def test_fused_without_a_manifest_is_proved_by_the_source(tmp_path: Path) -> None:
    """Nothing but the source says in which order; headers alone cannot hold it against it."""
    source = gdn_models.model()
    source.side_files["preprocessor_config.json"] = b"{}"
    out = tmp_path / "out"
    made = run_cli("fuse", source.write(tmp_path / "in"), out, "--for", "sglang", "--jobs", "1")
    assert made.code == 0, made.err
    for file in ("qconvert.json", "qconvert.receipt.jsonl"):
        (out / file).unlink()

    def said(against: Path | None, level: Level) -> list[tuple[str, str]]:
        report = validate_folder(
            out, None if against is None else str(against), request=Request(level, jobs=1)
        )
        return [(f.rule, f.severity) for f in report.findings if f.rule == "QC052"]

    assert said(None, "full") == [("QC052", "warning")]
    assert said(tmp_path / "in", "headers") == [("QC052", "warning")]
    assert said(tmp_path / "in", "sample") == []


# --- Side files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("# no front matter\n", None),
        ("---\n---\n", None),
        ("---\nlicense: apache-2.0\nbase_model: Qwen/Qwen3-30B-A3B\n---\n", None),
        ("---\nlicense: [mit, other]\ntags: [x]\n---\n", None),
        ("\ufeff---\nlibrary_name: transformers\n---\n", None),
        ("---\nbase_model: [a/b, c/d]\nbase_model_relation: quantized\n---\n", None),
        ("---\nlicense: mit\n", "error"),
        ("---\n- a list\n---\n", "error"),
        ("---\na: b: c\n---\n", "error"),
        ("---\ndate: 2020-13-45\n---\n", "error"),
        ("---\na: !!int x\n---\n", "error"),
        ("---\na: !!timestamp x\n---\n", "error"),
        ("---\na: " + "[" * 3000 + "\n---\n", "error"),
        ("---\nbase_model: Qwen3\n---\n", "warning"),
        ("---\nbase_model: https://huggingface.co/a/b\n---\n", "warning"),
        ("---\nbase_model: a/b\nbase_model_relation: converted\n---\n", "warning"),
        ("---\nbase_model_relation: quantized\n---\n", "warning"),
        ("---\nlibrary_name: [a]\n---\n", "warning"),
    ],
)
def test_front_matter(text: str, severity: str | None, tmp_path: Path) -> None:
    folder = fp8_moe().write(tmp_path / "x")
    (folder / "README.md").write_text(text, encoding="utf-8")
    found = [(f.rule, f.severity, f.where) for f in validate_folder(folder).findings]
    assert found == ([] if severity is None else [("QC059", severity, "README.md")])


def test_front_matter_that_repeats_itself_is_said_in_brief(tmp_path: Path) -> None:
    """Aliases of aliases: 8 ** 8 texts, spelled in a few lines."""
    folder = fp8_moe().write(tmp_path / "x")
    lines = ["a0: &a0 x"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 9)]
    (folder / "README.md").write_text("\n".join(["---", *lines, "library_name: *a8", "---"]))
    (found,) = validate_folder(folder).findings
    assert (found.rule, found.severity) == ("QC059", "error")
    assert "aliases" in found.message
    assert len(found.message) < 500


def test_quantized_is_said_of_quantized_repos(tmp_path: Path) -> None:
    folder = bf16_moe().write(tmp_path / "x")
    text = "---\nbase_model: a/b\nbase_model_relation: quantized\n---\n"
    (folder / "README.md").write_text(text)
    (found,) = validate_folder(folder).findings
    assert (found.rule, found.severity) == ("QC059", "warning")


@pytest.mark.parametrize("file", ["tiktoken.model", "qwen.tiktoken", "vocab.json"])
def test_tokenizers_of_every_kind(file: str, tmp_path: Path) -> None:
    model = bf16_moe()
    model.side_files = {file: b"x"}
    assert validate_folder(model.write(tmp_path / "x")).findings == []


def test_code_by_every_spelling(tmp_path: Path) -> None:
    model = bf16_moe(
        auto_map={
            "AutoConfig": "configuration_x.XConfig",
            "AutoModel": "owner/repo--modeling_y.Y",
            "AutoTokenizer": ["tokenization_z.Z", None],
        }
    )
    found = validate_folder(model.write(tmp_path / "x")).findings
    assert [(f.rule, f.where) for f in found] == [
        ("QC058", "configuration_x.py"), ("QC058", "tokenization_z.py"),
    ]  # fmt: skip


def test_weights_below_the_root_are_other_forms(tmp_path: Path) -> None:
    folder = bf16_moe().write(tmp_path / "x")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"x")
    assert validate_folder(folder).findings == []


# --- qconvert.json -------------------------------------------------------------------------------


def stage(**facts: Any) -> dict[str, Any]:
    usual = {"number": 0, "of": 2, "partition": [1, 1], "layers": [0, 1], "environment": {}}
    return {**usual, **facts}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (stage(), ""),
        (stage(environment={"SGLANG_PP_LAYER_PARTITION": "1,1"}), ""),
        (stage(environment={"SGLANG_PP_LAYER_PARTITION": "2"}), "is said to be '2'"),
        (stage(environment=5), "expected 'stage'"),
        (stage(number="0"), "expected 'stage'"),
        (stage(number=True), "expected 'stage'"),
        (stage(number=2), "stage 2 of 2"),
        (stage(of=3), "does not fit"),
        (stage(layers=[0, 2]), "owns layers"),
        (stage(layers=None), "expected 'stage'"),
        (stage(partition=[1, -1]), "expected 'stage'"),
        (stage(partition=[1, 3]), "adds up to 4"),
        ("first", "expected 'stage'"),
    ],
)
def test_what_is_said_of_a_stage(facts: Any, said: str, tmp_path: Path) -> None:
    model = bf16_moe()
    gone = [n for n in model.tensors if "layers.1." in n or n in (HEAD, "model.norm.weight")]
    model.tensors = without(model.tensors, gone)
    folder = model.write(tmp_path / "x")
    manifest = {"identity": {}, "passes": [], "dropped": {}, "dropped_files": {}, "stage": facts}
    (folder / "qconvert.json").write_text(json.dumps(manifest))
    found = validate_folder(folder).findings
    if not said:
        assert found == []
        return
    # What is no stage at all is no manifest of ours.
    assert [f.rule for f in found] == ["QC001" if said.startswith("expected") else "QC054"]
    assert said in found[0].message


def test_a_layer_of_another_stage(tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    made = run_cli("split", source, tmp_path / "out", "--pp", "1,1", "--for", "vllm", "--copy")
    assert made.code == 0, made.err
    folder = tmp_path / "out" / "stage-00-of-02"
    manifest = json.loads((folder / "qconvert.json").read_bytes())
    whole = replace(Checkpoint.open(source), root=folder)
    assert whole.manifest == manifest
    wheres = {f.where for f in findings(whole, [manifest_claims])}
    # Embeddings are in every stage for vLLM; norm and head have no layer of their own.
    assert wheres == {name for name in whole if ".layers.1." in name}


@pytest.mark.parametrize(
    ("groups", "rule", "severity"),
    [
        (1, None, None),
        (16, "QC052", "error"),
        (2, "QC052", "warning"),
        (0, "QC051", "error"),
        (3, "QC051", "error"),
        ("1", "QC001", "error"),
    ],
)
def test_orders_that_may_be_meant(
    groups: Any, rule: str | None, severity: str | None, tmp_path: Path
) -> None:
    """Of the fused projections of Qwen3.5: one group, as sglang takes it."""
    found = headers.load("qwen3.5-0.8b")
    rows = {"qkvz": 8192, "ba": 32}
    tensors = {n: t for n, t in found.tensors.items() if ".in_proj_" not in n}
    for name, kind in found.tensors.items():
        at, _, part = name.partition(".in_proj_")
        if part == "qkv.weight":
            for fused, count in rows.items():
                fused_kind = TensorType("BF16", (count, kind.shape[1]))
                tensors[f"{at}.in_proj_{fused}.weight"] = fused_kind
    headers.write_sparse(replace(found, tensors=tensors), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    manifest = {
        "identity": {}, "passes": [], "dropped": {}, "dropped_files": {}, "gdn_groups": groups,
    }  # fmt: skip
    (tmp_path / "qconvert.json").write_text(json.dumps(manifest))
    said = {(f.rule, f.severity) for f in validate_folder(tmp_path).findings}
    assert said == ({(rule, severity)} if rule else set())


def test_a_total_size_is_graver_where_we_wrote_it(tmp_path: Path) -> None:
    folder = bf16_moe().write(tmp_path / "x")
    index = folder / "model.safetensors.index.json"
    edit_json(index, lambda found: found["metadata"].update(total_size=1))
    assert [f.severity for f in validate_folder(folder).findings] == ["warning"]
    manifest: dict[str, Any] = {"identity": {}, "passes": [], "dropped": {}, "dropped_files": {}}
    (folder / "qconvert.json").write_text(json.dumps(manifest))
    assert [f.severity for f in validate_folder(folder).findings] == ["error"]


# --- The whole -----------------------------------------------------------------------------------


def test_headers_need_neither_torch_nor_numpy(tmp_path: Path) -> None:
    folder = fp8_moe().write(tmp_path / "x")
    code = (
        "import sys; from pathlib import Path; from qconvert.validation.runner import validate_folder\n"
        f"report = validate_folder(Path({str(folder)!r}))\n"
        "assert not report.findings, report.findings\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_rules_are_listed_where_they_are_found(module: Any) -> None:
    """Ids in a module's code are those that its docstring explains, in order."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    yielded = re.findall(r'Finding\(\s*"(QC\d{3})"', text)
    documented = re.findall(r"^(QC\d{3}) ", module.__doc__ or "", re.MULTILINE)
    assert documented == sorted(set(yielded))
