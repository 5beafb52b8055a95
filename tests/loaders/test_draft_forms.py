"""Drafts that stand alone (EAGLE3, DFlash) in sglang's and vLLM's own classes: what `relabel` makes of
one form loads as the other does, byte for byte, and what quantizes them makes folders that load. Skips
itself without the loaders' environment (`make loaders`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ran, read_tensors, write_json
from draft_changes import CHANGED, changed
from draft_tables import TOKENS, dflash, eagle3, write_draft

from loaders.agreement import config_of, disagreements, headers
from loaders.client import PYTHON, Loaded, Server
from qconvert.runtimes.misreadings import misread
from qconvert.runtimes.sglang.simulator import simulate

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]

HIDDEN = 256
MADE = {"eagle3": eagle3, "dflash": dflash}
# What a draft's class takes from its model, or does without.
BORROWED = {
    "eagle3": {"model.embed_tokens.weight"},
    "dflash": {"model.embed_tokens.weight", "lm_head.weight", "model.mask_embedding"},
}
TO_SPECULATORS = ("--to", "speculators", "--verifier", "ORG/NAME")


def draft(folders: Path, algorithm: str, form: str) -> Path:
    folder = folders / f"{algorithm} {form}"
    if folder.is_dir():
        return folder
    make: Any = MADE[algorithm]
    return write_draft(folder, *make(form, hidden=HIDDEN))


def by_vllm(server: Server, folders: Path, folder: Path, algorithm: str) -> Loaded:
    """The draft beside a model, of which no more than its config is read."""
    target = folders / "target"
    if not target.is_dir():
        target.mkdir()
        write_json(target / "config.json", {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
            "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": TOKENS, "max_position_embeddings": 2048,
        })  # fmt: skip
    drafted = {"method": algorithm, "model": str(folder), "num_speculative_tokens": 3}
    return server.load(
        folder, draft=True, flags={"model": str(target), "speculative_config": drafted}
    )


def whole(loaded: Loaded, algorithm: str) -> None:
    assert loaded.error is None, (loaded.step, loaded.error, loaded.at)
    assert set(loaded.unwritten) <= BORROWED[algorithm], loaded.unwritten
    assert set(loaded.unused) <= {"d2t", "t2d"}, loaded.unused


@pytest.mark.parametrize("algorithm", MADE)
def test_sglang_loads_the_form_that_it_reads(algorithm: str, hopper: Server, folders: Path) -> None:
    published = draft(folders, algorithm, "sglang")
    made = folders / f"{algorithm} made for sglang"
    ran("relabel", draft(folders, algorithm, "speculators"), made, "--to", "sglang", "--jobs", "1")
    first, other = (hopper.load(one, draft=True) for one in (published, made))
    whole(first, algorithm)
    whole(other, algorithm)
    assert other.parameters == first.parameters


@pytest.mark.parametrize("algorithm", MADE)
def test_a_plan_asks_sglang_itself(algorithm: str, folders: Path) -> None:
    """`--loader`, at as many ranks as there are heads; vLLM's would need the model."""
    words = ("--to", "sglang", "--dry-run", "--loader", PYTHON, "--jobs", "1")
    said = ran("relabel", draft(folders, algorithm, "speculators"), folders / "never", *words).out
    assert "loads   sglang 0.5.23 (H200, its own loader) at tp 1, 2, 4\n" in said, said
    assert f"a draft of {algorithm}, which is loaded beside its model" in said


@pytest.mark.parametrize("what", CHANGED)
def test_the_table_says_what_sglang_does(what: str, hopper: Server, tmp_path: Path) -> None:
    folder, loads = changed(what, tmp_path / "draft")
    if loads is None:
        return  # nothing is said (test_draft_forms.py)
    config = config_of(folder)
    simulation = simulate(config, headers(folder), draft=True)
    real = hopper.load(folder, draft=True)
    unlike = [one for one in disagreements(simulation, real) if not one.startswith("reason:")]
    assert not unlike
    if loads:
        assert real.error is None
        assert {*real.unused} <= {"d2t", "t2d"}
    else:
        assert real.error is not None or real.unwritten or {*real.unused} - {"d2t", "t2d"}


@pytest.mark.parametrize("algorithm", MADE)
def test_vllm_loads_both_forms(algorithm: str, vllm: Server, folders: Path) -> None:
    published = draft(folders, algorithm, "speculators")
    made = folders / f"{algorithm} made for vllm"
    ran("relabel", draft(folders, algorithm, "sglang"), made, *TO_SPECULATORS, "--jobs", "1")
    plain = draft(folders, algorithm, "sglang")
    loads = [by_vllm(vllm, folders, one, algorithm) for one in (published, made, plain)]
    for one in loads:
        whole(one, algorithm)
        assert one.parameters == loads[0].parameters


# Of the linears between; `fc`, whose inputs are several hidden states, and the head stay as they are.
QUANTIZED = {
    "w4a16": ("w4a16", "--rtn", "--targets", "Linear", "--group-size", "32"),
    "w4a16 gptq": ("w4a16", "--rtn", "--targets", "Linear", "--packing", "gptq"),
    "fp8": ("fp8",), "fp8 channel": ("fp8", "--channel"), "int8": ("int8",),
    "nvfp4 modelopt": ("nvfp4", "--targets", "Linear", "--dialect", "modelopt"),
    "nvfp4": ("nvfp4", "--targets", "Linear", "--dialect", "compressed-tensors"),
    "mx": ("mx", "--targets", "Linear"),  # sglang has no linears of it
}  # fmt: skip


@pytest.mark.parametrize("form", ["sglang", "speculators"])
@pytest.mark.parametrize("made", QUANTIZED)
@pytest.mark.parametrize("algorithm", MADE)
def test_quantized(
    algorithm: str, made: str, form: str, hopper: Server, vllm: Server, folders: Path
) -> None:
    command, *options = QUANTIZED[made]
    out = folders / f"{algorithm} {made} {form}"
    ran(command, draft(folders, algorithm, form), out, *options, "--jobs", "1")
    loads = {"vllm": by_vllm(vllm, folders, out, algorithm), "sglang": hopper.load(out, draft=True)}
    for runtime, loaded in loads.items():
        if runtime == "sglang" and made == "mx":
            continue
        if misread(runtime, config_of(out), headers(out)):
            assert loaded.error is not None or loaded.unwritten
            assert (runtime, form) == ("sglang", "speculators") or (
                runtime == "vllm" and made == "w4a16 gptq"
            )
            continue
        # Weight-only NVFP4 has no input scales, and GPTQ's order is read where there is one alone.
        left = [n for n in loaded.unwritten if not n.endswith(("input_scale", "g_idx"))]
        whole(replace(loaded, unwritten=tuple(left)), algorithm)


@pytest.mark.parametrize("algorithm", MADE)
def test_relabelled_codes(algorithm: str, hopper: Server, vllm: Server, folders: Path) -> None:
    """A quantized draft in the other form and back, and GPTQ's codes in the form that both read."""
    plain = draft(folders, algorithm, "sglang")
    gptq, packed, other, back = (
        folders / f"{algorithm} codes {number}" for number in ("gptq", "packed", "other", "back")
    )
    words = ("--rtn", "--targets", "Linear", "--packing", "gptq", "--jobs", "1")
    ran("w4a16", plain, gptq, *words)
    ran("relabel", gptq, packed, "--to", "compressed-tensors", "--jobs", "1")
    ran("relabel", packed, other, *TO_SPECULATORS, "--jobs", "1")
    ran("relabel", other, back, "--to", "sglang", "--jobs", "1")
    first, second = (by_vllm(vllm, folders, one, algorithm) for one in (packed, other))
    whole(first, algorithm)
    assert (second.parameters, second.schemes) == (first.parameters, first.schemes)
    third, fourth = (hopper.load(one, draft=True) for one in (packed, back))
    whole(third, algorithm)
    assert (fourth.parameters, fourth.schemes) == (third.parameters, third.schemes)
    assert read_tensors(back) == read_tensors(packed)
