"""Validators' compiled loops against numpy's forms of the same, bit for bit: numbers that are made, and
answers of what is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensor, run_cli
from models import numbers_only, qwen3_moe
from stub_tasks import Form as SaysForm

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Source
from qconvert.validation import compiled, workers
from qconvert.validation.compiled import LOOPS
from qconvert.validation.workers import run_tasks
from qconvert.validators.amx import amx_weights
from qconvert.validators.amx.reading import Block
from qconvert.validators.formats import nvfp4
from qconvert.validators.formats.mxfp4 import mx_fits
from qconvert.validators.reading import rows
from qconvert.validators.reading.amx import BITS, STEP, Method, tile_floats
from qconvert.validators.reading.forms import Codes, Form, GlobalScale, Grid
from qconvert.validators.reading.matrices import Matrix
from qconvert.validators.weights import int_bounds
from qconvert.validators.weights.int_bounds import Tile, coarse, nearest_fits
from qconvert.validators.weights.sums import Sums

pytest.importorskip("numba")

Floats = np.ndarray[Any, np.dtype[np.float32]]
Random = np.random.Generator

SEEDS = range(6)


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    LOOPS.use(False)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool]]:
    """What loops answered, by name."""
    found: dict[str, list[bool]] = {}
    real = compiled.done

    def done(name: str, *args: Any) -> bool:
        answer = real(name, *args)
        if LOOPS.in_use() is not None:
            found.setdefault(name, []).append(answer)
        return answer

    for module in _USERS:
        monkeypatch.setattr(f"{module}.done", done)
    return found


_USERS = (
    "qconvert.validators.reading.rows", "qconvert.validators.reading.amx",
    "qconvert.validators.formats.nvfp4", "qconvert.validators.weights.int_bounds",
    "qconvert.validators.formats.fp8", "qconvert.validators.weights.sums",
    "qconvert.validators.amx.amx_weights",
)  # fmt: skip


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """What numpy makes, and what loops make."""
    LOOPS.use(False)
    plain = make()
    LOOPS.use(True)
    assert LOOPS.in_use() is not None
    return plain, make()


def heavy(random: Random, n: int, columns: int) -> Floats:
    """Rows with heavy tails and outlier channels, as bf16."""
    found = (0.02 * random.standard_t(3, (n, columns))).astype(np.float32)
    found[:, random.integers(columns, size=max(1, columns // 64))] *= 30
    found[random.random((n, columns)) < 0.02] = -0.0
    return (found.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def any_floats(random: Random, n: int, columns: int) -> Floats:
    """Any bits at all: NaN, infinities, denormals."""
    return random.integers(0, 1 << 32, (n, columns), np.uint32).view(np.float32)


# --- Decoding ------------------------------------------------------------------------------------


class Stored:
    """A reader of tensors in memory, and the matrix [n, K] they are."""

    def __init__(self, n: int, columns: int, block: tuple[int, int]) -> None:
        self.n, self.columns, self.block = n, columns, block
        self._data: dict[str, bytes] = {}

    def add(self, name: str, dtype: str, data: Any) -> Source:
        raw = np.ascontiguousarray(data)
        self._data[name] = raw.tobytes()
        return Source(name, TensorType(dtype, raw.shape), 0, 0)

    def read(self, tensor: Source, start: int, into: memoryview) -> None:
        into[:] = self._data[tensor.name][start : start + into.nbytes]

    def matrix(
        self, kind: str, weight: Source, scale: Source, codes: Codes | None = None,
        runs: tuple[tuple[int, int], ...] | None = None, **more: Any,
    ) -> Matrix:  # fmt: skip
        lines, across = scale.type.shape
        grid = Grid(scale, 0, lines, across, self.block, **more)
        form = Form(kind, weight, 0, self.n, self.columns, grid, codes=codes)
        return Matrix(("", None, None, ""), "w", "w", 0, None, form, runs or ((0, self.n),))


def _ceil(n: int, by: int) -> int:
    return -(-n // by)


def _scales(random: Random, kind: str, shape: tuple[int, int]) -> Floats:
    if kind == "any":
        return any_floats(random, *shape)
    spread = np.exp2(random.integers(-140, 100, shape)) if kind == "wide" else 0.01
    found: Floats = (spread * random.uniform(0.5, 2, shape)).astype(np.float32)
    return found


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("scales", ["usual", "wide", "any"])
@pytest.mark.parametrize("block", [(128, 128), (16, 24), (1, 200), (1, 1), (7, 13)])
@pytest.mark.parametrize("seed", SEEDS)
def test_fp8(
    answers: dict[str, list[bool]], block: tuple[int, int], scales: str, bf16: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    n, columns = 40, 200
    stored = Stored(n, columns, block)
    codes = random.integers(0, 256, (n, columns), np.uint8)
    if seed % 2:
        codes[(codes & 0x7F) == 0x7F] = 0x80
    lines = _scales(random, scales, (_ceil(n, block[0]), _ceil(columns, block[1])))
    weight, scale = stored.add("w", "F8_E4M3", codes), stored.add("s", "F32", lines)
    matrix = stored.matrix("fp8", weight, scale, runs=((3, 30), (0, 2), (31, 40)))
    plain, made = both(lambda: rows.rows(stored, matrix, 1, 37, bf16=bf16))
    assert plain.tobytes() == made.tobytes()
    if scales == "usual":
        assert answers["fp8_rows"][-1] == bool(seed % 2)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("scales", ["usual", "wide", "any"])
@pytest.mark.parametrize("form", ["int4", "nvfp4", "nvfp4 divided", "mxfp4"])
@pytest.mark.parametrize("seed", SEEDS)
def test_codes_of_four_bits(
    answers: dict[str, list[bool]], form: str, scales: str, bf16: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    wide = {"int4": 32, "mxfp4": 32}.get(form, 16)
    n, columns = 21, 192
    stored = Stored(n, columns, (1, wide))
    weight = stored.add("w", "U8", random.integers(0, 256, (n, columns // 2), np.uint8))
    shape = n, columns // wide
    more: dict[str, Any] = {}
    if form == "int4":
        scale = stored.add("s", "F32", _scales(random, scales, shape))
    elif form == "mxfp4":
        most = 256 if scales == "any" else 255
        scale = stored.add("s", "F8_E8M0", random.integers(0, most, shape, np.uint8))
    else:
        most = 256 if scales == "any" else 0x7F
        scale = stored.add("s", "F8_E4M3", random.integers(0, most, shape, np.uint8))
        unit = stored.add("g", "F32", _scales(random, scales, (1, 1)).reshape(1))
        more["global_scale"] = GlobalScale(unit, form == "nvfp4 divided")
    codes = Codes(4) if form == "int4" else None
    kind = "w4a16" if codes else form.split()[0]
    matrix = stored.matrix(kind, weight, scale, codes, ((0, 9), (12, 21)), **more)
    plain, made = both(lambda: rows.rows(stored, matrix, 1, 17, bf16=bf16))
    assert plain.tobytes() == made.tobytes()
    loop = answers["int4_rows" if codes else "fp4_rows"]
    assert scales != "usual" or all(loop)


@pytest.mark.parametrize("scales", ["usual", "wide", "any"])
@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("columns", [128, 3584 + 256])
def test_amx_tiles(
    answers: dict[str, list[bool]], method: Method, columns: int, scales: str
) -> None:
    random = np.random.default_rng(columns)
    n = 2 * STEP[method]
    packed = random.integers(0, 256, n * columns * BITS[method] // 8, np.uint8)
    scale = _scales(random, scales, (1, n)).reshape(n)
    plain, made = both(lambda: tile_floats(method, packed, scale, columns))
    assert plain.tobytes() == made.tobytes()
    assert scales != "usual" or answers["amx_tiles"] == [True]


# --- Sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 1), (70, 1), (1, 7), (33, 2), (64, 1500), (97, 1025)]
)
@pytest.mark.parametrize("kind", ["usual", "zeros", "wide", "huge", "any"])
def test_sums(answers: dict[str, list[bool]], shape: tuple[int, int], kind: str) -> None:
    random = np.random.default_rng(shape[0])
    mine, yours = heavy(random, *shape), heavy(random, *shape)
    if kind == "zeros":
        mine[:], yours[:] = -0.0, 0.0
    elif kind == "wide":
        yours *= np.exp2(random.integers(-150, 40, shape)).astype(np.float32)
    elif kind == "huge":  # squares beyond float32
        mine[random.integers(shape[0])] = np.float32(3e38)
    elif kind == "any":
        yours[:] = any_floats(random, *shape)

    def made() -> Sums:
        found = Sums()
        found.add(mine, yours)
        found.add(yours[: shape[0] // 2], mine[: shape[0] // 2])
        return found

    plain, in_loops = both(made)
    assert repr(plain) == repr(in_loops)
    if kind == "usual" and shape[1] > 1:
        assert answers["sums"] == [True, True]


@pytest.mark.parametrize("shape", [(64, 256), (97, 1025)])
def test_sums_are_near_those_of_float64(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(1)
    mine, yours = heavy(random, *shape), heavy(random, *shape)
    found = Sums()
    found.add(mine, yours)
    a, b = mine.astype(np.float64), yours.astype(np.float64)
    assert found.source == pytest.approx((a * a).sum(), rel=2e-6)
    assert found.found == pytest.approx((b * b).sum(), rel=2e-6)
    assert found.difference == pytest.approx(((a - b) ** 2).sum(), rel=2e-6)
    assert found.product == pytest.approx(
        (a * b).sum(), abs=2e-6 * np.sqrt(found.source * found.found)
    )
    assert found.worst == np.abs(mine - yours).max()


# --- Judging -------------------------------------------------------------------------------------

# What is done to one weight, or one step, of a matrix that fits.
_HARM: dict[str, Callable[[Floats, Floats, Floats, tuple[int, int]], None]] = {
    "nothing": lambda e, f, s, at: None,
    "a code off": lambda e, f, s, at: f.__setitem__(at, f[at] + 4 * np.abs(s).max()),
    "a hair off": lambda e, f, s, at: f.__setitem__(at, np.nextafter(f[at], np.float32(9))),
    "nan here": lambda e, f, s, at: f.__setitem__(at, np.nan),
    "nan there": lambda e, f, s, at: e.__setitem__(at, np.nan),
    "nan both": lambda e, f, s, at: (e.__setitem__(at, np.nan), f.__setitem__(at, np.nan))[0],
    "infinite here": lambda e, f, s, at: f.__setitem__(at, np.inf),
    "infinite there": lambda e, f, s, at: e.__setitem__(at, -np.inf),
    "no step": lambda e, f, s, at: s.__setitem__((at[0], 0), 0),
    "a nan step": lambda e, f, s, at: s.__setitem__((at[0], 0), np.nan),
    "an infinite step": lambda e, f, s, at: s.__setitem__((at[0], 0), np.inf),
    "a coarse step": lambda e, f, s, at: s.__setitem__((at[0], 0), 100 * s[at[0], 0]),
    "a tiny step": lambda e, f, s, at: s.__setitem__((at[0], 0), np.float32(1e-42)),
}


def _near(
    random: Random, wide: int, grid: Floats, harm: str, *, down: bool = False
) -> tuple[Floats, Floats, Floats]:
    """Weights [n, K], the nearest of a grid of codes, and steps [n, K / wide]; then harm."""
    n, columns = 24, 192
    expected = heavy(random, n, columns)
    largest = np.abs(expected).reshape(n, columns // wide, wide).max(axis=2)
    step = (largest / grid.max()).astype(np.float32)
    if down:  # scales that were rounded down
        step *= random.uniform(0.94, 1, step.shape).astype(np.float32)
    step[step == 0] = 1
    sizes = np.abs(expected) / np.repeat(step, wide, axis=1)
    code = np.abs(sizes[..., None] - grid).argmin(axis=-1)
    found = np.copysign(grid[code] * np.repeat(step, wide, axis=1), expected).astype(np.float32)
    at = int(random.integers(n)), int(random.integers(columns))
    _HARM[harm](expected, found, step, at)
    return expected, found, step


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@pytest.mark.parametrize("harm", _HARM)
@pytest.mark.parametrize("unit", [1.0, 1e-3, 64.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_nvfp4_and_mxfp4_are_judged_alike(
    answers: dict[str, list[bool]], unit: float, harm: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    own = _near(random, 16, _E2M1, harm, down=bool(seed % 2))
    plain, made = both(lambda: nvfp4.halfway(*own, unit))
    _same_verdict(plain, made)
    if harm == "nothing" and unit == 1e-3:
        assert answers["fp4_fits"] == [True]
    expected, found, step = _near(random, 32, _E2M1, harm)
    power = np.exp2(np.ceil(np.log2(np.maximum(np.abs(step), np.float32(1e-40)))))
    power = np.where(np.isfinite(step), power, step).astype(np.float32)
    plain, made = both(lambda: mx_fits(expected, found, power))
    _same_verdict(plain, made)


def _same_verdict(plain: tuple[Any, str], made: tuple[Any, str]) -> None:
    assert bool(plain[0].all()) == bool(made[0].all())
    assert plain[1] == made[1]
    if not plain[0].all():
        assert np.array_equal(plain[0], made[0])


@pytest.mark.parametrize("reach", [2.0, 4.0, 6.5, 9.1])
def test_where_half_a_step_grows_e2m1_is_judged_alike(reach: float) -> None:
    """Sizes at 2, 4, 6.5 and 9.1 steps, and the next float32 on either side, off by half a step."""
    random = np.random.default_rng(0)
    step = np.exp2(random.integers(-140, 98, (256, 1))) * random.integers(1, 1 << 24, (256, 1))
    factor = step.astype(np.float32)
    expected = np.repeat((reach * factor.astype(np.float64)).astype(np.float32), 16, axis=1)
    expected[:, 1::3] = np.nextafter(expected[:, 1::3], np.float32(0))
    expected[:, 2::3] = np.nextafter(expected[:, 2::3], np.float32(np.inf))
    for half in (0.25, 0.5, 1.0, 3.1):
        found = (expected - half * factor).astype(np.float32)
        for line in range(256):
            own = expected[line : line + 1], found[line : line + 1], factor[line : line + 1]
            plain, made = both(partial(nvfp4.halfway, *own, 1e30))
            _same_verdict(plain, made)


@pytest.mark.parametrize("harm", _HARM)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_are_judged_alike(
    answers: dict[str, list[bool]], bits: int, dtype: str, symmetric: bool, harm: str
) -> None:
    random = np.random.default_rng(bits)
    grid = np.arange((1 << (bits - 1)) - (0 if symmetric else 1), dtype=np.float32)
    expected, found, step = _near(random, 32, grid, harm)
    stored = Stored(24, 192, (1, 32))
    weight = stored.add("w", "U8", np.zeros((24, 96), np.uint8))
    scale = Source("s", TensorType(dtype, step.shape), 0, 0)
    form = stored.matrix(f"w{bits}a16", weight, scale, Codes(bits, symmetric)).form
    tile = Tile(form, expected, found, step, np.zeros_like(step), None)
    near, said = nearest_fits(tile), coarse(tile, 7)
    LOOPS.use(True)
    span = int_bounds.span_if_near(tile)
    if span is None:
        assert not near.all() or not np.isfinite(expected).all()
    else:
        assert near.all()
        assert coarse(tile, 7, span) == said
    assert harm != "nothing" or span is not None


@pytest.mark.parametrize("harm", _HARM)
@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("rounding", ["reference", "search", "gptq"])
def test_amx_is_judged_alike(
    answers: dict[str, list[bool]], rounding: str, method: Method, harm: str
) -> None:
    random = np.random.default_rng(len(harm))
    grid = np.arange(8 if method == "int4" else 128, dtype=np.float32)
    expected, found, steps = _near(random, 192, grid, harm)
    step = np.ascontiguousarray(steps[:, 0])
    block = Block(method, rounding, 1, 128, 128, 1, (0,))  # type: ignore[arg-type]
    at = amx_weights._misfit(block, expected, found, step)
    odd = amx_weights._odd_step(block, expected, found, step, None)
    LOOPS.use(True)
    largest = amx_weights._if_near(block, expected, found, step)
    if largest is None:
        assert at is not None or rounding in ("search", "gptq")
    else:
        assert at is None
        assert largest.tobytes() == np.abs(expected).max(axis=1).tobytes()
        assert amx_weights._odd_step(block, expected, found, step, largest) == odd
    if harm == "nothing" and rounding == "peer":
        assert largest is not None


# --- Whole validations ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "loops"),
    [
        (("fp8",), {"fp8_rows", "fp8_fits", "sums"}),
        (("fp8", "--channel"), {"fp8_rows", "fp8_fits", "sums"}),
        (("w4a16", "--rtn", "--group-size", "32"), {"int4_rows", "int_fits", "sums"}),
        (("w4a16", "--rtn", "--packing", "gptq"), {"int_fits", "sums"}),  # its codes are columns
        (("nvfp4", "--dialect", "modelopt"), {"fp4_rows", "fp4_fits", "sums"}),
        (("mx",), {"fp4_rows", "fp4_fits", "sums"}),
        (("amx", "--method", "int8", "--numa", "1"), {"amx_tiles", "row_fits", "sums"}),
    ],
)  # fmt: skip
def test_a_validation_finds_the_same_in_loops(
    answers: dict[str, list[bool]],
    words: tuple[str, ...],
    loops: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As large folders are validated; in the other form all is done again (both_forms.py)."""
    model = numbers_only(qwen3_moe(hidden=256, intermediate=256))
    for name, held in model.tensors.items():
        values = (np.frombuffer(held.data, np.uint16) & np.uint16(0xBFFF)) | np.uint16(0x3000)
        model.tensors[name] = Tensor(held.dtype, held.shape, values.tobytes())
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    made = run_cli(words[0], source, out, *words[1:], "--jobs", "1")
    assert made.code == 0, made.err
    monkeypatch.setenv("QCONVERT_KERNELS", "numba")
    answers.clear()
    judged = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    assert judged.code == 0, judged.out
    assert {name for name, said in answers.items() if any(said)} == loops


def test_every_loop_has_a_validation() -> None:
    (mark,) = test_a_validation_finds_the_same_in_loops.pytestmark  # type: ignore[attr-defined]
    LOOPS.use(True)
    found: Any = LOOPS.in_use()
    assert set(found.__all__) == set().union(*(loops for _, loops in mark.args[1]))


# --- When loops are taken ------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("kernels", "tight", "form"),
    [
        ("numba", False, "loops"),
        ("auto", False, "numpy"),  # few bytes
        ("numpy", False, "numpy"),
        ("numba", True, "numpy"),  # no room for them
    ],
)
def test_loops_are_taken_where_they_pay(
    monkeypatch: pytest.MonkeyPatch,
    jobs: int, kernels: str, tight: bool, form: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("QCONVERT_KERNELS", kernels)
    kind = TensorType("U8", (1 << 20,))
    tasks = [(n, SaysForm(Source(f"w{n}", kind, 0, 0))) for n in range(4)]
    more = {"memory": workers._resident() + jobs * (80 << 20)} if tight else {}
    found = [item.message for _, item in run_tasks(tasks, ((), ()), jobs=jobs, **more)]  # type: ignore[union-attr, arg-type]
    assert found == [form] * 4
    assert LOOPS.in_use() is None


def test_many_bytes_are_computed_in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QCONVERT_KERNELS", raising=False)
    assert [compiled.worth(1 << 30, jobs) for jobs in (1, 2, 4)] == [True, True, False]
    much = Source("w", TensorType("U8", (1 << 30,)), 0, 0)
    for computes, form in ((True, "loops"), (False, "numpy")):
        tasks = [(0, SaysForm(much, computes=computes))]
        ((_, item),) = run_tasks(tasks, ((), ()), jobs=1)
        assert item.message == form  # type: ignore[union-attr]
