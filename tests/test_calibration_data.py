"""Calibration data: which tokens come out of which file, to the last one, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from calibrate_models import TEXT, VOCAB, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from qconvert.core.errors import DataError
from qconvert.samples.data import (
    DataSpec,
    amount,
    digest,
    load_tokens,
    most_tokens,
    sample_order,
)
from qconvert.samples.tokenizer import text_pieces, tokenizer_files


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB}), encoding="utf-8")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tokenizer that puts BOS before texts, sizes nested as in multi-modal configs,
    and no chat template."""
    folder = tmp_path_factory.mktemp("bos")
    config = {"text_config": {"vocab_size": VOCAB}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    make_tokenizer(folder, bos=True, template=False)
    return folder


def ids_of(folder: Path, text: str) -> list[int]:
    """What the tokenizer's own library makes of a text, without special tokens."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found: list[int] = loaded.encode(text, add_special_tokens=False).ids
    return found


def write(file: Path, content: str | Sequence[Any]) -> str:
    if not isinstance(content, str):
        content = "".join(json.dumps(row) + "\n" for row in content)
    file.write_text(content, encoding="utf-8")
    return str(file)


class Heard:
    """What was remarked."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, text: str) -> None:
        self.said.append(text)


def load(spec: DataSpec, folder: Path) -> tuple[list[list[int]], list[str]]:
    heard = Heard()
    samples = load_tokens(spec, folder, heard)
    assert all(ids.dtype == np.int64 and ids.ndim == 1 for ids in samples)
    return [ids.tolist() for ids in samples], heard.said


# --- Text ----------------------------------------------------------------------------------------


def test_a_text_is_cut_into_windows(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "t.txt", TEXT)
    samples, said = load(DataSpec(data, samples=5, length=32), model)
    stream = [i for piece in text_pieces(Path(data)) for i in ids_of(model, piece)]
    assert samples == [stream[32 * n : 32 * n + 32] for n in range(5)]
    assert said == []


def test_a_text_in_many_batches_is_still_one_stream(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qconvert.samples.tokenizer._PIECE", 64)  # 1024 characters a batch
    data = write(tmp_path / "t.txt", TEXT)
    assert len(TEXT) > 5 * 1024
    stream = [i for piece in text_pieces(Path(data)) for i in ids_of(model, piece)]
    samples, _ = load(DataSpec(data, samples=10**6, length=50), model)
    assert samples == [stream[50 * n : 50 * n + 50] for n in range(len(stream) // 50)]


def test_windows_begin_with_what_the_tokenizer_puts_before_a_text(
    with_bos: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "t.txt", TEXT)
    samples, _ = load(DataSpec(data, samples=3, length=32), with_bos)
    stream = [i for piece in text_pieces(Path(data)) for i in ids_of(with_bos, piece)]
    assert samples == [[0, *stream[31 * n : 31 * n + 31]] for n in range(3)]


def test_the_rest_of_a_text_is_left_out_and_a_short_text_is_one_sample(
    model: Path, tmp_path: Path
) -> None:
    text = "The fox sleeps.\n"
    whole = ids_of(model, text)
    data = write(tmp_path / "t.txt", text)
    half = len(whole) - 1
    samples, said = load(DataSpec(data, samples=9, length=half), model)
    assert samples == [whole[:half]]
    assert said == [f"{data}: found 1 sample, fewer than the 9 requested"]
    samples, said = load(DataSpec(data, samples=1, length=1000), model)
    assert samples == [whole]
    assert said == [f"{data}: 1 of 1 sample shorter than 1000 tokens; {len(whole)} tokens in all"]


def test_a_seed_draws_windows_of_the_whole_text(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "t.txt", TEXT)
    everything, _ = load(DataSpec(data, samples=10**6, length=16), model)
    drawn, said = load(DataSpec(data, samples=7, length=16, seed=3), model)
    count = len(everything)
    expected: list[int] = []
    draw = 0
    while len(expected) < 7:
        number = xxhash.xxh3_64(f"3:{draw}".encode()).intdigest() % count
        draw += 1
        if number not in expected:
            expected.append(number)
    assert drawn == [everything[number] for number in expected]
    assert expected != sorted(expected)
    assert said == []


def test_draws_are_those_written_down() -> None:
    # xxh3_64("1:0") and on, modulo 10: written down once, so that another hash or key would show.
    assert list(sample_order(10, 1)) == [7, 0, 5, 9, 1, 8, 3, 2, 4, 6]


@given(count=st.integers(0, 60), seed=st.integers(0, 2**32 - 1))
def test_every_sample_is_drawn_once(count: int, seed: int) -> None:
    order = list(sample_order(count, seed))
    assert sorted(order) == list(range(count))
    assert seed or order == list(range(count))


@given(
    parts=st.lists(
        st.sampled_from(["a", "é", " ", "\n", "\r\n", "\n\n", "line\n" * 15_000]), max_size=12
    )
)
def test_pieces_are_all_of_a_text(
    parts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = "".join(parts)
    file = tmp_path_factory.mktemp("pieces") / "t.txt"
    file.write_bytes(text.encode())
    pieces = list(text_pieces(file))
    assert "".join(pieces) == text
    assert all(pieces)
    assert all(piece.endswith("\n") and len(piece) < 70_000 for piece in pieces[:-1])


# --- JSONL ---------------------------------------------------------------------------------------


def test_lines_are_samples(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "The fox sleeps. " * 20},
        {"input_ids": [5, 6, 7]},
        {
            "messages": [
                {"role": "user", "content": "fox?"},
                {"role": "assistant", "content": "cat"},
            ]
        },
        {"conversations": [{"from": "human", "value": "fox?"}, {"from": "gpt", "value": "cat"}]},
    ]
    data = write(tmp_path / "d.jsonl", rows)
    samples, said = load(DataSpec(data, samples=4, length=24), model)
    chat = "<|im_start|>user\nfox?<|im_end|>\n<|im_start|>assistant\ncat<|im_end|>\n"
    talk = ids_of(model, chat)
    assert talk[0] == 1  # the special token, not its letters
    document = ids_of(model, rows[0]["text"])
    assert samples == [document[:24], [5, 6, 7], talk[:24], talk[:24]]
    short, total = sum(len(s) < 24 for s in samples), sum(map(len, samples))
    assert 0 < short < 4
    assert said == [f"{data}: {short} of 4 samples shorter than 24 tokens; {total} tokens in all"]


def test_a_named_column_is_taken(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [{"text": "no", "messages": [], "body": "The fox"}])
    samples, _ = load(DataSpec(data, samples=1, length=64, column="body"), model)
    assert samples == [ids_of(model, "The fox")]


def test_lines_without_text_are_passed_over_and_said(model: Path, tmp_path: Path) -> None:
    data = write(
        tmp_path / "d.jsonl",
        '\n{"text": ""}\n   \n{"text": "fox"}\n{"input_ids": []}\n{"text": "cat"}',
    )
    samples, said = load(DataSpec(data, samples=2, length=1), model)
    assert samples == [ids_of(model, "fox")[:1], ids_of(model, "cat")[:1]]
    assert said == [f"{data}: skipped 2 samples without tokens"]


def test_seed_0_keeps_the_order_of_lines(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [{"input_ids": [n]} for n in range(50)])
    assert load(DataSpec(data, samples=50, length=1), model)[0] == [[n] for n in range(50)]
    drawn = load(DataSpec(data, samples=50, length=1, seed=9), model)[0]
    assert drawn != [[n] for n in range(50)]
    assert sorted(drawn) == [[n] for n in range(50)]
    assert load(DataSpec(data, samples=10, length=1, seed=9), model)[0] == drawn[:10]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('{"text": "a"}\n\n{"text": \n', ["d.jsonl:3", "not valid JSON"]),
        ('{"text": "a"}\n["a"]\n', ["d.jsonl:2", "expected an object, found list"]),
        ('{"words": "a"}\n', ["d.jsonl:1", "text, messages", "found words", "--column"]),
        ("{}\n", ["d.jsonl:1", "found none"]),
        ('{"text": "a", "messages": []}\n', ["d.jsonl:1", "found text, messages", "--column"]),
        ('{"text": 5}\n', ["d.jsonl:1", "'text'", "found int"]),
        ('{"text": null}\n', ["d.jsonl:1", "'text'", "found NoneType"]),
        ('{"input_ids": [1, true]}\n', ["d.jsonl:1", "'input_ids'", "token ids"]),
        ('{"input_ids": [1, 300]}\n', ["d.jsonl:1", "token id 300", "vocabulary of 300"]),
        ('{"input_ids": [1, -1]}\n', ["d.jsonl:1", "token id -1"]),
        ('{"messages": [{"content": "a"}]}\n', ["d.jsonl:1", "role and content", "found content"]),
        ('{"messages": ["a"]}\n', ["d.jsonl:1", "'messages'"]),
        ('{"conversations": [{"from": "x", "value": "a"}]}\n', ["d.jsonl:1", "'x'", "human"]),
        ('{"messages": [{"role": "user", "content": [1]}, {"role": 1, "content": 2}]}\n', []),
        ("", ["d.jsonl", "found none"]),
        ("\n  \n", ["d.jsonl", "found none"]),
        ('{"text": ""}\n', ["d.jsonl", "expected 512 samples, found none"]),
    ],
)
def test_lines_that_are_refused(lines: str, says: list[str], model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", lines)
    if not says:  # a template takes what it takes
        load(DataSpec(data), model)
        return
    with pytest.raises(DataError) as caught:
        load(DataSpec(data), model)
    assert "\n" not in str(caught.value)
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize("wrong", [2**63, 2**200, -(2**70), -1, VOCAB])
def test_ids_beyond_the_vocabulary_or_64_bits(wrong: int, model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [{"input_ids": [1]}, {"input_ids": [2, wrong]}])
    with pytest.raises(DataError, match=rf"x\.jsonl:2: token id {wrong} is outside"):
        load_tokens(DataSpec(file, samples=2), model)


def test_a_template_that_refuses_is_named_with_the_line(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    data = write(tmp_path / "d.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(DataError, match=r"d.jsonl:1: the chat template rejects it: no system"):
        load(DataSpec(data), folder)


def test_a_conversation_has_the_special_tokens_of_its_template_alone(
    with_bos: Path, tmp_path: Path
) -> None:
    """And a document those of the tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(with_bos, folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    talk = {"messages": [{"role": "user", "content": "The fox"}]}
    data = write(tmp_path / "d.jsonl", [talk, {"text": "The fox"}])
    assert load(DataSpec(data, samples=2), folder)[0] == [[0, *ids_of(folder, "The fox")]] * 2


def test_a_conversation_needs_a_chat_template(with_bos: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(DataError, match=r"expected a chat template .*d\.jsonl:1.*`text`"):
        load(DataSpec(data), with_bos)


# --- Tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_of_ids(dtype: torch.dtype, model: Path, tmp_path: Path) -> None:
    ids = torch.arange(5 * 12).view(5, 12).to(dtype)
    save_file({"aside": torch.ones(3), "input_ids": ids}, tmp_path / "t.safetensors")
    data = str(tmp_path / "t.safetensors")
    samples, said = load(DataSpec(data, samples=3, length=8), model)
    assert samples == ids[:3, :8].tolist()
    assert said == []
    samples, said = load(DataSpec(data, samples=9, length=20), model)
    assert samples == ids.tolist()
    assert len(said) == 2


def test_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    """A mask of ones says nothing."""
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    ids = torch.tensor([[9, 0]])
    save_file({"ids": ids, "attention_mask": torch.ones_like(ids)}, tmp_path / "t.safetensors")
    data = str(tmp_path / "t.safetensors")
    assert load(DataSpec(data, samples=1, length=2, column="ids"), tmp_path)[0] == [[9, 0]]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, ["'input_ids'", "found ids", "--column"]),
        ({"input_ids": torch.zeros(2, 2)}, ["'input_ids'", "I64 or I32", "F32"]),
        ({"input_ids": torch.zeros(2, 2, dtype=torch.int16)}, ["'input_ids'", "I16"]),
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, ["'input_ids'", "[samples, ids]"]),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.int64)}, ["'input_ids'", "[0, 4]"]),
        ({"input_ids": torch.tensor([[3, 4], [5, 300]])}, ["row 1", "token id 300"]),
        ({"input_ids": torch.tensor([[-1, 4]], dtype=torch.int32)}, ["row 0", "token id -1"]),
        (
            {
                "input_ids": torch.tensor([[3, 4], [5, 6]]),
                "attention_mask": torch.tensor([[1, 1], [0, 1]]),
            },
            ["attention_mask", "padded"],
        ),
    ],
)
def test_tokens_that_are_refused(
    tensors: dict[str, torch.Tensor], says: list[str], model: Path, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "t.safetensors")
    with pytest.raises(DataError) as caught:
        load(DataSpec(str(tmp_path / "t.safetensors")), model)
    assert "t.safetensors" in str(caught.value)
    for part in says:
        assert part in str(caught.value)


# --- Datasets ------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset as a folder of files, two splits of it; the client's cache beside it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split, word in (("train", "fox"), ("test", "cat")):
        rows = [{"text": f"The {word} sleeps {n} times.", "label": n} for n in range(4)]
        write(folder / f"{split}.jsonl", rows)
    return folder


def test_rows_of_a_dataset(dataset: Path, model: Path) -> None:
    expected = [ids_of(model, f"The fox sleeps {n} times.") for n in range(4)]
    assert load(DataSpec(f"hf-dataset:{dataset}", samples=4), model)[0] == expected
    expected = [ids_of(model, f"The cat sleeps {n} times.") for n in range(2)]
    named = DataSpec(f"hf-dataset:{dataset}:test", samples=2)
    assert load(named, model)[0] == expected
    named = DataSpec(f"hf-dataset:{dataset}:default:test", samples=2)
    assert load(named, model)[0] == expected


def test_a_dataset_with_configurations(dataset: Path, model: Path) -> None:
    (dataset / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: foxes, data_files: train.jsonl}\n"
        "- {config_name: cats, data_files: test.jsonl}\n---\n"
    )
    expected = [ids_of(model, "The cat sleeps 0 times.")]
    assert load(DataSpec(f"hf-dataset:{dataset}:cats:train", samples=1), model)[0] == expected


def test_the_digest_of_a_dataset_is_of_its_rows(dataset: Path, model: Path, tmp_path: Path) -> None:
    first = digest(DataSpec(f"hf-dataset:{dataset}"), model)
    moved = tmp_path / "elsewhere"
    shutil.copytree(dataset, moved)
    assert digest(DataSpec(f"hf-dataset:{moved}"), model) == first
    rows = [{"text": f"The fox sleeps {n} times.", "label": -n} for n in range(4)]
    write(moved / "train.jsonl", rows)
    assert digest(DataSpec(f"hf-dataset:{moved}"), model) == first  # a column nobody takes
    assert digest(DataSpec(f"hf-dataset:{moved}:test"), model) != first
    rows[3]["text"] = "The fox sleeps 3 times!"
    write(moved / "train.jsonl", rows)
    assert digest(DataSpec(f"hf-dataset:{moved}"), model) != first


@pytest.mark.parametrize(
    ("name", "column", "says"),
    [
        ("", None, "expected hf-dataset:NAME"),
        ("a:b:c:d", None, "expected hf-dataset:NAME"),
        ("a::c", None, "expected hf-dataset:NAME"),
        ("{folder}:nosuch", None, "cannot be loaded"),
        ("{folder}/nosuch", None, "cannot be loaded"),
        ("{folder}", "body", "expected column 'body', found text, label"),
    ],
)
def test_datasets_that_are_refused(
    name: str, column: str | None, says: str, dataset: Path, model: Path
) -> None:
    spec = DataSpec(f"hf-dataset:{name.format(folder=dataset)}", column=column)
    for call in (digest, load_tokens):
        with pytest.raises(DataError) as caught:
            call(spec, model)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


# --- Made-up tokens ------------------------------------------------------------------------------


def test_synthetic_tokens_are_always_the_same_and_never_silent(model: Path) -> None:
    spec = DataSpec(synthetic=True, samples=3, length=4, seed=1)
    samples, said = load(spec, model)
    # numpy's RandomState(1).randint(0, 300, (3, 4)), a stream that numpy promises never to change.
    assert samples == [[37, 235, 72, 255], [203, 133, 144, 129], [71, 237, 281, 178]]
    assert len(said) == 1
    assert "tokens are random: 3 x 4" in said[0]
    assert "not for a model to serve" in said[0]


def test_synthetic_tokens_cover_the_vocabulary(model: Path) -> None:
    samples, _ = load(DataSpec(synthetic=True, samples=64, length=256), model)
    counts = np.bincount(np.concatenate([np.array(s) for s in samples]), minlength=VOCAB)
    assert counts.size == VOCAB
    assert counts.min() > 0
    assert counts.max() < 3 * counts.mean()


# --- Folders and specs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "--data FILE, or --synthetic"),
        ({"data": "x.parquet"}, "x.parquet: expected a name that ends in .txt, .jsonl"),
        ({"data": "x"}, "expected a name that ends in"),
        ({"data": "x.txt", "synthetic": True}, "omit --data x.txt"),
        ({"data": "x.txt", "samples": 0}, "found 0 x 2048"),
        ({"data": "x.txt", "length": 0}, "found 512 x 0"),
        ({"data": "x.txt", "seed": -1}, "found -1"),
        ({"data": "x.txt", "seed": 2**32}, "expected a seed from 0"),
        ({"data": "x.txt", "column": "body"}, "no column 'body'"),
    ],
)
def test_specs_that_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        DataSpec(**fields)
    assert says in str(caught.value)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "safetensors"])
def test_data_that_is_not_there(suffix: str, model: Path, tmp_path: Path) -> None:
    spec = DataSpec(str(tmp_path / f"none.{suffix}"))
    for call in (digest, load_tokens):
        with pytest.raises(DataError, match=rf"none\.{suffix}: .*cannot be read"):
            call(spec, model)


def test_a_text_that_is_no_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"fine\n\xff\xfe")
    with pytest.raises(DataError, match=r"t\.txt: is not UTF-8"):
        load(DataSpec(str(tmp_path / "t.txt")), model)
    (tmp_path / "t.txt").write_bytes(b"")
    with pytest.raises(DataError, match="found none"):
        load(DataSpec(str(tmp_path / "t.txt")), model)


def test_a_window_has_room_for_text(with_bos: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "t.txt", TEXT)
    with pytest.raises(DataError, match="length 1 leaves no space"):
        load(DataSpec(data, length=1), with_bos)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 10, "model_type": "qwen3_moe"}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    data = write(tmp_path / "t.txt", TEXT)
    with pytest.raises(DataError, match=r"found none; download its tokenizer.json"):
        load(DataSpec(data), tmp_path)
    assert len(load(DataSpec(synthetic=True, samples=2), tmp_path)[0]) == 2


def test_a_tokenizer_that_brings_code_is_not_run(model: Path, tmp_path: Path) -> None:
    """Kimi's is such a one."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 300, "model_type": "kimi_k2"}')
    (folder / "tiktoken.model").write_bytes(b"YQ== 0\n")
    config = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own_tokenizer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    data = write(tmp_path / "d.jsonl", [{"text": "The fox"}])
    with pytest.raises(DataError, match="cannot load the tokenizer") as caught:
        load(DataSpec(data), folder)
    assert "give tokenized safetensors" in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("config", [None, "{", "[]", "{}", '{"vocab_size": "many"}'])
def test_a_folder_without_a_vocabulary_size(config: str | None, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(DataError, match=r"config\.json"):
        load(DataSpec(synthetic=True), tmp_path)


# --- The digest ----------------------------------------------------------------------------------


def test_the_digest_is_of_contents_and_settings(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "t.txt", TEXT)
    first = digest(DataSpec(data), model)
    assert len(first) == 32
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    write(moved / "other.txt", TEXT)
    assert digest(DataSpec(str(moved / "other.txt")), moved) == first
    for changed in (
        DataSpec(data, samples=511),
        DataSpec(data, length=2047),
        DataSpec(data, seed=1),
        DataSpec(synthetic=True),
    ):
        assert digest(changed, model) != first
    lines = write(tmp_path / "d.jsonl", [{"text": "a", "body": "b"}])
    columns = {digest(DataSpec(lines, column=column), model) for column in (None, "text", "body")}
    assert len(columns) == 3
    (moved / "config.json").write_text('{"vocab_size": 301}')  # part of the source's own identity
    assert digest(DataSpec(data), moved) == first
    write(moved / "other.txt", TEXT + " ")
    assert digest(DataSpec(str(moved / "other.txt")), moved) != first
    write(moved / "other.txt", TEXT)
    (moved / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    assert digest(DataSpec(str(moved / "other.txt")), moved) != first


def test_which_file_says_what_is_in_the_digest(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "t.txt", TEXT)
    found = set()
    for name in ("tokenizer_a.json", "tokenizer_b.json"):  # at one place in the order
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / name).write_text("{}")
        found.add(digest(DataSpec(data), tmp_path / name))
    assert len(found) == 2


def test_the_tokenizer_is_in_the_digest_where_it_is_used(model: Path, tmp_path: Path) -> None:
    names = [file.name for file in tokenizer_files(model)]
    assert names == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    (moved / "chat_template.jinja").write_text("{{ messages[0].content }}")
    lines = write(tmp_path / "d.jsonl", [{"text": "a"}])
    assert digest(DataSpec(lines), moved) != digest(DataSpec(lines), model)
    save_file({"input_ids": torch.zeros(1, 2, dtype=torch.int64)}, tmp_path / "t.safetensors")
    tokens = str(tmp_path / "t.safetensors")
    assert digest(DataSpec(tokens), moved) == digest(DataSpec(tokens), model)


def test_the_digest_imports_no_model_library(model: Path, tmp_path: Path) -> None:
    lines = write(tmp_path / "d.jsonl", [{"text": "a"}])
    save_file({"input_ids": torch.zeros(1, 2, dtype=torch.int64)}, tmp_path / "t.safetensors")
    code = f"""
import sys
from pathlib import Path
from qconvert.samples.data import DataSpec, digest
for data in ({lines!r}, {str(tmp_path / "t.safetensors")!r}):
    print(digest(DataSpec(data), Path({str(model)!r})))
digest(DataSpec(synthetic=True), Path({str(model)!r}))
print(sorted({{"torch", "transformers", "numpy", "datasets"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    said = done.stdout.split("\n")
    assert said[0] == digest(DataSpec(lines), model)
    assert said[2] == "[]"


def test_remarks_are_said_by_default(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_tokens(DataSpec(synthetic=True, samples=1, length=1), model)
    assert capsys.readouterr().err.startswith("qconvert: tokens are random: 1 x 1")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"text": "' + "x" * 389 + '"}\n\n{"text": "short one"}\n', (2, 64 + 5)),
        ("a.txt", "x" * 1023 + "\n", (4, 256)), ("a.txt", "x" * 100 + "\n", (1, 25)),
    ],
)  # fmt: skip
def test_the_plan_counts_samples_without_a_tokenizer(
    name: str, text: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert amount(DataSpec(data=str(tmp_path / name), samples=4, length=64)) == expected
    assert amount(DataSpec(synthetic=True)) is None


def test_disk_is_planned_for_tokens_that_a_text_can_have(tmp_path: Path) -> None:
    """One a byte, and one to begin a sample, at the most; chats may have more than their bytes."""
    for name, expected in (("a.txt", 100 + 4), ("a.jsonl", 4 * 64)):
        (tmp_path / name).write_text("x" * 100)
        assert most_tokens(DataSpec(data=str(tmp_path / name), samples=4, length=64)) == expected
    assert most_tokens(DataSpec(data=str(tmp_path / "a.txt"), samples=1, length=64)) == 64
