"""--memory is a promise: measured on process trees, on tensors larger than it, and per tensor.

Measured is what the promise is about: the anonymous memory of all processes, interpreters included.
Pages of files are the kernel's to give back.
"""

from __future__ import annotations

import cProfile
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults
import headers
import pytest
from headers import HeaderSet

from qconvert.checkpoint.checkpoint import RECEIPT, Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.names import natural_key
from qconvert.passes.dequant import Dequant
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.memory import PLAN_BYTES_PER_TENSOR, PROCESS_BYTES
from qconvert.run.work.options import RunOptions
from qconvert.run.work.sink import MIN_WINDOW_BYTES, WINDOW_BYTES, WINDOWS

MIB = 1 << 20
GIB = 1 << 30


def _python(code: str, *arguments: object) -> str:
    """What a fresh interpreter prints, with the tests' helpers in reach."""
    command = [sys.executable, "-c", _PRELUDE + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
"""

# --- planning ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3: all 92 thousand tensors, none of the data."""
    folder = tmp_path_factory.mktemp("deepseek") / "source"
    folder.mkdir()
    headers.write_sparse(headers.load("deepseek-v3"), folder)
    return folder


_PLAN = """
before = status("RssAnon")
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.passes.dequant import Dequant
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.options import RunOptions
imported = status("RssAnon")
plan = run_passes(Plan.identity(Checkpoint.open(sys.argv[1])), (Dequant(),))
ready = prepare(plan, RunOptions(memory=1 << 30))
print(len(plan.checkpoint), status("RssAnon") - imported, status("VmHWM"), "torch" in sys.modules)
"""


@pytest.mark.big
def test_planning_a_huge_model_is_cheap(deepseek: Path) -> None:
    count, growth, peak, torch_imported = _python(_PLAN, deepseek).split()
    assert int(count) == len(headers.load("deepseek-v3").tensors)
    assert int(peak) < 500_000_000
    assert torch_imported == "False"
    assert int(growth) / int(count) <= PLAN_BYTES_PER_TENSOR


def _calls(source: Path) -> tuple[int, int]:
    """Tensors of a checkpoint, and function calls that planning its conversion takes."""
    profile = cProfile.Profile()
    profile.enable()
    plan = run_passes(Plan.identity(Checkpoint.open(source)), (Dequant(),))
    ready = prepare(plan, RunOptions(memory=GIB, jobs=1))
    profile.disable()
    assert ready.units
    assert ready.fingerprint
    entries: list[Any] = profile.getstats()
    return len(plan.checkpoint), sum(entry.callcount for entry in entries)


def _with_layers(layers: int) -> HeaderSet:
    """Qwen3-30B-A3B-FP8 with fewer layers."""
    full = headers.load("qwen3-30b-a3b-fp8")
    kept = {
        name: kind
        for name, kind in full.tensors.items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < layers
    }
    return HeaderSet({**full.config, "num_hidden_layers": layers}, kept, 4)


@pytest.mark.big
def test_planning_is_linear_in_tensors(tmp_path: Path) -> None:
    """Counted in calls, not seconds. Quadratic work would take four times the calls."""
    counts = {}
    for layers in (6, 12):
        folder = tmp_path / str(layers)
        folder.mkdir()
        headers.write_sparse(_with_layers(layers), folder)
        counts[layers] = _calls(folder)
    (few, cost_few), (many, cost_many) = counts[6], counts[12]
    assert few > 4_000
    assert 1.9 < many / few < 2.1
    assert cost_many < 2.5 * cost_few
    assert cost_many > 10 * many  # calls were counted at all


# --- whole runs -------------------------------------------------------------------------------


@dataclass
class Peak:
    """The most memory seen in a tree of processes, and the most processes at once."""

    total: int = 0
    most: int = 0
    samples: int = 0
    largest: dict[int, int] = field(default_factory=dict)

    def add(self, sizes: dict[int, int]) -> None:
        total = sum(sizes.values())
        self.total = max(self.total, total)
        self.most = max(self.most, len(sizes))
        self.samples += 1
        for pid, size in sizes.items():
            self.largest[pid] = max(self.largest.get(pid, 0), size)


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _sizes(pid: int) -> dict[int, int]:
    """Anonymous memory of a process and all below it, what several share counted once among them; those
    that end meanwhile are left out."""
    found = {}
    try:
        for member in _family(pid):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    found[member] = int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def _watched(*arguments: object) -> Peak:
    """Run the command line and watch its memory."""
    command = [sys.executable, "-m", "qconvert", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = Peak()
    while process.poll() is None:
        peak.add(_sizes(process.pid))
        time.sleep(0.003)
    told, _ = process.communicate()
    assert process.returncode == 0, told
    assert peak.samples > 50
    return peak


def _fp8_headers(*, matrices: int, experts: int) -> HeaderSet:
    """Matrices of 16 MiB each and a stack of 18 MiB experts, FP8."""
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{i % 2}.m{i // 2}.weight": (4096, 4096) for i in range(matrices)
    }
    if experts:
        shapes["model.layers.0.mlp.experts.gate_up_proj"] = (experts, 4608, 4096)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = TensorType("F8_E4M3", shape)
        tensors[f"{name}_scale_inv"] = TensorType("F32", faults.grid(shape))
    ordered = {name: tensors[name] for name in sorted(tensors, key=natural_key)}
    return HeaderSet(faults.config(), ordered, 2)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder for gigabytes, emptied whatever happens."""
    free = shutil.disk_usage(tmp_path).free
    if free < 5 * GIB:
        pytest.fail(f"this test writes 4 GB below {tmp_path}, where {free} bytes are free")
    yield tmp_path
    shutil.rmtree(tmp_path)


def _experts(layers: int) -> HeaderSet:
    """Layers of twelve BF16 experts, 6 MiB each, and nothing else."""
    hidden, intermediate, experts = 2048, 512, 12
    tensors = {}
    for layer in range(layers):
        for expert in range(experts):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            for name in ("gate_proj", "up_proj"):
                tensors[f"{at}.{name}.weight"] = TensorType("BF16", (intermediate, hidden))
            tensors[f"{at}.down_proj.weight"] = TensorType("BF16", (hidden, intermediate))
    config = {
        "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_experts": experts, "moe_intermediate_size": intermediate,
    }  # fmt: skip
    ordered = {name: tensors[name] for name in sorted(tensors, key=natural_key)}
    return HeaderSet(config, ordered, 2)


def _converted(room: Path, made: HeaderSet, memory: str, *command: str) -> Peak:
    source, out = room / "source", room / "out"
    source.mkdir()
    headers.write_sparse(made, source)
    first, *more = command or ("dequant",)
    peak = _watched(first, source, out, "--memory", memory, "--jobs", 2, *more)
    lines = (out / RECEIPT).read_text().splitlines()
    assert sum('"name"' in line for line in lines) >= len(made.tensors) // 2
    shutil.rmtree(source)
    shutil.rmtree(out)
    return peak


@pytest.mark.big
def test_a_run_keeps_to_its_memory(
    room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 GB of FP8, 1.2 GB of it in one tensor: within 512 MiB, and no more than 0.5 GB takes.
    In numpy: the larger run would compute in compiled loops, whose memory test_compiled.py measures."""
    monkeypatch.setenv("QCONVERT_KERNELS", "numpy")
    less = _converted(room, _fp8_headers(matrices=30, experts=0), "512MiB")
    more = _converted(room, _fp8_headers(matrices=46, experts=64), "512MiB")
    with capsys.disabled():
        print(f"\n0.5 GB: {_told(less)}\n2 GB: {_told(more)}")
    _check(more, 512 * MIB)
    assert more.total < less.total + 16 * MIB


@pytest.mark.big
def test_quantizing_takes_no_more_for_more_layers(
    room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMX of 4 and of 40 layers: 0.3 and 3 GB of BF16. In numpy, as above."""
    monkeypatch.setenv("QCONVERT_KERNELS", "numpy")
    amx = "amx", "--method", "int8", "--numa", "2"
    few, many = (_converted(room, _experts(layers), "512MiB", *amx) for layers in (4, 40))
    with capsys.disabled():
        print(f"\n4 layers: {_told(few)}\n40 layers: {_told(many)}")
    assert many.most == 4
    assert many.total < few.total + 32 * MIB


def _check(peak: Peak, memory: int) -> None:
    """Two workers, the server that forked them, and the command kept to the budget, and were really seen
    at work."""
    assert peak.most == len(peak.largest) == 4
    assert peak.total < memory
    _, _, *workers = peak.largest.values()
    assert min(workers) > 2 * WINDOWS * MIN_WINDOW_BYTES + 10 * MIB  # an interpreter and buffers


def _told(peak: Peak) -> str:
    each = ", ".join(f"{size // MIB}" for size in peak.largest.values())
    return f"{peak.total // MIB} MiB in {peak.most} processes ({each}), {peak.samples} samples"


_RUN = """
import faults
from pathlib import Path
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.plan.plan import Plan
from qconvert.run.executor import execute
from qconvert.run.folder.prepare import RunOptions
root, count = Path(sys.argv[1]), int(sys.argv[2])
def name(i):
    return f"model.layers.{i % 60}.mlp.experts.{i // 60}.down_proj.weight"
tensor = faults.plain((4, 4))
faults.write_checkpoint(
    root / "source", {name(i): tensor for i in range(count)}, shards=4, quantized=False
)
del tensor
before = status("VmHWM")
plan = Plan.identity(Checkpoint.open(root / "source")).check()
receipt = execute(plan, root / "out", RunOptions(memory=1 << 30, jobs=1))
print(status("VmHWM") - before)
"""


@pytest.mark.big
def test_memory_set_aside_per_tensor_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan, units, journal and receipt of many tiny tensors: the growth from one count to another
    leaves out what does not depend on the count."""
    few, many = 20_000, 60_000
    peaks = []
    for count in (few, many):
        (tmp_path / str(count)).mkdir()
        peaks.append(int(_python(_RUN, tmp_path / str(count), count)))
        shutil.rmtree(tmp_path / str(count))
    per_tensor = (peaks[1] - peaks[0]) / (many - few)
    with capsys.disabled():
        print(f"\n{per_tensor:.0f} bytes a tensor, {PLAN_BYTES_PER_TENSOR} set aside")
    assert 500 < per_tensor <= PLAN_BYTES_PER_TENSOR
    # What one process takes besides: windows, an arena, and what PROCESS_BYTES is for.
    assert peaks[0] - few * per_tensor < PROCESS_BYTES + WINDOWS * WINDOW_BYTES + 8 * MIB
