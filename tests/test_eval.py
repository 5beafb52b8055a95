"""`qconvert eval`, against whole models as transformers runs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import calibrate_models as models
import eval_oracle as oracle
import numpy as np
import pytest
import torch
from checkpoints import convert, ran

from qconvert.checkpoint.open import open_source
from qconvert.core.errors import CheckpointError, DataError, PlanError, RunError
from qconvert.evaluate import engine, head
from qconvert.evaluate.head import Budget, Sizes
from qconvert.evaluate.result import Evaluation
from qconvert.samples.data import DataSpec

Ids = oracle.Ids
# What makes each form, by the name of its folder.
FORMS: Mapping[str, str] = {
    "w4a16": "w4a16 --rtn --group-size 32",
    "all-int4": "w4a16 --rtn --group-size 32 --targets Linear",
    "nvfp4": "nvfp4 --dialect modelopt",
    "nvfp4-ct": "nvfp4 --dialect compressed-tensors --targets Linear",
    "fp8": "fp8",
    "mxfp4": "mx",
    "int8": "int8",
}
SAMPLES = [models.samples(1, length, seed=length)[0] for length in (40, 23, 40, 2)]


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where hidden states lie; nothing may stay there."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eval")


def source(folders: Path, make: models.Make = models.qwen3_moe, **over: Any) -> Path:
    """A tiny model in BF16, made once."""
    name = "-".join([make.__name__, *(f"{key}={value}" for key, value in over.items())])
    folder = folders / name
    if not folder.exists():
        models.saved(make(**over), folder)
    return folder


def command(words: str, of: Path, out: Path) -> None:
    """A conversion, by its command."""
    name, *options = words.split()
    ran(name, of, out, *options, "--jobs", "1")


def made(form: str, of: Path) -> Path:
    """A conversion of it, made once."""
    folder = of.parent / f"{of.name}-{form}"
    if not folder.exists():
        command(FORMS[form], of, folder)
    return folder


def dequantized(folder: Path) -> Path:
    out = folder.parent / f"{folder.name}-bf16"
    if not out.exists():
        convert("dequant", folder, out)
    return out


def data(folder: Path, samples: list[Ids] = SAMPLES) -> DataSpec:
    """Samples of several lengths, as ids."""
    file = folder / "ids.jsonl"
    file.write_text("".join(f'{{"input_ids": {sample.tolist()}}}\n' for sample in samples))
    return DataSpec(str(file), len(samples), 64)


def evaluated(repo: Path, against: Path, spec: DataSpec, **more: Any) -> Evaluation:
    given = {"devices": ["cpu"], **more}
    return engine.evaluate([open_source(repo)], open_source(against), spec, **given)


def check(found: Evaluation, expected: oracle.Expected) -> None:
    logits = found.logits
    assert logits is not None
    assert logits.kl == pytest.approx(expected.kl, abs=1e-5)
    assert logits.kl_error == pytest.approx(expected.kl_error, abs=1e-5)
    assert logits.perplexity == pytest.approx(expected.perplexity, rel=1e-4)
    assert logits.source_perplexity == pytest.approx(expected.source_perplexity, rel=1e-4)
    assert logits.agreement == expected.agreement
    assert found.hidden == pytest.approx(expected.hidden, rel=1e-6)
    assert expected.kl > 1e-4  # there is something to be found


@cache
def whole_run(folder: Path) -> Any:
    return oracle.run(oracle.whole(folder), SAMPLES)


def expected(source: Path, repo: Path) -> oracle.Expected:
    return oracle.compared(whole_run(source), whole_run(repo), SAMPLES)


# --- Equal to whole models -----------------------------------------------------------------------


def dense(**over: Any) -> Any:
    return models.hf.Qwen3Config(**{
        **models.COMMON, "intermediate_size": 320, "num_key_value_heads": 2, "head_dim": 32, **over,
    })  # fmt: skip


CASES: dict[str, tuple[models.Make, dict[str, Any], str]] = {
    **{form: (models.qwen3_moe, {}, form) for form in FORMS},
    # Linear attention, latent attention, dense layers before sparse ones, shared experts.
    **{make.__name__: (make, {}, "w4a16") for make in models.FAMILIES[1:]},
    "a tied head": (models.qwen3_moe, {"tie_word_embeddings": True}, "w4a16"),
    "dense": (dense, {}, "all-int4"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_what_its_dequantized_weights_are(
    case: str, folders: Path, tmp_path: Path
) -> None:
    make, over, form = CASES[case]
    of = source(folders, make, **over)
    repo = made(form, of)
    check(evaluated(repo, of, data(tmp_path)), expected(of, dequantized(repo)))


def _fp8_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Codes of a scale for 128 columns, times the scale: what vLLM makes of rows beside block FP8."""
    parts = []
    for part in torch.split(rows, 128, -1):
        scale = part.abs().amax(-1, keepdim=True) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, -1)


def _int8_tokens(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale).round() * scale


@pytest.mark.parametrize(("form", "rounds"), [("fp8", _fp8_blocks), ("int8", _int8_tokens)])
def test_activations_as_the_config_states(
    form: str, rounds: Callable[[torch.Tensor], torch.Tensor], folders: Path, tmp_path: Path
) -> None:
    """Of the folder alone, in linear layers and experts; and it says so."""
    of = source(folders)
    repo = made(form, of)
    spec = data(tmp_path)
    found = evaluated(repo, of, spec, activations=True)
    whole = oracle.with_rounded_inputs(oracle.whole(dequantized(repo)), rounds)
    wanted = oracle.compared(whole_run(of), oracle.run(whole, SAMPLES), SAMPLES)
    check(found, wanted)
    assert wanted.kl > 1.02 * expected(of, dequantized(repo)).kl
    assert found.fact()["activations"] is True
    assert any("activations are rounded" in note for note in found.notes)
    assert not any("found no quantized activations" in note for note in found.notes)


def test_activations_that_no_config_states(folders: Path, tmp_path: Path) -> None:
    of = source(folders)
    spec = data(tmp_path)
    found = evaluated(made("w4a16", of), of, spec, activations=True)
    plain = evaluated(made("w4a16", of), of, spec)
    assert found.logits == plain.logits
    assert "activations" not in plain.fact()
    assert any(f"{made('w4a16', of)}: found no quantized" in note for note in found.notes)


def test_experts_for_cpu_kernels(folders: Path, tmp_path: Path) -> None:
    """Codes taken from their places by the format's definition; the source is the GPU side, or W4A16
    of it whose experts are not used."""
    of = source(folders)
    cpu = folders / "amx"
    command("amx --method int4 --numa 1", of, cpu)
    model = oracle.whole(of)
    theirs = oracle.run(model, SAMPLES)
    oracle.put_amx_int4(model, cpu)
    wanted = oracle.compared(theirs, oracle.run(model, SAMPLES), SAMPLES)
    check(evaluated(cpu, of, data(tmp_path)), wanted)
    gpu = open_source(made("w4a16", of))
    check(evaluated(cpu, of, data(tmp_path), pair=gpu), wanted)


def test_two_numa_nodes(folders: Path, tmp_path: Path) -> None:
    """down is cut by columns, and each part has scales of its own, which are no coarser."""
    of = source(folders, moe_intermediate_size=256)
    found = []
    for numa in ("1", "2"):
        command(f"amx --method int8 --numa {numa}", of, tmp_path / numa)
        found.append(evaluated(tmp_path / numa, of, data(tmp_path)))
    assert found[0].logits is not None
    assert found[0].logits.kl > 1e-5
    for one, two in zip(found[0].hidden, found[1].hidden, strict=True):
        assert 0.5 * one < two < one


def test_a_quantized_source(folders: Path, tmp_path: Path) -> None:
    """Each side is decoded for itself: FP8 against INT4."""
    of = source(folders)
    a, b = made("fp8", of), made("w4a16", of)
    check(evaluated(b, a, data(tmp_path)), expected(dequantized(a), dequantized(b)))


def granite(**over: Any) -> Any:
    """Its logits are divided, its embeddings and residuals multiplied."""
    return models.hf.GraniteMoeConfig(**{
        **models.COMMON, "intermediate_size": 128, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 2, "logits_scaling": 4.0, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.2, **over,
    })  # fmt: skip


def test_what_a_class_does_to_its_logits(folders: Path, tmp_path: Path) -> None:
    of = source(folders, granite)
    repo = oracle.nudged(oracle.whole(of), folders / "granite-nudged")
    check(evaluated(repo, of, data(tmp_path)), expected(of, repo))


# --- Whatever there is room for -------------------------------------------------------------------


def test_slices_and_groups_change_nothing(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of the vocabulary of which the last is shorter, few tokens at a time, and an expert at a
    time: what a matrix product's own order does is all that differs."""
    of = source(folders)
    repo, spec = made("w4a16", of), data(tmp_path)
    one = evaluated(repo, of, spec)
    monkeypatch.setattr(head, "SLICE", 64)
    monkeypatch.setattr(head, "CHUNK", 16)
    monkeypatch.setattr(engine, "CHUNK", 8)
    monkeypatch.setattr(Budget, "experts", lambda *_: 1)
    monkeypatch.setattr(Budget, "tokens", lambda _: 32)
    many = evaluated(repo, of, spec)
    assert one.logits is not None
    assert many.logits is not None
    assert many.hidden == pytest.approx(one.hidden, rel=1e-9)
    assert many.logits.kl == pytest.approx(one.logits.kl, abs=1e-8)
    assert many.logits.perplexity == pytest.approx(one.logits.perplexity, rel=1e-6)
    assert many.logits.agreement == one.logits.agreement


def _kept(targets: torch.Tensor) -> tuple[head._Softmax, list[head._Softmax]]:
    """Sums of a source and of one other."""
    return head._Softmax(targets[:, None]), [head._Softmax(targets[:, None])]


def test_logits_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are scaled anew where a later slice has the largest logit, of either model, of any size."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 40, generator=generator, dtype=torch.float64) * 30 for _ in range(2))
    a[0] += torch.arange(40) * 20.0
    b[1] -= torch.arange(40) * 20.0
    targets = torch.tensor([0, 39, 7, 8, 20])
    sums = head._Apart(*_kept(targets))
    for first in range(0, 40, 8):
        sums.add(a[:, first : first + 8], [b[:, first : first + 8]], first)
    (found,) = head._scores(sums)
    p, q = a.log_softmax(1), b.log_softmax(1)
    assert torch.allclose(found.kl, (p.exp() * (p - q)).sum(1), rtol=1e-12)
    assert torch.allclose(found.source, -p.gather(1, targets[:, None])[:, 0], rtol=1e-12)
    assert torch.allclose(found.repo, -q.gather(1, targets[:, None])[:, 0], rtol=1e-12)
    assert torch.equal(found.agree, a.argmax(1) == b.argmax(1))


def test_the_first_of_equal_logits_is_preferred() -> None:
    flat = torch.zeros(1, 6, dtype=torch.float64)
    sums = head._Apart(*_kept(torch.tensor([0])))
    for first in (0, 3):
        sums.add(flat[:, :3], [flat[:, :3]], first)
    assert (int(sums.source.best[0]), head._scores(sums)[0].kl.item()) == (0, 0)


def test_the_same_folder_is_no_loss(folders: Path, tmp_path: Path) -> None:
    of = made("w4a16", source(folders))
    found = evaluated(of, of, data(tmp_path))
    assert found.logits is not None
    assert (found.logits.kl, found.logits.kl_error, found.logits.agreement) == (0, 0, 1)
    assert found.logits.perplexity == found.logits.source_perplexity
    assert set(found.hidden) == {0.0}


def test_some_layers(folders: Path, tmp_path: Path) -> None:
    of = source(folders)
    repo, spec = made("w4a16", of), data(tmp_path)
    found, whole = evaluated(repo, of, spec, layers=2), evaluated(repo, of, spec)
    assert found.hidden == whole.hidden[:2]
    assert (found.logits, found.layers, found.of_layers) == (None, 2, 4)
    assert "the first 2 of 4 layers: no perplexity, no KL, no agreement" in found.notes


def test_one_sample_has_no_standard_error(folders: Path, tmp_path: Path) -> None:
    of = source(folders)
    found = evaluated(made("w4a16", of), of, data(tmp_path, SAMPLES[:1]))
    assert found.logits is not None
    assert (found.logits.kl_error, found.samples, found.tokens) == (None, 1, 40)


# --- Refused ---------------------------------------------------------------------------------------


def test_too_little_memory_is_refused_before_work(
    folders: Path, tmp_path: Path, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = source(folders)
    monkeypatch.setattr(engine, "_embedded", None)
    with pytest.raises(RunError, match=r"needs \d+ MiB, and libraries .* give --memory \d+MiB"):
        evaluated(made("w4a16", of), of, data(tmp_path), memory=1 << 20)
    assert list(work_dir.iterdir()) == []


def test_the_memory_that_is_named_is_enough(folders: Path, tmp_path: Path) -> None:
    sizes = Sizes(400 << 20, 50 << 20, 7168, 2048, 18432, 2048, 2)
    with pytest.raises(RunError) as caught:
        Budget.of(1 << 30, sizes)
    need = int(str(caught.value).rsplit(" ", 1)[1].removesuffix("MiB")) << 20
    assert Budget.of(need, sizes).experts("cpu") == 1
    assert 50 < Budget.of(need + (5 << 30), sizes).experts("cpu") < 70  # 88 MB each
    assert Budget.of(64 << 30, sizes).tokens() > 500_000


def test_a_disk_too_small_is_refused(
    folders: Path, tmp_path: Path, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = source(folders)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(RunError, match="set TMPDIR to a larger disk"):
        evaluated(made("w4a16", of), of, data(tmp_path))
    assert list(work_dir.iterdir()) == []


def test_the_work_folder_goes(
    folders: Path, tmp_path: Path, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = source(folders)
    repo, spec = made("w4a16", of), data(tmp_path)
    evaluated(repo, of, spec)
    assert list(work_dir.iterdir()) == []

    def interrupted(*_: Any, **__: Any) -> None:
        assert list(work_dir.iterdir()) != []
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_apart", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluated(repo, of, spec)
    assert list(work_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"vocab_size": 320}, "vocab_size is 320, and 300 in"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, and 4 in"),
        ({"hidden_size": 256}, "hidden_size is 256, and 128 in"),
    ],
)
def test_models_of_other_sizes(
    over: dict[str, Any], says: str, folders: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=says):
        evaluated(source(folders, **over), source(folders), data(tmp_path))


def test_another_architecture(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'glm4_moe', and .* is 'qwen3_moe'.* name the checkpoint"
    ):
        evaluated(source(folders, models.glm4_moe), source(folders), data(tmp_path))


def test_experts_as_the_source(folders: Path, tmp_path: Path) -> None:
    of = source(folders)
    command("amx --method int4 --numa 1", of, tmp_path / "cpu")
    with pytest.raises(CheckpointError, match="holds CPU experts alone; name the checkpoint"):
        evaluated(of, tmp_path / "cpu", data(tmp_path))


def test_experts_of_another_model(folders: Path, tmp_path: Path) -> None:
    of, other = source(folders), source(folders, moe_intermediate_size=256)
    command("amx --method int4 --numa 1", of, tmp_path / "cpu")
    with pytest.raises(CheckpointError, match="intermediate size is 128, and 256 in"):
        evaluated(tmp_path / "cpu", other, data(tmp_path))


def test_a_stage_of_a_pipeline(folders: Path, tmp_path: Path) -> None:
    of = source(folders)
    command("split --pp 2,2", of, tmp_path / "stages")
    stage = tmp_path / "stages" / "stage-00-of-02"
    with pytest.raises(CheckpointError, match="is one pipeline stage"):
        evaluated(stage, of, data(tmp_path))


def test_data_that_are_not_there(folders: Path, tmp_path: Path) -> None:
    of = source(folders)
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        evaluated(of, of, DataSpec(str(tmp_path / "gone.jsonl"), 4, 64))


def test_data_with_nothing_to_predict(folders: Path, tmp_path: Path) -> None:
    of = source(folders)
    spec = data(tmp_path, [np.array([5]), np.array([6])])
    with pytest.raises(DataError, match="no sample has 2 tokens"):
        evaluated(of, of, spec)
    assert evaluated(of, of, spec, layers=1).hidden == (0.0,)


def test_an_id_beyond_the_vocabulary(folders: Path, tmp_path: Path) -> None:
    of = source(folders)
    with pytest.raises(DataError, match="token id 300 is outside the model's vocabulary of 300"):
        evaluated(of, of, data(tmp_path, [np.array([5, 300])]))


def test_hidden_states_that_are_not_finite(folders: Path, tmp_path: Path) -> None:
    """A weight of one folder that overflows what BF16 holds."""
    of = source(folders)
    model = oracle.whole(of)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.fill_(3e38)
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(RunError, match=r"broken: hidden states after layer 1 are not finite"):
        evaluated(tmp_path / "broken", of, data(tmp_path))


def test_a_missing_library(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = source(folders)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = r"torch and transformers are not installed: pip install 'qconvert\[calibrate\]'"
    with pytest.raises(PlanError, match=said):
        evaluated(of, of, data(tmp_path))


# --- Text, and folders of stages -------------------------------------------------------------------


def test_a_class_that_cannot_be_imported(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package that fails is named, and no config is blamed."""
    hidden = ModuleNotFoundError("Could not import module 'Qwen3MoeForCausalLM'")
    hidden.__cause__ = OSError("libbroken.so: undefined symbol")

    def fails(*_: Any, **__: Any) -> None:
        raise hidden

    of = source(folders)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", fails)
    with pytest.raises(
        PlanError, match=r"cannot import .*'qwen3_moe' here \(OSError: libbroken.so"
    ):
        evaluated(of, of, data(tmp_path))


def words(folder: Path, order: list[str]) -> None:
    """A tokenizer of whole words, whose ids are in this order."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["[UNK]", *order])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def test_text_and_another_tokenizer(folders: Path, tmp_path: Path) -> None:
    """Ids are what the source's tokenizer makes; a folder whose own makes others is refused, one that is
    only written otherwise is not."""
    of, repo = (shutil.copytree(source(folders), tmp_path / name) for name in ("of", "repo"))
    known = ["we", "see", "what", "it", "cost", "us"]
    words(of, known)
    words(repo, known)
    file = tmp_path / "some.txt"
    file.write_text("we see what it cost us\n" * 20)
    spec = DataSpec(str(file), 2, 24)
    found = evaluated(repo, of, spec)
    assert (found.data, found.tokens) == ("some.txt", 48)
    text = (repo / "tokenizer.json").read_text()
    (repo / "tokenizer.json").write_text(json.dumps(json.loads(text)))
    assert evaluated(repo, of, spec) == found
    words(repo, known[::-1])
    with pytest.raises(DataError, match=r"makes other ids of .*some\.txt .* copy the tokenizer's"):
        evaluated(repo, of, spec)


def test_the_folder_of_all_stages(folders: Path, tmp_path: Path) -> None:
    of = source(folders)
    command("split --pp 2,2", of, tmp_path / "stages")
    found = evaluated(tmp_path / "stages", of, data(tmp_path))
    assert found.logits is not None
    assert (found.logits.kl, set(found.hidden)) == (0, {0.0})
