"""`--scales search`: what it gains, that it never loses, that nothing but the group decides, and what a
folder says of it. Oracles: int_forms.py's reading of the bytes, errors in float64, every one of 400
scales tried; bytes of the compiled loop: test_compiled.py; compressed-tensors and transformers:
test_w4a16_peer.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import int_forms
import numpy as np
import pytest
import torch
from amx_rows import bf16
from checkpoints import Model, Tensor, ran, run_cli
from data_folders import floats, lines, store, unsealed
from models import qwen3_moe
from ops_harness import buffer, run_op
from sampled import sampled
from test_w4a16 import ordinary

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.int_scheme import IntScheme, Signs
from qconvert.formats.int_packed.encode import Scales, encoder
from qconvert.formats.int_packed.packers import PackGptq, PackQuantized
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.samples.request import Calibration

Bits = np.ndarray[Any, np.dtype[np.uint16]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]

COLUMNS = 1024
SCHEMES = {
    "W4 g32": IntScheme(4, 32),
    "W4 g128": IntScheme(4, 128),
    "W4 channel": IntScheme(4, None),
    "W8 g128": IntScheme(8, 128),
    "W8 channel": IntScheme(8, None),
    "W4 g32 asymmetric": IntScheme(4, 32, symmetric=False),
    "W8 g128 asymmetric": IntScheme(8, 128, symmetric=False),
    "W4 g128, fp16": IntScheme(4, 128, scale_dtype="F16"),
}


@cache
def drawn(kind: str, rows: int = 96, columns: int = COLUMNS) -> Bits:
    random = np.random.default_rng(3)
    values = 0.02 * random.standard_t(4, (rows, columns))
    if kind == "gaussian":
        values = 0.02 * random.standard_normal((rows, columns))
    elif kind == "outliers":
        values[:, ::37] *= 20
    elif kind == "alike":
        values = random.choice([-0.5, 0.25, 0.5], (rows, columns))
    elif kind == "one sign":
        values = np.abs(values)
    elif kind == "every size":
        values *= np.exp2(random.integers(-8, 8, (rows, columns)))
    elif kind == "zeros":
        values[random.random((rows, columns)) < 0.4] = 0
        values[3], values[:, :128] = 0, 0
    return bf16(values)


KINDS = ("gaussian", "heavy", "outliers", "alike", "one sign", "every size", "zeros")


def exact(bits: Bits) -> Doubles:
    found: Doubles = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return found


def encoded(
    bits: Bits,
    scheme: IntScheme,
    scales: Scales,
    limit: int | None = None,
    signs: Signs = "positive",
) -> list[bytes]:
    pack: Any = PackQuantized if scheme.scale_dtype == "BF16" else PackGptq
    kind = TensorType("BF16", bits.shape)
    op = encoder(scheme, pack(scheme), scales, signs)
    return run_op(op, [buffer(kind, bits.tobytes())], limit)[0]


def errors(bits: Bits, scheme: IntScheme, scales: Scales, signs: Signs = "positive") -> Doubles:
    """The error of each group, by a reader that shares no code with the encoder."""
    pack: Any = PackQuantized if scheme.scale_dtype == "BF16" else PackGptq
    packer = pack(scheme)
    kinds = packer.infer(TensorType("BF16", bits.shape))
    parts = {
        name: int_forms.to_array(data, kind)
        for name, data, kind in zip(
            packer.suffixes, encoded(bits, scheme, scales, signs=signs), kinds, strict=True
        )
    }
    if scheme.scale_dtype == "BF16":
        found = int_forms.from_compressed_tensors(parts, scheme.bits, bits.shape[1])
    else:
        found = int_forms.from_gptq(parts, scheme.bits, 1)
    width = scheme.width(bits.shape[1])
    return lost(exact(bits).reshape(-1, width), found.reshape(-1, width).astype(np.float64))


def lost(groups: Doubles, found: Doubles) -> Doubles:
    """Squared errors of groups [n, G], and G / 16 times what of them lies along the weights (1024 times
    in long ones)."""
    off = groups - found
    own = np.square(groups).sum(axis=1)
    made: Doubles = np.square(off).sum(axis=1)
    more = groups.shape[1] / 16 if groups.shape[1] <= 256 else 1024
    made += more * np.square((off * groups).sum(axis=1)) / np.where(own > 0, own, 1)
    return made


SIGNED = ("W4 g32", "W4 g128", "W4 channel", "W4 g128, fp16")


def of_the_largest(bits: Bits, scheme: IntScheme) -> Doubles:
    """Errors of the nearest codes under each group's scale of its largest weight, as `errors`."""
    groups = exact(bits).reshape(-1, scheme.width(bits.shape[1]))
    half = 2**scheme.bits / 2
    step = (np.abs(groups).max(axis=1, keepdims=True) / (half - 0.5)).astype(np.float32)
    dtype = torch.float16 if scheme.scale_dtype == "F16" else torch.bfloat16
    step = torch.from_numpy(step).to(dtype).double().numpy()
    inverse = np.float32(1) / np.where(step > 0, step, 1).astype(np.float32)
    return lost(
        groups, np.clip(np.rint(groups.astype(np.float32) * inverse), -half, half - 1) * step
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].symmetric])
def test_no_group_is_worse(name: str, kind: str) -> None:
    """By a search; and by scales below 0."""
    bits, scheme = drawn(kind), SCHEMES[name]
    searched, plain = errors(bits, scheme, "search"), of_the_largest(bits, scheme)
    assert np.all(searched <= plain * (1 + 1e-5))
    if name in SIGNED:
        assert np.all(errors(bits, scheme, "search", "both") <= searched * (1 + 1e-5))


@pytest.mark.parametrize(
    ("name", "kind", "most", "by_signs"),
    [
        ("W4 g32", "heavy", 0.86, 0.89), ("W4 g128", "heavy", 0.84, 0.94),
        ("W4 channel", "heavy", 0.57, 0.97), ("W4 g128", "outliers", 0.9, 0.96),
        ("W4 g32", "gaussian", 0.84, 0.93), ("W4 g32", "one sign", 1, 0.88),
        ("W4 g128, fp16", "heavy", 0.84, 0.94), ("W8 g128", "heavy", 0.97, None),
        ("W8 channel", "heavy", 0.97, None), ("W4 g32 asymmetric", "heavy", 0.94, None),
    ],
)  # fmt: skip
def test_what_it_gains(name: str, kind: str, most: float, by_signs: float | None) -> None:
    bits, scheme = drawn(kind), SCHEMES[name]
    searched = errors(bits, scheme, "search").sum()
    ratio = searched / errors(bits, scheme, "amax").sum()
    assert ratio <= most, ratio
    if by_signs is not None:
        ratio = errors(bits, scheme, "search", "both").sum() / searched
        assert ratio <= by_signs, ratio


@pytest.mark.parametrize("signs", ["positive", "both"])
@pytest.mark.parametrize(
    ("name", "most"), [("W4 g32", 1.02), ("W4 g128", 1.03), ("W4 channel", 1.2)]
)
def test_close_to_the_best_of_400_scales(name: str, most: float, signs: Signs) -> None:
    """Of either sign where both are allowed."""
    bits, scheme = drawn("heavy"), SCHEMES[name]
    groups = exact(bits).reshape(-1, scheme.width(COLUMNS))
    plain = np.abs(groups).max(axis=1) / 7.5
    best = np.full(plain.shape, np.inf)
    for part in np.linspace(0.1, 1.1, 400):
        for sign in (1, -1) if signs == "both" else (1,):
            step = sign * exact(bf16(part * plain))[:, None]
            codes = np.clip(np.rint(groups / step), -8, 7)
            np.minimum(best, lost(groups, codes * step), out=best)
    assert errors(bits, scheme, "search", signs).sum() <= most * best.sum()


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in SIGNED])
def test_other_schemes_have_positive_scales_alone(name: str) -> None:
    bits, scheme = drawn("heavy"), SCHEMES[name]
    assert encoded(bits, scheme, "search", signs="both") == encoded(bits, scheme, "search")


@pytest.mark.parametrize("name", SCHEMES)
def test_a_group_gets_the_same_bytes_wherever_it_stands(name: str) -> None:
    bits, scheme = drawn("outliers"), SCHEMES[name]
    whole = encoded(bits, scheme, "search", signs="both")
    for limit in (1, 60_000):
        assert encoded(bits, scheme, "search", limit, "both") == whole
    if scheme.symmetric and scheme.scale_dtype == "BF16":
        turned = encoded(bits[::-1].copy(), scheme, "search", signs="both")
        for mine, yours in zip(turned, whole, strict=True):
            rows = (np.frombuffer(part, np.uint8).reshape(len(bits), -1) for part in (mine, yours))
            assert np.array_equal(next(rows)[::-1], next(rows))


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_that_are_next_to_nothing_are_as_ever(symmetric: bool) -> None:
    """Zeros, and sizes whose scale is a denormal."""
    random = np.random.default_rng(1)
    bits = random.integers(0, 0x0C00, (8, 64), np.uint16)  # below 2^-103
    bits |= random.integers(0, 2, bits.shape, np.uint16) << np.uint16(15)
    bits[2:4] = 0
    scheme = IntScheme(4, 32, symmetric=symmetric)
    for signs in ("positive", "both"):
        assert encoded(bits, scheme, "search", signs=signs) == encoded(bits, scheme, "amax")


# --- A folder ------------------------------------------------------------------------------------


def converted(model: Model, folder: Path, *options: str) -> tuple[Path, Path]:
    source, out = model.write(folder / "source"), folder / "out"
    ran("w4a16", source, out, "--rtn", "--scales", "search", *options, "--jobs", "1")
    return source, out


def findings(out: Path, source: Path) -> dict[str, str]:
    done = run_cli("validate", out, "--against", source, "--level", "full", "--json", "--jobs", "1")
    return {found["rule"]: found["message"] for found in json.loads(done.out)["findings"]}


FORMS = {
    "W4": [],
    "W4 asymmetric": ["--asymmetric", "--group-size", "32"],
    "W8 channel": ["--bits", "8", "--group-size", "channel"],
    "gptq": ["--packing", "gptq"],
    "gptq-v2 asymmetric": ["--packing", "gptq-v2", "--asymmetric", "--bits", "8"],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_sound_and_says_how_it_was_made(form: str, tmp_path: Path) -> None:
    source, out = converted(ordinary(), tmp_path, *FORMS[form])
    assert not findings(out, source)
    manifest = json.loads((out / "qconvert.json").read_bytes())
    (step,) = [step for step in manifest["passes"] if step["name"] == "w4a16"]
    assert step["options"]["scales"] == "search"
    assert any("scales searched for" in what for what in manifest["lossy_steps"])


UP = "model.layers.0.mlp.experts.1.up_proj"


@pytest.mark.parametrize("form", ["W4", "gptq"])
def test_about_half_of_a_folders_scales_are_below_0(form: str, tmp_path: Path) -> None:
    source, out = converted(ordinary(), tmp_path, *FORMS[form])
    name = f"{UP}.weight_scale" if form == "W4" else f"{UP}.scales"
    scale = lines(out, name).view("<u2" if form == "W4" else "<f2")
    found = floats(scale) if form == "W4" else scale
    assert 0.3 < np.mean(found < 0) < 0.7
    ran(
        "w4a16", source, tmp_path / "plain", "--rtn", "--scales", "search", "--set", "signs=positive",
        *FORMS[form], "--jobs", "1",
    )  # fmt: skip
    scale = lines(tmp_path / "plain", name).view(scale.dtype)
    assert np.all((floats(scale) if form == "W4" else scale) > 0)
    assert not findings(tmp_path / "plain", source)


def test_a_scale_of_the_other_sign_is_found(tmp_path: Path) -> None:
    source, out = converted(ordinary(), tmp_path)
    scale = lines(out, f"{UP}.weight_scale").view("<u2")
    scale[5, 0] ^= 0x8000
    store(out, f"{UP}.weight_scale", scale)
    unsealed(out)
    found = findings(out, source)
    assert "row 5, column" in found["QC060"]
    assert "QC068" not in found


def test_a_scale_below_0_that_no_conversion_speaks_of_is_found(tmp_path: Path) -> None:
    """The same weights: codes and a scale of the other sign."""
    options = "--set", "signs=positive", "--group-size", "128"
    source, out = converted(ordinary(), tmp_path, *options)
    scale = lines(out, f"{UP}.weight_scale").view("<u2")
    words = lines(out, f"{UP}.weight_packed").view("<i4")
    fields = int_forms.unpacked(words[5:6, :16], 4, 128)
    assert fields.min() > 0
    words[5, :16] = int_forms.packed(16 - fields, 4)[0]
    scale[5, 0] ^= 0x8000
    store(out, f"{UP}.weight_scale", scale)
    store(out, f"{UP}.weight_packed", words)
    unsealed(out)
    found = findings(out, source)
    assert "scale [5, 0]: expected a finite scale of 0 or more, found -" in found["QC068"]
    assert "QC060" not in found


def test_scales_below_0_that_others_wrote_are_valid(tmp_path: Path) -> None:
    """As AutoRound writes them: no manifest, the same weights in the rounded folder's BF16."""
    _, out = converted(ordinary(), tmp_path)
    for name in ("qconvert.json", "qconvert.receipt.jsonl"):
        (out / name).unlink()
    done = run_cli("validate", out, "--level", "full", "--json", "--jobs", "1")
    rules = {found["rule"] for found in json.loads(done.out)["findings"]}
    assert "QC068" not in rules
    ran("dequant", out, tmp_path / "bf16", "--jobs", "1")
    assert not findings(tmp_path / "bf16", out)


READERS: dict[str, tuple[str, ...]] = {
    "dequant": ("dequant",),
    "fp8": ("fp8", "--targets", "experts", "--block", "16"),
    "amx": ("amx", "--method", "int4", "--numa", "1"),
    "amx int8": ("amx", "--method", "int8", "--numa", "1"),
    "nvfp4": ("nvfp4", "--dialect", "modelopt"),
    "mx": ("mx",),
    "gptq-v2": ("relabel", "--to", "gptq-v2"),
    "compressed-tensors": ("relabel", "--to", "compressed-tensors"),
}


@pytest.mark.parametrize("reader", sampled(READERS, 2))
def test_every_command_that_reads_int4_reads_scales_below_0(reader: str, tmp_path: Path) -> None:
    """Judged by readers that share no code with conversions, against what the INT4 folder means."""
    relabelled = reader in ("gptq-v2", "compressed-tensors")
    form = ("--packing", "gptq") if relabelled else ()
    model = aligned()
    model.config |= {"torch_dtype": "bfloat16"}
    _, packed = converted(model, tmp_path, "--group-size", "32", *form)
    command, *options = READERS[reader]
    out = tmp_path / "again"
    ran(command, packed, out, *options, "--jobs", "1")
    assert not findings(out, packed)


def aligned() -> Model:
    """Sizes that every format holds."""
    model = qwen3_moe(hidden=256, intermediate=256, layers=1)
    for number, (name, (_, shape, _)) in enumerate(model.tensors.items()):
        if len(shape) == 2:
            data = bytes(int_forms.weight(*shape, number).data)
            model.tensors[name] = Tensor("BF16", shape, data)
    return model


def test_a_broken_scale_is_found(tmp_path: Path) -> None:
    source, out = converted(ordinary(), tmp_path)
    scale = lines(out, f"{UP}.weight_scale").view("<u2")
    scale[5, 0] ^= 0x80  # of the least bit of the exponent: twice or half as large
    store(out, f"{UP}.weight_scale", scale)
    unsealed(out)
    assert "expected the code nearest to the source's" in findings(out, source)["QC060"]


def test_codes_of_a_coarser_scale_are_found(tmp_path: Path) -> None:
    """Each is the nearest to its weight under a scale sixteen times as large as the group needs."""
    source, out = converted(ordinary(), tmp_path, "--group-size", "128")
    scale = lines(out, f"{UP}.weight_scale").view("<u2")
    words = lines(out, f"{UP}.weight_packed").view("<i4")
    scale[7, 0] += 0x200
    step = floats(scale)[7, 0]
    weight = floats(lines(source, f"{UP}.weight"))[7, :128]
    fields = np.clip(np.rint(weight / step), -8, 7)[None].astype(np.int64) + 8
    words[7, :16] = int_forms.packed(fields, 4)[0]
    store(out, f"{UP}.weight_scale", scale)
    store(out, f"{UP}.weight_packed", words)
    unsealed(out)
    assert "row 7, group 0: expected a scale that loses no more" in findings(out, source)["QC060"]


def test_the_identity_of_ops() -> None:
    scheme = IntScheme(group=128)
    assert "signed" not in repr(encoder(scheme, PackQuantized(scheme), "search"))
    assert "signed=True" in repr(encoder(scheme, PackQuantized(scheme), "search", "both"))
    assert repr(encoder(scheme, PackQuantized(scheme))) == "PackInt4(group=128)"
    assert "scales='search'" in repr(encoder(scheme, PackQuantized(scheme), "search"))


def test_scales_of_amax_have_no_sign() -> None:
    with pytest.raises(PlanError, match="scales of amax are never below 0"):
        ExpertsToW4A16(signs="positive")
    assert ExpertsToW4A16(scales="search", signs="positive").signs == "positive"


def test_a_calibration_has_its_own_scales() -> None:
    with pytest.raises(PlanError, match="leave one of the two out"):
        ExpertsToW4A16(scales="search", calibrate=Calibration(synthetic=True))
