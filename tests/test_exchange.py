"""What shards of a calibration hand to one another: read back to the last bit, or refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate_models import qwen3_moe, samples, saved
from checkpoints import run_cli
from safetensors.torch import save_file

from qconvert import api
from qconvert.calibrate.exchanged import Known, expert_of, get, put
from qconvert.calibrate.settings import ExpertSchemes, Matrix, Settings
from qconvert.calibrate.solve import rounded, solved, weight_of
from qconvert.checkpoint.checkpoint import WORK_DIR
from qconvert.cli.demo_checkpoint import heavy_tailed
from qconvert.core.errors import OutputError, RunError
from qconvert.core.fp4_scheme import Nvfp4Scheme
from qconvert.core.int_scheme import Codes, IntScheme, Scheme
from qconvert.run import exchange as exchanges
from qconvert.run import leases
from qconvert.run.division import LEFT_TO_FINISH, Shard, divide, is_calibrated
from qconvert.run.exchange import Exchange, OutOfTime, Peers
from qconvert.run.files import Files
from qconvert.run.leases import SOLVED
from qconvert.run.until import Until

ROWS, COLUMNS = 24, 64
SCHEMES: list[Scheme] = [
    IntScheme(group=32),
    IntScheme(group=None, scale_dtype="F32", narrow=True),
    IntScheme(bits=8, group=None),
    IntScheme(group=32, symmetric=False),
    IntScheme(group=32, actorder="static", scale_dtype="F16"),
    IntScheme(group=32, actorder="group"),
    IntScheme(group=32, symmetric=False, actorder="group"),
    Nvfp4Scheme("modelopt"),
    Nvfp4Scheme("compressed-tensors"),
]


def weights(seed: int) -> torch.Tensor:
    return heavy_tailed((ROWS, COLUMNS), torch.Generator().manual_seed(seed)).bfloat16()


def hessian(seed: int) -> torch.Tensor:
    """Of inputs with outlier channels."""
    rows = torch.randn(256, COLUMNS, generator=torch.Generator().manual_seed(seed))
    rows[:, ::13] *= 20
    return (2 * rows.t() @ rows)[None]


@pytest.mark.parametrize(
    ("scheme", "solver"),
    [(scheme, solver) for scheme in SCHEMES for solver in ("best", "llmcompressor")
     if solver == "best" or isinstance(scheme, IntScheme)],
    ids=repr,
)  # fmt: skip
def test_codes_mean_what_they_meant(scheme: Scheme, solver: Any) -> None:
    """To the last bit, for matrices that were solved and for those that were only rounded."""
    settings = Settings(solver=solver)
    found, _ = solved([weights(1)], hessian(2), scheme, settings)
    for one in (*found, rounded(weights(3), scheme, settings)):
        again = weight_of(one.numpy(), scheme, "cpu")
        assert torch.equal(again.view(torch.int16), one.weight.view(torch.int16))


# --- the files ------------------------------------------------------------------------------------


def exchange(folder: Path, shard: Shard | None = None, **more: Any) -> Exchange:
    return Exchange(folder, "a plan", Files(), shard, kind="cpu", **more)


TARGETS = [
    ExpertSchemes(one, one)
    for one in (IntScheme(bits=8, group=8, scale_dtype="F32"),
                IntScheme(bits=8, group=8, symmetric=False, actorder="group"))
]  # fmt: skip
SIDES = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}


def known(seed: int = 0, low: int = -8, high: int = 8) -> Known:
    chooser = np.random.default_rng(seed)
    matrices = []
    for kind, (rows, columns) in SIDES.items():
        codes = [
            Codes(
                chooser.integers(low, high, (rows, columns)).astype(np.int8),
                chooser.random((rows, columns // 8)).astype(np.float32),
                chooser.integers(-8, 8, (rows, columns // 8)).astype(np.int8) if target else None,
                np.arange(columns, dtype=np.int32) // 8 if target else None,
                None,
            )
            for target in range(2)
        ]
        source = {"name": kind, "start": 0, "stop": 9, "xxh3": "0" * 32}
        matrices.append(Matrix(3, 7, kind, codes, [source]))
    rows_ = {
        "gate_up": (chooser.random(16).astype(np.float32), chooser.random(16).astype(np.float32)),
        "down": (chooser.random(8).astype(np.float32), chooser.random(8).astype(np.float32)),
    }
    return Known(tuple(matrices), rows_, True, ("up_proj",), {"down_proj": 2}, "f" * 32)


def same(a: Known, b: Known) -> bool:
    for one, other in zip(a.matrices, b.matrices, strict=True):
        if (one.layer, one.expert, one.kind) != (other.layer, other.expert, other.kind):
            return False
        if list(one.sources) != list(other.sources):
            return False
        for mine, theirs in zip(one.codes, other.codes, strict=True):
            for name in ("codes", "scale", "zero", "g_idx"):
                left, right = getattr(mine, name), getattr(theirs, name)
                if (left is None) != (right is None):
                    return False
                if left is not None and (
                    left.dtype != right.dtype or not np.array_equal(left, right)
                ):
                    return False
            if mine.own != theirs.own:
                return False
    rest = ("rounded", "fallbacks", "dead", "meaning")
    rows = all(
        np.array_equal(a.rows[name][n], b.rows[name][n]) for name, n in product(a.rows, (0, 1))
    )
    return rows and all(getattr(a, name) == getattr(b, name) for name in rest)


@pytest.mark.parametrize(("low", "high"), [(-8, 8), (-12, 13), (-128, 128)])
def test_what_was_put_is_read_back(low: int, high: int, tmp_path: Path) -> None:
    shared = exchange(tmp_path, Shard(0, 2))
    assert put(shared, 3, 7, known(5, low, high)) == "3-7"
    assert shared.has(3, 7)
    assert same(get(shared, 3, 7, SIDES, TARGETS), known(5, low, high))
    # INT4 codes take half a byte.
    size = (tmp_path / SOLVED / "3-7").stat().st_size
    put(exchange(tmp_path / "wide"), 3, 7, known(5, -128, 128))
    wide = (tmp_path / "wide" / SOLVED / "3-7").stat().st_size
    assert (wide - size > 300) == (low == -8)


def test_the_first_to_put_an_expert_is_the_one(tmp_path: Path) -> None:
    assert put(exchange(tmp_path), 3, 7, known(1)) == "3-7"
    assert put(exchange(tmp_path, Shard(1, 2)), 3, 7, known(2)) is None
    assert same(get(exchange(tmp_path), 3, 7, SIDES, TARGETS), known(1))
    assert [path.name for path in (tmp_path / SOLVED).iterdir()] == ["3-7"]


def test_damage_is_named_wherever_it_is(tmp_path: Path) -> None:
    shared = exchange(tmp_path)
    put(shared, 3, 7, known())
    path = tmp_path / SOLVED / "3-7"
    whole = path.read_bytes()
    for at in range(0, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(RunError, match=r"3-7: is damaged"):
            get(shared, 3, 7, SIDES, TARGETS)
    for length in (0, 5, 16, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RunError, match="3-7"):
            get(shared, 3, 7, SIDES, TARGETS)


def forged(folder: Path, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> Exchange:
    shared = exchange(folder)
    shared.put(3, 7, about, arrays)
    return shared


@pytest.mark.parametrize(
    ("sides", "targets"),
    [
        ({**SIDES, "up_proj": (8, 8)}, TARGETS),
        (SIDES, TARGETS[:1]),
        (SIDES, TARGETS * 2),
        (SIDES, TARGETS[::-1]),
        (SIDES, [ExpertSchemes(Nvfp4Scheme("modelopt"), Nvfp4Scheme("modelopt"))] * 2),
        (SIDES, [ExpertSchemes(IntScheme(bits=8, group=4), IntScheme(bits=8, group=4))] * 2),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    sides: Mapping[str, tuple[int, int]], targets: list[ExpertSchemes], tmp_path: Path
) -> None:
    put(exchange(tmp_path), 3, 7, known())
    with pytest.raises(RunError, match="layer 3, expert 7: was not written by this version"):
        get(exchange(tmp_path), 3, 7, sides, targets)


def test_codes_that_no_solver_finds_are_refused(tmp_path: Path) -> None:
    """-128 is none of narrow codes, and 100 none of 4 bits."""
    put(exchange(tmp_path), 3, 7, known(5, -128, 128))
    assert get(exchange(tmp_path), 3, 7, SIDES, TARGETS).rounded
    four = ExpertSchemes(
        IntScheme(group=8, scale_dtype="F32"), IntScheme(group=8, scale_dtype="F32")
    )
    with pytest.raises(RunError, match="codes of gate_proj beyond -8 to 7"):
        get(exchange(tmp_path), 3, 7, SIDES, [four, TARGETS[1]])


def test_groups_beyond_the_last_are_refused(tmp_path: Path) -> None:
    one = known()
    one.matrices[0].codes[1].g_idx[3] = 99  # type: ignore[index]
    put(exchange(tmp_path), 3, 7, one)
    with pytest.raises(RunError, match="g_idx of gate_proj beyond 0 to 1"):
        get(exchange(tmp_path), 3, 7, SIDES, TARGETS)


def test_sources_that_are_no_ranges_are_refused(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"name": "x"}, {"name": "x", "start": "0", "stop": 1, "xxh3": ""}, {}
    ]  # fmt: skip
    for source in wrong:
        one = known()
        first = one.matrices[0]
        broken = Matrix(3, 7, first.kind, first.codes, [source])
        shared = exchange(tmp_path)
        (tmp_path / SOLVED / "3-7").unlink(missing_ok=True)
        put(shared, 3, 7, replace(one, matrices=(broken, *one.matrices[1:])))
        with pytest.raises(RunError, match="sources that are no ranges"):
            get(shared, 3, 7, SIDES, TARGETS)


@pytest.mark.parametrize("about", [{}, {"matrices": 3}, {"matrices": {"gate_proj": []}}])
def test_a_file_with_a_right_hash_and_other_content_is_refused(
    about: Mapping[str, Any], tmp_path: Path
) -> None:
    shared = forged(tmp_path, about, {"x": np.zeros(3, np.int8)})
    with pytest.raises(RunError, match="was not written by this version"):
        get(shared, 3, 7, SIDES, TARGETS)


def test_other_runs_and_kinds_of_devices_do_not_mix(tmp_path: Path) -> None:
    put(exchange(tmp_path), 3, 7, known())
    with pytest.raises(RunError, match="another run, layer or expert"):
        get(replace(exchange(tmp_path), key="another"), 3, 7, SIDES, TARGETS)
    (tmp_path / SOLVED / "3-7").rename(tmp_path / SOLVED / "3-8")
    with pytest.raises(RunError, match="another run, layer or expert"):
        get(exchange(tmp_path), 3, 8, SIDES, TARGETS)
    put(exchange(tmp_path), 3, 7, known())
    with pytest.raises(RunError, match=r"another kind of device \('cpu', here 'cuda'\)"):
        get(replace(exchange(tmp_path), kind="cuda"), 3, 7, SIDES, TARGETS)
    assert get(replace(exchange(tmp_path), kind=None), 3, 7, SIDES, TARGETS).rounded


def test_codes_that_mean_something_else_here_are_refused() -> None:
    one = known()
    found = replace(
        one,
        matrices=tuple(
            replace_codes(matrix, Codes(matrix.codes[0].codes, matrix.codes[0].scale))
            for matrix in one.matrices
        ),
    )
    scheme = IntScheme(group=8, scale_dtype="F32")
    with pytest.raises(RunError, match="layer 3, expert 7: its codes mean other weights here"):
        expert_of(found, [ExpertSchemes(scheme, scheme)], "cpu", every=False)


def replace_codes(matrix: Matrix, codes: Codes) -> Matrix:
    return Matrix(matrix.layer, matrix.expert, matrix.kind, [codes], matrix.sources)


# --- who solves what ------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "shards"), [(8, 3), (5, 2), (3, 5), (256, 7), (1, 1)])
def test_experts_are_divided_without_a_rest(experts: int, shards: int, tmp_path: Path) -> None:
    parts = [exchange(tmp_path, Shard(n, shards)).mine(0, experts) for n in range(shards)]
    assert [e for part in parts for e in part] == list(range(experts))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("experts", "shards", "whole", "together"),
    [(128, 3, 32, 32), (128, 4, 32, 32), (128, 5, 32, 16), (60, 2, 32, 32), (12, 60, 8, 1)],
)
def test_parts_are_of_whole_batches(
    experts: int, shards: int, whole: int, together: int, tmp_path: Path
) -> None:
    """Of smaller ones where there are more shards than batches."""
    asked = [exchange(tmp_path, Shard(n, shards)) for n in range(shards)]
    parts = [one.mine(0, experts, whole) for one in asked]
    assert [e for part in parts for e in part] == list(range(experts))
    assert {one.together(experts, whole) for one in asked} == {together}
    assert all(part[0] % together == 0 for part in parts if part)
    sizes = [-(-len(part) // together) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_processes_of_a_shard_are_given_its_exchange(tmp_path: Path) -> None:
    shared = exchange(tmp_path, Shard(1, 3), until=Until(5.0, 0.0))
    shared._peers.append(Peers(tmp_path, 3))
    given = pickle.loads(pickle.dumps(shared))
    put(given, 0, 4, known())
    assert (given.mine(0, 12), given.until) == ([5, 6, 7], shared.until)
    assert given._peers[0].lost() == set()


class Lost(Peers):
    def __init__(self, lost: set[int]) -> None:
        self._lost = lost

    def lost(self) -> set[int]:
        return self._lost


def test_only_experts_of_lost_shards_are_taken_over(tmp_path: Path) -> None:
    shared = exchange(tmp_path, Shard(1, 4), _peers=[Lost({1, 3})])
    for expert in (2, 3, 6):
        put(shared, 0, expert, known())
    waiting = shared.others(0, 8)
    assert next(waiting) == ("of shards that are not at work", [7])
    for expert in (0, 1, 4, 5, 7):
        put(shared, 0, expert, known())
    assert list(waiting) == []


def test_time_that_is_over_ends_the_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "_POLL_SECONDS", 0.0)
    at = iter(range(100))
    until = Until(5.0, 0.0, lambda: float(next(at)))
    shared = exchange(tmp_path, Shard(0, 2), until=until, _peers=[Lost(set())])
    waiting = shared.others(0, 4)
    assert next(waiting) == ("waiting for 4 experts of other shards", [])
    with pytest.raises(OutOfTime):
        next(waiting)


def test_who_is_at_work_is_told_from_journals_that_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(leases, "STALE_SECONDS", 10.0)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 3600.0)
    header = {"fingerprint": "f", "shares": [[0, 0]] * 4}
    peers = Peers(tmp_path, 3, lambda: clock[0])
    assert peers.lost() == set()  # not begun: waited for
    here = leases.begin_lease(tmp_path, Shard(0, 3), 1, header, Files())
    assert here is not None
    real = leases.this_process()
    monkeypatch.setattr(leases, "this_process", lambda: replace(real, machine="another"))
    there = leases.begin_lease(tmp_path, Shard(1, 3), 1, header, Files())
    assert there is not None
    monkeypatch.setattr(leases, "this_process", lambda: real)
    assert peers.lost() == set()
    clock[0] = 9.0
    there.append([{"beat": 1}])
    assert peers.lost() == set()
    clock[0] = 18.0
    assert peers.lost() == {2}  # it never began
    clock[0] = 19.5
    assert peers.lost() == {1, 2}
    there.append([{"beat": 1}])
    assert peers.lost() == {2}
    here.end("stopped")
    there.end("stopped")
    assert peers.lost() == {0, 1, 2}


def test_hidden_states_behind_a_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / SOLVED).mkdir()
    (tmp_path / SOLVED / "states-0-of-2").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="expected a folder, found a symbolic link"):
        _ = exchange(tmp_path, Shard(0, 2)).states


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exchange")
    saved(qwen3_moe(num_hidden_layers=2, num_experts=4), folder / "model")
    save_file(
        {"input_ids": torch.from_numpy(np.stack(samples(2, 16)))}, folder / "tokens.safetensors"
    )
    return folder


def words(model: Path, out: Path, *more: object) -> list[Any]:
    data = ["--gptq", "--data", model / "tokens.safetensors", "--samples", "2", "--length", "16"]
    return ["w4a16", model / "model", out, "--group-size", "64", *data, "--shard", "0/2", *more]


@pytest.mark.parametrize(
    ("more", "why"),
    [(["--targets", "Linear"], "also solves linears beside the routed experts"),
     (["--save-stats", "stats"], "--save-stats writes one folder")],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused_before_anything_is_written(
    more: list[str], why: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_cli(*words(model, tmp_path / "out", *more))
    assert (done.code, why in done.err) == (1, True), done.err
    assert list(tmp_path.iterdir()) == []


def test_calibrated_units_are_left_to_finish(model: Path, tmp_path: Path) -> None:
    done = run_cli(*words(model, tmp_path / "out", "--dry-run"))
    assert done.code == 0, done.err
    assert "between shards are left to finish" in done.out
    planned = api.plan("copy", model / "model")
    units = planned.folders[0].ready.units
    assert not any(map(is_calibrated, units))
    division = divide(units, [planned.folders[0].ready.layout], 2)
    assert set(division.owner) <= {0, 1, LEFT_TO_FINISH}


def test_the_command_and_what_it_says(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process after the other: each solves what the other, which is not at work, does not."""
    monkeypatch.setattr(leases, "STALE_SECONDS", 0.0)
    monkeypatch.setattr(exchanges, "_LOOK_SECONDS", 0.0)
    out = tmp_path / "out"
    done = run_cli(*words(model, out))
    assert done.code == 0, done.err
    assert "shard 0/2 of" in done.out
    shown = run_cli("status", out).out
    assert "8 of 8 experts solved" in shown
    assert "solved 8" in shown
    early = run_cli("finish", out)
    assert early.code == 1
    assert "shard 1/2 has not begun" in early.err
    assert run_cli(*words(model, out), "--shard", "1/2").code == 0
    victim = out / WORK_DIR / SOLVED / "1-2"
    kept = victim.read_bytes()
    victim.unlink()
    missing = run_cli("finish", out)
    assert missing.code == 1
    assert "1 of 8 experts are not solved" in missing.err
    assert "--shard" in missing.err
    victim.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    damaged = run_cli("finish", out)
    assert (damaged.code, "1-2: is damaged" in damaged.err) == (1, True)
    victim.write_bytes(kept)
    # It reads no samples, and needs no device that the shards had.
    monkeypatch.setattr("qconvert.calibrate.backend.check_devices", None)
    monkeypatch.setattr("qconvert.calibrate.backend.load_tokens", None)
    finished = run_cli("finish", out)
    monkeypatch.undo()
    assert finished.code == 0, finished.err
    one = tmp_path / "one"
    assert (
        run_cli(*[word for word in words(model, one) if word not in ("--shard", "0/2")]).code == 0
    )
    left = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert left == {path.name: path.read_bytes() for path in one.iterdir() if path.is_file()}
