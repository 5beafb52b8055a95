"""The model check: a converted folder computes what its source does, and what only looks right is found.

Those marked `peer` run models of transformers' own classes: `pytest -m peer tests/test_logits.py`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import copied, edit_json, run_cli, unjudged, write_json
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.demo_checkpoint import write_sample
from qconvert.validation.findings import Finding, Table
from qconvert.validation.runner import Folder, NotChecked, Request
from qconvert.validators.model import logits
from qconvert.validators.model import plain as _plain
from qconvert.validators.model.logits import Logits
from qconvert.validators.model.runs import PARTS, Block, Digest, Run, blocks_of, compare
from qconvert.validators.model.served import output_model, reading

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]


def checked(
    out: Path, source: Path, layers: int = 9, pair: Path | None = None, **request: Any
) -> tuple[list[Finding], dict[str, float], list[dict[str, float]]]:
    """Findings, the logits' figures by name, and each layer's."""
    partner = Checkpoint.open(pair) if pair is not None else None
    wanted = Request("headers", logits=layers, **request)
    found = list(Logits()(Folder(Checkpoint.open(out), Checkpoint.open(source), partner, wanted)))
    tables = [item for item in found if isinstance(item, Table)]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    findings = [item for item in found if isinstance(item, Finding)]
    if not tables:
        return findings, {}, []
    logits = {row[0].partition("(")[0].strip(): float(row[1]) for row in tables[0].rows}
    shown = tables[1].columns[1:-1:2]
    by_layer = [
        {name: float(row[1 + 2 * n]) for n, name in enumerate(shown) if row[1 + 2 * n]}
        for row in tables[1].rows
    ]
    return findings, logits, by_layer


def recipe(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


def converted(source: Path, out: Path, passes: str) -> Path:
    """A recipe's name, or its passes as YAML."""
    # Of Qwen3-Next unfused, or Qwen3.5 in another order, which no loader takes.
    if passes == "passes:\n- unfuse\n" or "groups" in passes:
        unjudged(passes, source, out)
        return out
    what = recipe(out.parent, passes) if passes.startswith("passes") else passes
    done = run_cli("run", what, source, out, "--jobs", "1")
    assert done.code == 0, done.err
    return out


def edited(folder: Path, to: Path, change: Change) -> Path:
    """A copy with tensors changed, taken away or added (into the last shard)."""
    copied(folder, to)
    files = sorted(to.glob("*.safetensors"))
    assert len(files) == 1
    save_file(change(load_file(files[0])), files[0], metadata={"format": "pt"})
    return to


FUSED = "passes:\n- fuse: {consumer: sglang}\n"
INTERLEAVED = "passes:\n- fuse: {groups: 2}\n"
DEQUANTIZED = "passes:\n- dequant\n- fuse: {groups: 2}\n"


# --- Without transformers ------------------------------------------------------------------------


def plain(folder: Path, layers: int = 4) -> dict[str, bytes]:
    """What the class would be given."""
    model = output_model(Folder(Checkpoint.open(folder), Checkpoint.open(folder)))
    with reading(model) as weights:
        return {
            tensor.name: b"".join(bytes(part) for part in tensor.read(weights))
            for tensor in _plain.plain_tensors(model, layers)
        }


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8, two key heads, an MTP layer."""
    folder = tmp_path_factory.mktemp("logits") / "source"
    write_sample(folder)
    return folder


def test_every_form_of_the_same_weights_is_the_same_to_the_class(
    sample: Path, tmp_path: Path
) -> None:
    expected = plain(sample)
    assert not any(name.startswith("mtp.") or "scale" in name for name in expected)
    for number, passes in enumerate(
        ("dequant-fp8", "qwen3.5-fp8-to-bf16-fused", "qwen3.5-fp8-fused-sglang", DEQUANTIZED)
    ):
        assert plain(converted(sample, tmp_path / str(number), passes)) == expected


def test_a_wrong_claim_of_order_makes_other_weights(sample: Path, tmp_path: Path) -> None:
    out = converted(sample, tmp_path / "out", DEQUANTIZED)
    edit_json(out / "qconvert.json", lambda manifest: manifest.update(gdn_groups=1))
    expected, found = plain(sample), plain(out)
    others = {name.rpartition("linear_attn.")[2] for name in found if found[name] != expected[name]}
    assert others == {f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")}


def test_only_the_first_layers_are_taken(sample: Path) -> None:
    layers = {name.split(".")[2] for name in plain(sample, 2) if ".layers." in name}
    assert layers == {"0", "1"}


def test_the_config_is_cut_with_the_layers(tmp_path: Path) -> None:
    settings = {
        "model_type": "qwen3_5_moe", "auto_map": {"AutoModel": "code.py"}, "vision_config": {},
        "text_config": {
            "model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "vocab_size": 10,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mtp_num_hidden_layers": 1, "quantization_config": {"quant_method": "fp8"},
        },
    }  # fmt: skip
    write_json(tmp_path / "config.json", settings)
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert _plain.plain_config(output_model(Folder(checkpoint, checkpoint)), 2) == {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 2, "vocab_size": 10,
        "layer_types": ["linear_attention"] * 2, "mtp_num_hidden_layers": 0,
    }  # fmt: skip


def test_models_are_not_loaded_beyond_the_memory(
    sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said to be needed is enough to begin, and less is not."""

    def begun(*arguments: Any) -> Any:
        raise NotChecked("begun")

    monkeypatch.setattr(logits, "run", begun)
    with pytest.raises(NotChecked, match="transformers included") as refused:
        checked(sample, sample, memory=1000)
    need = int(re.findall(r"--memory (\d+)MiB", str(refused.value))[0])
    with pytest.raises(NotChecked, match="begun"):
        checked(sample, sample, memory=need << 20)
    with pytest.raises(NotChecked, match="give --memory"):
        checked(sample, sample, memory=(need - 1) << 20)


def test_what_cannot_be_run_is_said(sample: Path, tmp_path: Path) -> None:
    with pytest.raises(NotChecked, match="give --memory"):
        checked(sample, sample, memory=1000)
    out = copied(sample, tmp_path / "out")
    edit_json(out / "config.json", lambda config: config.update(model_type="nobody_s"))
    with pytest.raises(NotChecked, match="'nobody_s' is not known"):
        checked(out, sample)
    done = run_cli("split", sample, tmp_path / "stages", "--pp", "2,2", "--for", "vllm")
    assert done.code == 0, done.err
    with pytest.raises(NotChecked, match="one pipeline stage"):
        checked(tmp_path / "stages" / "stage-00-of-02", sample)


def run_of(seed: int, *, form: str = "bf16", hash_: str = "a") -> Run:
    """One layer, eight tokens."""
    generator = torch.Generator().manual_seed(seed)

    def states() -> torch.Tensor:
        return torch.randn(8, 16, generator=generator)

    blocks = {Block(0, part): states() for part in PARTS}
    digests = {
        "model.layers.0.mlp.experts.0.up_proj.weight": Digest("BF16 [1]", form, hash_),  # type: ignore[arg-type]
        "model.layers.0.self_attn.q_proj.weight": Digest("BF16 [1]", "bf16", "q"),
    }
    return Run("Class", states(), (states(),), {}, blocks, digests)


def off(run: Run, part: str, share: float) -> Run:
    """A block's output off by so much of its norm."""
    where = Block(0, part)
    right = run.outputs[where]
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(9))
    wrong = right + noise * (share * right.norm() / noise.norm())
    return replace(run, outputs={**run.outputs, where: wrong})


def test_equal_runs_have_no_fault() -> None:
    found = compare(run_of(1), run_of(1))
    assert found.fault() is None
    assert [figure.found for figure in found.by_layer[0].values()] == [0, 0, 0, 0]
    assert [figure.found for figure in found.logits] == [0, 0, 1]


@pytest.mark.parametrize(
    ("form", "most"), [("bf16", 0.2), ("amxint8", 0.2), ("int4", 0.9), ("amxint4", 0.9)]
)
def test_a_block_may_be_off_by_what_its_format_explains(form: str, most: float) -> None:
    """And only that block: attention, which holds no experts, stays as it was."""
    output = run_of(1, form=form, hash_="a" if form == "bf16" else "b")
    for part in ("experts", "mlp"):
        assert compare(run_of(1), off(output, part, 0.95 * most)).fault() is None
        fault = compare(run_of(1), off(output, part, 1.05 * most)).fault()
        assert fault is not None
        assert fault.startswith(f"layer 0's {part}")
    assert compare(run_of(1), off(output, "attention", 0.25)).fault() is not None


def test_other_faults() -> None:
    source = run_of(1, form="amxint4")
    nan = replace(source, logits=source.logits * torch.nan)
    assert "expected a number" in str(compare(run_of(1), nan).fault())
    assert "1 of 2 tensors" in str(compare(run_of(1), run_of(1, hash_="b")).fault())
    other = replace(run_of(1), logits=run_of(2).logits)
    assert "mean KL" in str(compare(run_of(1), other).fault())


def test_blocks_by_name() -> None:
    assert blocks_of("model.layers.3.linear_attn.out_proj.weight") == (Block(3, "attention"),)
    assert blocks_of("model.layers.10.mlp.experts.4.up_proj.weight") == (
        Block(10, "experts"),
        Block(10, "mlp"),
    )
    assert blocks_of("model.layers.10.mlp.gate.weight") == (Block(10, "mlp"),)
    assert blocks_of("model.layers.3.input_layernorm.weight") == blocks_of("lm_head.weight") == ()


# --- With transformers' models -------------------------------------------------------------------

SOUND = [
    ("moe-vl", "copy"), ("dense", "qwen3.5-to-qwen3-next"), ("moe-vl", "qwen3.5-to-qwen3-next"),
    ("moe", FUSED), ("moe-vl", INTERLEAVED), ("next", "qwen3-next-to-qwen3.5"),
    ("next", "passes:\n- unfuse\n"), ("moe", "passes:\n- stack\n"),
]  # fmt: skip


@pytest.mark.peer
@pytest.mark.parametrize(("kind", "passes"), SOUND)
def test_lossless_conversions_are_equal(kind: str, passes: str, tmp_path: Path) -> None:
    from layout_models import make, saved

    source = saved(make(kind, 3), tmp_path / "source")
    out = converted(source, tmp_path / "out", passes)
    findings, logits, by_layer = checked(out, source)
    assert findings == []
    assert logits == {"mean KL": 0, "max |dlogit|": 0, "top-1 agreement": 1}
    parts = ["attention", *(["experts"] if kind != "dense" else []), "mlp", "result"]
    assert by_layer == [dict.fromkeys(parts, 0)] * 4


@pytest.mark.peer
def test_dequantized_and_joined_are_equal(sample: Path, tmp_path: Path) -> None:
    out = converted(sample, tmp_path / "out", "dequant-fp8")
    assert checked(out, sample, 2)[:2] == (
        [],
        {"mean KL": 0, "max |dlogit|": 0, "top-1 agreement": 1},
    )
    assert run_cli("split", out, tmp_path / "s", "--pp", "1,3", "--for", "vllm").code == 0
    assert run_cli("join", tmp_path / "s", tmp_path / "joined").code == 0
    assert checked(tmp_path / "joined", sample)[0] == []


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["moe", "next"])
def test_qc080_another_order_than_the_class_takes(kind: str, tmp_path: Path) -> None:
    """Interleaved rows that claim to be contiguous; contiguous ones where the class interleaves."""
    from layout_models import make, saved

    source = saved(make(kind, 3), tmp_path / "source")
    out = converted(
        source, tmp_path / "out", INTERLEAVED if kind == "moe" else "passes:\n- fuse: {groups: 1}\n"
    )
    edit_json(out / "qconvert.json", lambda manifest: manifest.update(gdn_groups=1))
    findings, logits, by_layer = checked(out, source)
    assert [finding.rule for finding in findings] == ["QC080"]
    assert "layer 0's attention" in findings[0].message
    assert "in_proj_" in findings[0].message
    assert by_layer[0]["attention"] > 0.5
    assert (by_layer[3]["attention"], by_layer[3]["mlp"]) == (0, 0)  # full attention: no such rows
    assert logits["mean KL"] > 0.05


@pytest.mark.peer
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe"])
def test_quantized_experts_and_what_is_not_explained_by_that(family: str, tmp_path: Path) -> None:
    import hf_models as peer
    from kt_pair import kt

    source = peer.saved(getattr(peer, family)(), tmp_path / "source")
    cpu, gpu, int4 = tmp_path / "cpu", tmp_path / "gpu", tmp_path / "int4"
    assert kt(source, cpu, gpu, method="int8", numa=2).code == 0
    assert run_cli("amx", source, int4, "--method", "int4", "--numa", "1").code == 0
    for out, pair, low, high in (
        (cpu, None, 0.005, 0.06), (cpu, gpu, 0.005, 0.06), (gpu, None, 0.1, 0.7), (int4, None, 0.1, 0.7),
    ):  # fmt: skip
        findings, logits, by_layer = checked(out, source, pair=pair)
        assert findings == []
        assert low < by_layer[-1]["experts"] < high
        assert all(layer["attention"] == 0 for layer in by_layer)
        assert 0 < logits["mean KL"] < 0.2

    def turned(tensors: Tensors) -> Tensors:
        """Each expert holds the weights of the next."""
        found = {}
        for name, value in tensors.items():
            head, experts, rest = name.partition(".experts.")
            number, _, part = rest.partition(".")
            turn = f"{head}{experts}{(int(number) + 1) % 4}.{part}" if experts else name
            found[turn] = value
        return found

    def scaled(tensors: Tensors) -> Tensors:
        return {n: v * 3 if n.endswith(".weight_scale") else v for n, v in tensors.items()}

    for number, change in enumerate((turned, scaled)):
        findings, _, by_layer = checked(edited(gpu, tmp_path / str(number), change), source)
        assert [finding.rule for finding in findings] == ["QC080"]
        assert by_layer[-1]["experts"] > 1


@pytest.mark.peer
def test_the_first_layers_alone_are_looked_at(tmp_path: Path) -> None:
    from layout_models import families, saved

    source = saved(families()["qwen3_moe"], tmp_path / "source")

    def change(tensors: Tensors) -> Tensors:
        name = "model.layers.2.mlp.experts.1.down_proj.weight"
        return {**tensors, name: -tensors[name]}

    out = edited(source, tmp_path / "out", change)
    assert checked(out, source, 2)[0] == []
    findings, _, by_layer = checked(out, source, 3)
    assert [finding.rule for finding in findings] == ["QC080"]
    assert [layer["mlp"] > 0.5 for layer in by_layer] == [False, False, True]
    assert "first model.layers.2.mlp.experts.1.down_proj.weight" in findings[0].message


@pytest.mark.peer
def test_qc080_one_flipped_sign_that_logits_do_not_show(tmp_path: Path) -> None:
    """Of a lossless conversion, weights must be equal: an embedding of a token that is not asked for."""
    from layout_models import families, saved

    source = saved(families()["qwen3_moe"], tmp_path / "source")

    def change(tensors: Tensors) -> Tensors:
        tensors["model.embed_tokens.weight"][5, 0] *= -1
        return tensors

    findings, logits, _ = checked(edited(source, tmp_path / "out", change), source, 1)
    assert logits["max |dlogit|"] == 0
    assert [finding.rule for finding in findings] == ["QC080"]
    assert "first model.embed_tokens.weight" in findings[0].message


@pytest.mark.peer
def test_qc081_names_and_shapes_that_are_not_the_class_s(tmp_path: Path) -> None:
    from layout_models import families, saved

    source = saved(families()["qwen3_moe"], tmp_path / "source")
    gone, more = "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_bias.weight"
    lost = edited(source, tmp_path / "lost", lambda t: {n: v for n, v in t.items() if n != gone})
    findings, logits, _ = checked(lost, source)
    assert [(finding.rule, finding.where) for finding in findings] == [("QC081", gone)]
    assert logits == {}
    extra = edited(source, tmp_path / "extra", lambda t: {**t, more: torch.ones(16)})
    findings, logits, _ = checked(extra, source)
    assert [(finding.rule, finding.where) for finding in findings] == [("QC081", more)]
    assert logits["max |dlogit|"] == 0
    wide = edited(source, tmp_path / "wide", lambda t: {**t, gone: torch.ones(8)})
    findings, _, _ = checked(wide, source)
    assert [(finding.rule, finding.where) for finding in findings] == [("QC081", gone)]
    assert "is [8], expected [16]" in findings[0].message
    with pytest.raises(NotChecked, match="does not load the source"):
        checked(source, lost)


@pytest.mark.peer
def test_kimi_is_run_as_deepseek_and_no_class_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layout_models import families, saved

    source = saved(families()["deepseek_v3"], tmp_path / "source")
    edit_json(source / "config.json", lambda config: config.update(model_type="kimi_k2"))
    out = converted(source, tmp_path / "out", "copy")
    assert checked(out, source, 2)[0] == []
    monkeypatch.setitem(_plain._CLASSES, "kimi_k2", "nobody_s")
    with pytest.raises(NotChecked, match="has no class for it"):
        checked(out, source)


@pytest.mark.peer
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from layout_models import families, saved

    source = saved(families()["qwen3_moe"], tmp_path / "source")
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    before = json.loads((source / "config.json").read_bytes())
    assert checked(source, source, 1)[0] == []
    assert list(room.iterdir()) == []
    assert json.loads((source / "config.json").read_bytes()) == before
