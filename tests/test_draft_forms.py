"""`relabel --to speculators` and `--to sglang`: drafts in their two forms. Expected configs are written
out by hand from speculators' own conversion (convert/eagle, convert/dflash) and vLLM's reading of its
form; the runtimes' own loaders are in tests/loaders/test_draft_forms.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, ran, read_tensors, run_cli, tensor
from draft_changes import CHANGED, changed
from draft_tables import (
    DRAFT,
    HIDDEN,
    TOKENS,
    Config,
    Tensors,
    dflash,
    eagle3,
    matrix,
    write_draft,
)

TO_SPECULATORS = ("--to", "speculators", "--verifier", "ORG/NAME")
TO = {"speculators": TO_SPECULATORS, "sglang": ("--to", "sglang")}
OTHER = {"speculators": "sglang", "sglang": "speculators"}
MADE = {"eagle3": eagle3, "dflash": dflash}
Change = Callable[[Tensors, Config], Any]


def stated(folder: Path) -> Config:
    found: Config = json.loads((folder / "config.json").read_bytes())
    return found


def relabelled(source: Path, out: Path, to: str, *more: str) -> Path:
    """A folder that `relabel` made, and in which `validate --level full` finds no error."""
    ran("relabel", source, out, *TO[to], *more, "--jobs", "1")
    said = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    assert "0 errors, 0 warnings" in said.out, said.out
    return out


def drafted(folder: Path, algorithm: str, form: str, change: Change | None = None) -> Path:
    make: Any = MADE[algorithm]
    tensors, config = make(form)
    if change is not None:
        change(tensors, config)
    return write_draft(folder, tensors, config)


def refusal(folder: Path, algorithm: str, form: str, change: Change) -> str:
    source = drafted(folder / "source", algorithm, form, change)
    done = run_cli("relabel", source, folder / "out", *TO[OTHER[form]], "--jobs", "1")
    assert done.code == 1, (done.out, done.err)
    return done.err


@pytest.mark.parametrize("form", OTHER)
@pytest.mark.parametrize("algorithm", MADE)
def test_there_and_back_is_the_identity(algorithm: str, form: str, tmp_path: Path) -> None:
    source = drafted(tmp_path / "source", algorithm, form)
    other = relabelled(source, tmp_path / "other", OTHER[form])
    assert read_tensors(other) == read_tensors(
        drafted(tmp_path / "published", algorithm, OTHER[form])
    )
    back = relabelled(other, tmp_path / "back", form)
    assert read_tensors(back) == read_tensors(source)
    assert stated(back) == stated(source)


def test_a_draft_of_eagle3_as_speculators_says_it(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: Config) -> None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]}
        config["norm_before_fc"] = True
        config["torch_dtype"] = "bfloat16"
        tensors["input_norm.weight"] = tensor("BF16", 3 * HIDDEN)

    source = drafted(tmp_path / "source", "eagle3", "sglang", change)
    made = stated(relabelled(source, tmp_path / "out", "speculators", "--tokens", "5"))
    own = made.pop("transformer_layer_config")
    assert own == {
        key: value for key, value in eagle3()[1].items()
        if key not in ("architectures", "draft_vocab_size", "tie_word_embeddings")
    }  # fmt: skip
    assert made == {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "torch_dtype": "bfloat16", "draft_vocab_size": DRAFT, "norm_before_residual": False,
        "norm_before_fc": True, "fc_norm": False, "norm_output": False,
        "embed_requires_grad": False, "eagle_aux_hidden_state_layer_ids": [2, 18, 34],
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "ORG/NAME", "architectures": []},
        },
    }  # fmt: skip


def test_layers_of_the_target_are_named_for_each_runtime(tmp_path: Path) -> None:
    """Four hidden states, which the classes must be told: they take three."""

    def change(tensors: Tensors, config: Config) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = [2, 9, 18, 33]
        tensors["fc.weight"] = tensor("BF16", HIDDEN, 4 * HIDDEN)

    source = drafted(tmp_path / "source", "eagle3", "speculators", change)
    out = relabelled(source, tmp_path / "out", "sglang")
    made = stated(out)
    assert made["eagle_aux_hidden_state_layer_ids"] == [2, 9, 18, 33]
    assert made["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 8, 17, 32], "use_aux_hidden_state": True,
    }  # fmt: skip
    assert made["num_aux_hidden_states"] == 4
    back = stated(relabelled(out, tmp_path / "back", "speculators"))
    assert back["eagle_aux_hidden_state_layer_ids"] == [2, 9, 18, 33]
    assert back["transformer_layer_config"]["num_aux_hidden_states"] == 4


def test_norms_of_each_hidden_state_have_another_name(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: Config) -> None:
        config["use_aux_norm"] = True
        for number, which in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{which}.weight"] = tensor("BF16", HIDDEN, seed=number)

    source = drafted(tmp_path / "source", "eagle3", "sglang", change)
    out = relabelled(source, tmp_path / "out", "speculators")
    before, after = read_tensors(source), read_tensors(out)
    for number, which in enumerate(("low", "mid", "high")):
        assert after[f"fc_norm.{number}.weight"] == before[f"aux_norm_{which}.weight"]
    assert stated(out)["fc_norm"] is True
    assert stated(relabelled(out, tmp_path / "back", "sglang"))["fc_norm"] is True


@pytest.mark.parametrize(
    ("types", "causal", "behind"),
    [
        (None, None, True),
        (["full_attention"] * 2, None, True),
        (["full_attention"] * 2, False, True),
        (["sliding_attention"] * 2, None, False),
        (["sliding_attention"] * 2, True, False),
        (["sliding_attention"] * 2, False, True),
        (["sliding_attention", "full_attention"], False, True),
    ],
)
def test_what_a_block_sees_of_itself(
    types: list[str] | None, causal: bool | None, behind: bool, tmp_path: Path
) -> None:
    """sglang's default: a window hides the tokens behind it, other layers see all of their block."""

    def change(tensors: Tensors, config: Config) -> None:
        if types is not None:
            config |= {"layer_types": types, "sliding_window": 128}
        if causal is not None:
            config["is_causal"] = causal

    source = drafted(tmp_path / "source", "dflash", "sglang", change)
    out = relabelled(source, tmp_path / "out", "speculators")
    made = stated(out)
    assert made["sliding_window_non_causal"] is behind
    assert made["aux_hidden_state_layer_ids"] == [2, 4]
    assert made["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    back = stated(relabelled(out, tmp_path / "back", "sglang"))
    windows = "sliding_attention" in (types or [])
    assert back.get("is_causal") == (False if windows and behind else None)


def test_a_quantized_draft_keeps_its_block(tmp_path: Path) -> None:
    source = drafted(tmp_path / "source", "eagle3", "sglang")
    packed, other = tmp_path / "packed", tmp_path / "other"
    words = ("--rtn", "--targets", "midlayer.self_attn.o_proj", "--group-size", "32")
    ran("w4a16", source, packed, *words, "--jobs", "1")
    block = stated(packed)["quantization_config"]
    assert {"fc", "model.fc", "midlayer.mlp.up_proj"} <= set(block["ignore"])
    made = stated(relabelled(packed, other, "speculators"))
    assert "quantization_config" not in made["transformer_layer_config"]
    assert "layers.0.mlp.up_proj" in made["quantization_config"]["ignore"]
    assert not [one for one in made["quantization_config"]["ignore"] if "midlayer" in one]
    assert stated(relabelled(other, tmp_path / "back", "sglang"))["quantization_config"] == block


def _state(**keys: Any) -> Change:
    return lambda tensors, config: config.update(keys)


def _own(**keys: Any) -> Change:
    return lambda tensors, config: config["transformer_layer_config"].update(keys)


def _inner(key: str, **keys: Any) -> Change:
    return lambda tensors, config: config.setdefault(key, {}).update(keys)


def _lose(key: str) -> Change:
    return lambda tensors, config: config.pop(key)


def _add(name: str, *shape: int) -> Change:
    return lambda tensors, config: tensors.update({name: tensor("BF16", *shape)})


def _drop(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name)


@pytest.mark.parametrize(
    ("algorithm", "change", "text"),
    [
        ("eagle3", _state(norm_before_residual=True), "norm_before_residual is true, and sglang"),
        ("eagle3", _lose("norm_before_residual"), "where it is missing, vLLM 0.33 takes true"),
        ("eagle3", _state(embed_requires_grad=True), "so that its embeddings are its own"),
        ("eagle3", _state(eagle_aux_hidden_state_layer_ids=[0, 9, 18]), "before layer 0 are the"),
        ("eagle3", _state(eagle_aux_hidden_state_layer_ids=[2, 9]), "192]: expected 128 columns"),
        ("eagle3", _state(eagle_aux_hidden_state_layer_ids=[2, "9"]), "expected eagle_aux_hidden_s"),
        ("eagle3", _state(speculators_model_type="peagle"), "is 'peagle'; drafts of eagle3 and dfl"),
        ("eagle3", _state(transformer_layer_config=[1]), "expected transformer_layer_config to be"),
        ("eagle3", _state(ttt_depth=4), "ttt_depth is 4, and what that is in the other form is not"),
        ("eagle3", _own(model_type="qwen3"), "layers.0.self_attn.k_norm.weight is missing"),
        ("eagle3", _own(num_hidden_layers=2), "layers.1.input_layernorm.weight is missing"),
        ("eagle3", _own(num_hidden_layers="1"), "expected a number for num_hidden_layers, found '1'"),
        ("eagle3", _own(layer_types=["sliding_attention"]), "layer_types states a window, which"),
        ("eagle3", _add("layers.0.self_attn.q_proj.bias", HIDDEN), "q_proj.bias' has no place in s"),
        ("eagle3", _add("mask_hidden", 3 * HIDDEN), "'mask_hidden' has no place in sglang"),
        ("eagle3", _add("input_norm.weight", 3 * HIDDEN), "'input_norm.weight' has no place in sgl"),
        ("eagle3", _add("fc_norm.1.weight", HIDDEN), "'fc_norm.1.weight' has no place in sglang"),
        ("eagle3", _drop("layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight is missing"),
        ("eagle3", _drop("layers.0.hidden_norm.weight"), "layers.0.hidden_norm.weight is missing"),
        ("dflash", _state(draft_vocab_size=40), "draft_vocab_size is 40, and sglang 0.5.23 takes"),
        ("dflash", _state(sample_from_anchor=True), "sample_from_anchor is true, which sglang"),
        ("dflash", _state(aux_hidden_state_layer_ids=[0, 4]), "before layer 0 are the embeddings"),
        ("dflash", _lose("aux_hidden_state_layer_ids"), "states no aux_hidden_state_layer_ids"),
        ("dflash", _lose("mask_token_id"), "states no mask_token_id, without which"),
        ("dflash", _state(target_hidden_size=128), "is 128, and sglang 0.5.23 takes hidden_size, 64"),
        ("dflash", _drop("hidden_norm.weight"), "hidden_norm.weight is missing"),
        ("dflash", _add("lm_head.weight", TOKENS, HIDDEN), "'lm_head.weight' has no place in sgl"),
    ],
)  # fmt: skip
def test_what_sglang_cannot_do(algorithm: str, change: Change, text: str, tmp_path: Path) -> None:
    assert text in refusal(tmp_path, algorithm, "speculators", change)


@pytest.mark.parametrize(
    ("algorithm", "change", "text"),
    [
        ("eagle3", _state(tie_word_embeddings=True), "tie_word_embeddings is true, for which"),
        ("eagle3", _inner("eagle_config", use_aux_hidden_state=False), "use_aux_hidden_state is fal"),
        ("eagle3", _state(eagle_config=3), "expected eagle_config to be an object, found 3"),
        ("eagle3", _state(architectures=["LlamaForCausalLM"]), "architectures is ['LlamaForCausalLM']"),
        ("eagle3", _state(architectures=3), "architectures is 3; drafts of EAGLE3 (Ll"),
        ("eagle3", _lose("hidden_act"), "states no hidden_act, for which vLLM 0.33 has no default"),
        ("eagle3", _state(model_type="mistral"), "model_type is 'mistral'; in speculators' form"),
        ("eagle3", _state(
            eagle_aux_hidden_state_layer_ids=[2, 18, 33],
            eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 18, 33]},
        ), "names the last of them, as sglang does, so that they contradict each other"),
        ("eagle3", _add("layers.0.mlp.up_proj.weight", 2 * HIDDEN, HIDDEN), "are the same tensor"),
        ("dflash", _inner("dflash_config", projector_type="domino"), "projector_type is 'domino'"),
        ("dflash", _inner("dflash_config", mask_token_id=None), "states no mask_token_id, which"),
        ("dflash", _lose("block_size"), "states no block_size, which speculators' form needs"),
        ("dflash", _state(is_causal=True), "some layers without a window do not see the tokens"),
        ("dflash", _state(layer_types=["sliding_attention", "full_attention"], sliding_window=9),
         "or those with one do not: vLLM 0.33 reads one flag"),
    ],
)  # fmt: skip
def test_what_speculators_form_cannot_say(
    algorithm: str, change: Change, text: str, tmp_path: Path
) -> None:
    assert text in refusal(tmp_path, algorithm, "sglang", change)


@pytest.mark.parametrize("form", OTHER)
def test_a_draft_in_the_form_already(form: str, tmp_path: Path) -> None:
    source = drafted(tmp_path / "source", "eagle3", form)
    done = run_cli("relabel", source, tmp_path / "out", *TO[form], "--jobs", "1")
    assert f"the draft is in form {form} already" in done.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--to", "speculators"), "--to speculators and --verifier go together"),
        (("--to", "sglang", "--verifier", "ORG/NAME"), "--to speculators and --verifier go"),
        (("--to", "sglang", "--tokens", "3"), "--tokens is written with --to speculators only"),
        (("--to", "sglang", "--nearest"), "--nearest is not of drafts"),
    ],
)
def test_words_that_do_not_go_together(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    source = drafted(tmp_path / "source", "eagle3", "speculators")
    done = run_cli("relabel", source, tmp_path / "out", *words)
    assert (done.code, text in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("algorithm", "form", "change", "text"),
    [
        ("eagle3", "speculators", lambda c: c.update(norm_output=True), "norm_output (True)"),
        ("eagle3", "sglang", lambda c: c.update(draft_vocab_size=TOKENS), "draft.vocabulary"),
        ("eagle3", "sglang", lambda c: c.update(eagle_config={
            "eagle_aux_hidden_state_layer_ids": [2, 18, 34],
        }), "draft.taken is [3, 19, 35], the source's is [2, 18, 34]"),
        ("dflash", "sglang", lambda c: c["dflash_config"].update(target_layer_ids=[2, 4]),
         "draft.taken is [3, 5], the source's is [2, 4]"),
        ("dflash", "sglang", lambda c: c["dflash_config"].update(mask_token_id=8), "mask_token_id"),
        ("dflash", "sglang", lambda c: c.update(is_causal=True), "draft.hides is [True]"),
    ],
)  # fmt: skip
def test_another_config_than_the_sources_is_found(
    algorithm: str, form: str, change: Callable[[Config], Any], text: str, tmp_path: Path
) -> None:
    """The config that a wrong line of the pass would write."""

    def ids(tensors: Tensors, config: Config) -> None:
        if algorithm == "eagle3" and form == "sglang":
            config["eagle_aux_hidden_state_layer_ids"] = [2, 18, 34]

    source = drafted(tmp_path / "source", algorithm, OTHER[form], ids)
    out = relabelled(source, tmp_path / "out", form)
    edit_json(out / "config.json", lambda c: c.pop("eagle_aux_hidden_state_layer_ids", None))
    edit_json(out / "config.json", change)
    said = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    lines = [line for line in said.out.splitlines() if "QC083" in line]
    assert any(text in line for line in lines), said.out


@pytest.mark.parametrize(
    ("algorithm", "form", "lines"),
    [
        ("eagle3", "sglang", [
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path REPO",
            '{"method": "eagle3", "model": "REPO", "num_speculative_tokens": 3}',
        ]),
        ("dflash", "sglang", [
            "--speculative-algorithm DFLASH --speculative-draft-model-path REPO",
            '{"method": "dflash", "model": "REPO", "num_speculative_tokens": 7}',
        ]),
        ("eagle3", "speculators", [
            "sglang 0.5.23 does not load it right",
            '{"method": "eagle3", "model": "REPO", "num_speculative_tokens": 3}',
        ]),
    ],
)  # fmt: skip
def test_a_card_says_how_the_draft_is_served(
    algorithm: str, form: str, lines: list[str], tmp_path: Path
) -> None:
    source = drafted(tmp_path / "source", algorithm, OTHER[form])
    card = (relabelled(source, tmp_path / "out", form) / "README.md").read_text()
    assert [line for line in lines if line not in card] == []
    assert ("EAGLE3" in card or "DFLASH" in card) == (form == "sglang")


def test_a_draft_is_not_calibrated(tmp_path: Path) -> None:
    source = drafted(tmp_path / "source", "eagle3", "sglang")
    words = ("--gptq", "--targets", "Linear", "--synthetic", "--group-size", "32")
    done = run_cli("w4a16", source, tmp_path / "out", *words, "--jobs", "1")
    assert "a draft computes from hidden states of its model" in done.err


def test_gptqs_codes_of_a_draft_are_not_read_by_vllm(tmp_path: Path) -> None:
    source = drafted(tmp_path / "source", "eagle3", "sglang")
    words = ("--rtn", "--targets", "Linear", "--group-size", "32", "--packing", "gptq", "--dry-run")
    said = ran("w4a16", source, tmp_path / "out", *words, "--jobs", "1").out
    assert (
        "vllm 0.33.0 (H200) does not load it right: midlayer.mlp.down_proj.qweight is not" in said
    )


@pytest.mark.parametrize("what", CHANGED)
def test_sglang_is_said_to_load_what_it_loads(what: str, tmp_path: Path) -> None:
    folder, loads = changed(what, tmp_path / "draft")
    said = run_cli("validate", folder, "--for", "sglang", "--tp", "2", "-v", "--jobs", "1").out
    whole, unknown = "proved: sglang 0.5.23 loads the folder whole", "not known for "
    refused = [rule for rule in ("QC130", "QC131", "QC132") if rule in said]
    assert (whole in said, bool(refused), unknown in said) == (
        loads is True, loads is False, loads is None
    ), said  # fmt: skip


def test_a_quantized_draft_is_judged(tmp_path: Path) -> None:
    """By the class of a draft, whose first layer has 256 inputs where the model has 128."""
    tensors, config = eagle3("sglang", hidden=128)
    source = write_draft(tmp_path / "source", tensors, config)
    words = ("--channel", "--dry-run", "--jobs", "1")
    said = ran("fp8", source, tmp_path / "out", *words).out
    assert "loads   sglang 0.5.23 (H200) at tp 1, 2, 4\n" in said
    shape = tensors["midlayer.self_attn.q_proj.weight"].shape
    assert shape == (128, 256)
    tensors["midlayer.self_attn.q_proj.weight"] = matrix(128, 128)
    broken = write_draft(tmp_path / "broken", tensors, config)
    said = run_cli("validate", broken, "--for", "sglang", "--jobs", "1").out
    assert "QC130" in said
