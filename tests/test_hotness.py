"""Statistics of a calibration and the map of hot experts, as the runtimes that take it read it."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import run_cli
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from qconvert.calibrate.expert_stats import (
    begin,
    contents,
    layers,
    load_counts,
    load_layer,
    logical_count,
    save_hotness,
    save_layer,
    write_hotness,
)
from qconvert.calibrate.settings import LayerStats
from qconvert.cli.demo import write_sample
from qconvert.core.errors import DataError, OutputError
from qconvert.run.work.files import Files

E, H, I = 3, 4, 2  # noqa: E741
ABOUT = {"samples": 2, "length": 8, "seed": 0, "data": "00ff"}


def stats(seed: int = 0) -> LayerStats:
    random = np.random.default_rng(seed)
    return LayerStats(
        counts=random.integers(0, 9, E),
        saliency=random.random(E, np.float32),
        gate_up_mean_square=random.random((E, H), np.float32),
        gate_up_absmax=random.random((E, H), np.float32),
        down_mean_square=random.random((E, I), np.float32),
        down_absmax=random.random((E, I), np.float32),
        few=(1,),
        rounded=(),
        dead_columns={"down_proj": 3},
        fallbacks=((2, "up_proj"),),
    )


# --- Statistics ----------------------------------------------------------------------------------


def test_a_layer_as_safetensors_reads_it(tmp_path: Path) -> None:
    begin(tmp_path / "s", ABOUT)
    made = stats()
    # Arrays of any layout are saved in rows, in the dtypes of the file.
    turned = replace(
        made, counts=made.counts[::-1].copy()[::-1],
        down_mean_square=np.asfortranarray(made.down_mean_square),
        down_absmax=made.down_absmax.astype(np.float64),
    )  # fmt: skip
    save_layer(tmp_path / "s", 12, turned)
    file = tmp_path / "s" / "layer-00012.safetensors"
    found = load_file(file)
    expected: dict[str, Any] = {
        "layers.12.counts": made.counts,
        "layers.12.saliency": made.saliency,
        "layers.12.gate_up.mean_square": made.gate_up_mean_square,
        "layers.12.gate_up.absmax": made.gate_up_absmax,
        "layers.12.down.mean_square": made.down_mean_square,
        "layers.12.down.absmax": made.down_absmax,
    }
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    assert json.loads(raw[8 : 8 + size])["__metadata__"] == {
        "few": "[1]",
        "rounded": "[]",
        "dead_columns": '{"down_proj": 3}',
        "fallbacks": '[[2, "up_proj"]]',
    }
    assert json.loads((tmp_path / "s" / "stats.json").read_text()) == ABOUT
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"stats.json", file.name}


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    begin(folder, ABOUT)
    assert layers(folder) == []
    for layer in (10, 2, 0):
        save_layer(folder, layer, stats(layer))
    begin(folder, ABOUT)  # a run that goes on
    assert layers(folder) == [0, 2, 10]
    counts = load_counts(folder)
    assert list(counts) == [0, 2, 10]
    for layer in (0, 2, 10):
        assert np.array_equal(counts[layer], stats(layer).counts)
        found = load_layer(folder, layer)
        assert np.array_equal(found["down.absmax"], stats(layer).down_absmax)
        assert np.array_equal(found["gate_up.mean_square"], stats(layer).gate_up_mean_square)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    begin(folder, ABOUT)
    with pytest.raises(OutputError, match="statistics of another calibration"):
        begin(folder, {**ABOUT, "seed": 1})
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"not empty and holds no stats\.json"):
        begin(other, ABOUT)
    with pytest.raises(DataError, match="expected a folder of --save-stats"):
        load_counts(other)
    with pytest.raises(DataError, match=r"layer-00007\.safetensors"):
        load_layer(folder, 7)
    save_layer(folder, 7, stats())
    (folder / "layer-00007.safetensors").rename(folder / "layer-00008.safetensors")
    with pytest.raises(DataError, match=r"expected I64 'layers\.8\.counts', found none"):
        load_layer(folder, 8)


class Cut(Files):
    """Stops at the rename."""

    def rename(self, old: Path, new: Path) -> None:
        raise OutputError("cut")


def test_a_layer_that_was_interrupted_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with pytest.raises(OutputError, match="cut"):
        begin(folder, ABOUT, Cut())
    with pytest.raises(DataError, match="found no stats"):
        layers(folder)
    begin(folder, ABOUT)
    with pytest.raises(OutputError, match="cut"):
        save_layer(folder, 0, stats(), Cut())
    assert layers(folder) == []
    save_layer(folder, 0, stats())
    assert layers(folder) == [0]


# --- The map -------------------------------------------------------------------------------------

COUNTS = {1: np.array([5, 0, 2]), 2: np.array([1, 9, 3])}


def test_the_file_as_json() -> None:
    found = contents(logical_count(COUNTS, 3, (1, 2)), ".json")
    assert found == b'{"logical_count": [[[0, 0, 0], [5, 0, 2], [1, 9, 3]]]}\n'


def as_sglang_kt(file: Path, num_layers: int, num_experts: int) -> torch.Tensor:
    """What sglang-kt makes of its file before it picks experts: [layers, experts] float32, by the
    checks it makes."""
    assert str(file).endswith(".pt")
    loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    assert list(loaded) == ["logical_count"]
    counts = loaded["logical_count"]
    assert counts.dim() == 3
    assert counts.shape[1:] == (num_layers, num_experts)
    summed: torch.Tensor = counts.sum(dim=0).float()
    return summed


def test_the_file_has_no_time_and_no_name_in_it(tmp_path: Path) -> None:
    write_hotness(tmp_path / "a.pt", COUNTS, 3, (1, 2))
    (tmp_path / "x").mkdir()
    write_hotness(tmp_path / "x" / "b.pt", COUNTS, 3, (1, 2))
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "x" / "b.pt").read_bytes()


def test_the_map_of_a_folder_of_statistics(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    begin(folder, ABOUT)
    save_layer(folder, 1, stats(1))
    with pytest.raises(DataError, match="no token was counted in layer 3"):
        save_hotness(folder, 4, (1, 3))
    assert not (folder / "hotness.pt").exists()
    save_layer(folder, 3, stats(3))
    file = save_hotness(folder, 4, (1, 3))
    assert file == folder / "hotness.pt"
    expected = [[0] * E, stats(1).counts.tolist(), [0] * E, stats(3).counts.tolist()]
    assert as_sglang_kt(file, 4, E).tolist() == expected
    begin(folder, ABOUT)  # it is still the same folder
    assert layers(folder) == [1, 3]


@pytest.mark.peer
def test_kt_kernel_puts_the_hottest_experts_on_the_gpu(tmp_path: Path) -> None:
    write_hotness(tmp_path / "h.pt", COUNTS, 3, (1, 2))
    torch.save(as_sglang_kt(tmp_path / "h.pt", 3, 3), tmp_path / "counts.pt")
    # In a process of its own: the import makes its thread flush denormals to zero.
    code = (
        "import sys, torch\n"
        "from kt_kernel import generate_gpu_experts_masks\n"
        "counts = torch.load(sys.argv[1], weights_only=True)\n"
        "print(generate_gpu_experts_masks(counts, 3).tolist())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "counts.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # 9, 5 and 3 are the largest.
    expected = [[False] * 3, [True, False, False], [False, True, True]]
    assert done.stdout.splitlines()[-1] == str(expected)


@pytest.mark.parametrize(
    ("counts", "layers_", "moe", "says"),
    [
        (COUNTS, 3, (1, 2, 0), ["layer 0", "to its end"]),
        ({}, 3, (1,), ["layer 1", "to its end"]),
        ({}, 3, (), ["layer 0", "to its end"]),
        (COUNTS, 2, (1, 2), ["layer 2", "below 2"]),
        (COUNTS, 3, (1,), ["layer 2", "another model"]),
        ({1: np.arange(3), 2: np.arange(4)}, 3, (1, 2), ["layer 2", "3 experts as in layer 1", "[4]"]),
        ({1: np.ones((1, 3), np.int64)}, 3, (1,), ["layer 1", "[1, 3]"]),
    ],
)  # fmt: skip
def test_counts_that_are_refused(
    counts: dict[int, Any], layers_: int, moe: tuple[int, ...], says: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        logical_count(counts, layers_, moe)
    for part in says:
        assert part in str(caught.value)


def test_a_map_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.pt or \.json, found '\.bin'"):
        write_hotness(tmp_path / "h.bin", COUNTS, 3, (1, 2))
    with pytest.raises(OutputError, match=r"h\.pt"):
        write_hotness(tmp_path / "none" / "h.pt", COUNTS, 3, (1, 2))


@pytest.mark.peer
def test_a_calibration_keeps_what_it_saw(tmp_path: Path) -> None:
    """The sample has 4 layers of 4 experts, of which 2 take each token; its draft layer is not run."""
    write_sample(tmp_path / "source")
    flags = [
        "--gptq", "--synthetic", "--group-size", "64", "--length", "32", "--set", "min_tokens=1",
        "--device", "cpu", "--jobs", "1", "--save-stats", str(tmp_path / "stats"),
    ]  # fmt: skip
    ran = run_cli("w4a16", tmp_path / "source", tmp_path / "out", *flags, "--samples", "2")
    assert ran.code == 0, ran.err
    assert "--init-expert-location hotness.pt" in ran.err
    summed = as_sglang_kt(tmp_path / "stats" / "hotness.pt", 4, 4)
    assert summed.sum(dim=1).tolist() == [2 * 32 * 2] * 4
    for layer, counts in load_counts(tmp_path / "stats").items():
        assert summed[layer].tolist() == counts.tolist()
        found = load_layer(tmp_path / "stats", layer)
        assert found["gate_up.mean_square"].shape == (4, 256)
        assert found["down.absmax"].shape == (4, 256)
        mean, largest = found["down.mean_square"], found["down.absmax"].astype(np.float64)
        assert np.all(mean <= largest**2 * (1 + 1e-5))
    text = (tmp_path / "stats" / "stats.json").read_text()
    about = json.loads(text)
    assert (about["samples"], about["length"], about["synthetic"]) == (2, 32, True)
    assert str(tmp_path) not in text
    ran = run_cli("w4a16", tmp_path / "source", tmp_path / "again", *flags, "--samples", "3")
    assert ran.code == 1
    assert "statistics of another calibration" in ran.err


@given(
    rows=st.lists(st.lists(st.integers(0, 2**62), min_size=2, max_size=2), min_size=1, max_size=5)
)
def test_both_forms_hold_the_same_numbers(rows: list[list[int]]) -> None:
    counts = {layer: np.array(row, np.int64) for layer, row in enumerate(rows)}
    found = logical_count(counts, len(rows), range(len(rows)))
    loaded: Any = torch.load(io.BytesIO(contents(found, ".pt")), weights_only=True)
    assert loaded["logical_count"].dtype == torch.int64
    assert loaded["logical_count"].tolist() == [rows]
    assert json.loads(contents(found, ".json")) == {"logical_count": [rows]}
