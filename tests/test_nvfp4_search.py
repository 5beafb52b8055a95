"""`nvfp4 --scales search`: what it gains, that no block is worse, and what a folder says of it. Oracles:
`inverse`, written from the definitions; every E4M3 number tried; for bytes of the compiled loop
test_compiled.py, for other projects' decoders test_nvfp4_peer.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import run_cli
from data_folders import lines, store, unsealed
from mutants import Bench
from nvfp4_rows import DTYPES, KINDS, Array, held, matrix, ours
from test_scales import findings
from test_w4a16 import ordinary

from qconvert.core.parameter_names import Dialect
from qconvert.formats.nvfp4.encode import PackNvfp4, Scales, inverse
from qconvert.ops.fp4 import from_e4m3
from qconvert.validators.weights.searched import nvfp4_fits

DIALECTS: list[Dialect] = ["compressed-tensors", "modelopt"]
both = pytest.mark.parametrize("dialect", DIALECTS)


@cache
def drawn(kind: str) -> Array:
    random = np.random.default_rng(5)
    values = 0.02 * random.standard_t(4, (64, 1024))
    if kind == "gaussian":
        values = 0.02 * random.standard_normal((64, 1024))
    elif kind == "outliers":
        values[:, ::37] *= 10
    return held(values.astype(np.float32), "BF16")


def meant(
    values: Array, dialect: Dialect, scales: Scales, dtype: str = "BF16"
) -> tuple[Array, Array, float]:
    """The weights that the bytes mean, block scales with the own one, and the own one as a factor."""
    (made,) = ours(dialect, dtype, values, scales=scales)
    rows = values.shape[0]
    packed, scale = (
        np.frombuffer(part, np.uint8).reshape(rows, -1) for part in (made.packed, made.scale)
    )
    own = np.frombuffer(made.own, np.float32)[0]
    with np.errstate(over="ignore"):
        found = inverse(packed, scale, float(own), dialect)
        blocks = from_e4m3(scale)
        factor = blocks * own if dialect == "modelopt" else blocks / own
    return found, factor, float(own) if dialect == "modelopt" else 1 / float(own)


def lost(values: Array, found: Array) -> Array:
    """Squared errors of blocks, of which what lies along the weights counts twice."""
    blocks = values.astype(np.float64).reshape(-1, 16)
    off = blocks - found.reshape(-1, 16)
    own = np.square(blocks).sum(axis=1)
    made: Array = np.square(off).sum(axis=1)
    made += np.square((off * blocks).sum(axis=1)) / np.where(own > 0, own, 1)
    return made


@both
@pytest.mark.parametrize(
    ("kind", "most"), [("gaussian", 0.75), ("heavy", 0.83), ("outliers", 0.95)]
)
def test_what_it_gains(kind: str, most: float, dialect: Dialect) -> None:
    values = drawn(kind)
    searched, plain = (
        lost(values, meant(values, dialect, scales)[0]) for scales in ("search", "amax")
    )
    assert searched.sum() <= most * plain.sum()
    assert np.all(searched <= plain * (1 + 1e-5))


@both
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_block_is_worse_and_validators_take_each(
    dtype: str, kind: str, dialect: Dialect
) -> None:
    values = matrix(kind, dtype, (24, 160))
    found, factor, unit = meant(values, dialect, "search", dtype)
    plain = lost(values, meant(values, dialect, "amax", dtype)[0])
    assert np.all(lost(values, found) <= plain * (1 + 1e-5))
    fits, why = nvfp4_fits(values, found, factor, unit)
    assert fits.all()
    assert why is None


def test_close_to_the_best_of_all_block_scales() -> None:
    values = drawn("heavy")[:16]
    found, _, unit = meant(values, "modelopt", "search")
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = np.abs(values).reshape(-1, 16).astype(np.float64)
    best = np.full(len(blocks), np.inf)
    for scale in from_e4m3(np.arange(1, 0x7F, dtype=np.uint8)):
        step = float(scale) * unit
        nearest = sizes[np.abs(blocks[:, :, None] / step - sizes).argmin(axis=2)] * step
        np.minimum(best, lost(blocks, nearest), out=best)
    assert lost(values, found).sum() <= 1.002 * best.sum()


@both
def test_validators_find_scales_that_are_wrong(dialect: Dialect) -> None:
    values = drawn("heavy")
    found, factor, unit = meant(values, dialect, "search")
    step = np.repeat(factor, 16, axis=1)
    assert (~nvfp4_fits(values, -found, factor, unit)[0]).sum() > 2500
    assert (~nvfp4_fits(values, 2 * found, 2 * factor, unit)[0]).sum() > 1500
    moved = np.roll(factor, 1, axis=1)
    again = found / step * np.repeat(moved, 16, axis=1)
    assert (~nvfp4_fits(values, again, moved, unit)[0]).sum() > 1000
    for times in (0.25, 2.0):  # each code the nearest, under a scale that loses more
        other = (factor * np.float32(times)).astype(np.float64)
        size = np.abs(values) / np.repeat(other, 16, axis=1)
        half = np.where(size < 2, 0.5, np.where(size < 4, 1.0, 2.0))
        codes = np.minimum(np.rint(size / half) * half, 6)
        worse = (np.sign(values) * codes * np.repeat(other, 16, axis=1)).astype(np.float32)
        fits, why = nvfp4_fits(values, worse, other.astype(np.float32), unit)
        assert fits.all()
        assert why is not None
        assert "loses no more than that of the largest weight" in why[2]


# --- A folder ------------------------------------------------------------------------------------


@both
def test_a_folder_is_sound_and_a_broken_scale_is_found(dialect: Dialect, tmp_path: Path) -> None:
    source, out = ordinary().write(tmp_path / "source"), tmp_path / "out"
    done = run_cli("nvfp4", source, out, "--dialect", dialect, "--scales", "search", "--jobs", "1")
    assert done.code == 0, done.err
    assert not findings(out, source)
    manifest = json.loads((out / "qconvert.json").read_bytes())
    assert [s["name"] for s in manifest["passes"] if s["options"].get("scales") == "search"] == [
        "nvfp4"
    ]
    name = "model.layers.0.mlp.experts.1.up_proj.weight_scale"
    scale = lines(out, name)
    scale[7, 2] -= 8  # half as large
    store(out, name, scale)
    unsealed(out)
    assert "expected the code nearest to the source's" in findings(out, source)["QC060"]


def test_mxfp4_keeps_its_scales(tmp_path: Path) -> None:
    source = Bench(tmp_path).source("mxfp4")
    asked = ("--dialect", "modelopt", "--scales", "search", "--dry-run")
    done = run_cli("nvfp4", source, tmp_path / "out", *asked)
    assert done.code == 1
    assert "leave scales out" in done.err


def test_the_identity_of_ops() -> None:
    op: Any = PackNvfp4(None, "modelopt")
    assert repr(op) == "PackNvfp4(decoder=None, dialect='modelopt')"
    assert repr(PackNvfp4(None, "modelopt", "search")).endswith("scales='search')")
