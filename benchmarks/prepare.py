"""How fast NVFP4 experts are prepared for TensorRT-LLM's kernels (experimental), against this machine.

    .venv/bin/python benchmarks/prepare.py --experts 48 --runs 3 --work /big/disk

Three tables. Maps: the time to build an index, and to look it up again. Ops: bytes of result per second
in one thread, for experts of published sizes that do not fit the caches, next to a copy of the same
bytes in the same parts; by CPU time, because other work may share the cores. Folder: the whole command
next to the same bytes read, written and synced without the work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import limit, memcpy_rate, remove, timed, warm
from run import _qconvert

from qconvert.checkpoint.safetensors import build_header
from qconvert.contrib.trtllm_gen.layout import Rows, Scales, row_index, scale_index
from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer, Op
from qconvert.ops.gather import Gather, Order
from qconvert.plan.units import PART_BYTES

_SIZES = {"DeepSeek-V3": (7168, 2048), "Qwen3-235B": (4096, 1536)}
_EXPERTS = 6  # in an op's run: they do not fit the caches
_ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=48, help="of the folder's one layer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", type=Path, help="a folder with space [default: a temporary one]")
    options = parser.parse_args()
    print(f"memcpy, one thread: {memcpy_rate() / 1e9:.1f} GB/s\n")
    _maps()
    _ops()
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as room:
        _folder(Path(room), options.experts, options.runs)


def _maps() -> None:
    print(f"{'index of a tile':<28} {'built, us':>10} {'again, us':>10}")
    for name, (hidden, intermediate) in _SIZES.items():
        cases: dict[str, Callable[[], object]] = {
            "w13 rows": lambda: row_index(128, True),
            "w13 scales": lambda n=hidden // 16: scale_index(128, n, True),  # type: ignore[misc]
            "w2 scales": lambda n=intermediate // 16: scale_index(128, n, False),  # type: ignore[misc]
            "w13 rows, whole map": lambda n=2 * intermediate: row_index(n, True),  # type: ignore[misc]
        }
        for what, build in cases.items():
            built = []
            for _ in range(_ROUNDS):
                row_index.cache_clear()
                scale_index.cache_clear()
                begin = time.perf_counter()
                build()
                built.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            for _ in range(1000):
                build()
            again = (time.perf_counter() - begin) / 1000
            print(f"{name + ' ' + what:<32} {min(built) * 1e6:>6.0f} {again * 1e6:>10.2f}")
    print()


def _ops() -> None:
    print(f"{'one thread, CPU seconds':<28} {'GB/s':>10} {'copy':>10} {'%':>6}")
    for name, (hidden, intermediate) in _SIZES.items():
        spent = copied = size = 0.0
        for what, order, rows, columns in (
            ("w13", Rows(True), intermediate, hidden // 2),
            ("w13 scales", Scales(True), intermediate, hidden // 16),
            ("w2", Rows(False), hidden, intermediate // 2),
            ("w2 scales", Scales(False), hidden, intermediate // 16),
        ):
            ours, copy, nbytes = _op(order, rows, columns)
            spent, copied, size = spent + ours, copied + copy, size + nbytes
            _rate(f"{name} {what}", nbytes, ours, copy)
        _rate(f"{name} expert", size, spent, copied)
    print()


def _rate(what: str, nbytes: float, ours: float, copy: float) -> None:
    print(
        f"{what:<28} {nbytes / ours / 1e9:>10.2f} {nbytes / copy / 1e9:>10.2f} {100 * copy / ours:>6.0f}"
    )


def _op(order: Order, rows: int, columns: int) -> tuple[float, float, int]:
    """Seconds an expert of the op and of a copy, in the parts that the executor would cut, and bytes."""
    op: Op = Gather(order)
    kinds = [TensorType("U8", (rows, columns))] * order.halves
    (result,) = op.infer(*kinds)
    random = np.random.default_rng(0)
    source = [[memoryview(random.bytes(kind.nbytes)) for kind in kinds] for _ in range(_EXPERTS)]
    target = memoryview(bytearray(result.nbytes * _EXPERTS))
    scratch = memoryview(bytearray(op.scratch(*kinds)))
    parts = list(op.parts(PART_BYTES, *kinds))

    def prepare(ins: list[Buffer], out: Buffer) -> None:
        op.run(ins, [out], scratch)

    def copy(ins: list[Buffer], out: Buffer) -> None:
        at = 0
        for one in ins:
            out.data[at : at + one.type.nbytes] = one.data
            at += one.type.nbytes

    def go(work: Callable[[list[Buffer], Buffer], None]) -> float:
        begin = time.process_time()
        for expert, data in enumerate(source):
            for part in parts:
                ((at, kind),) = part.outs
                at += expert * result.nbytes
                ins = [
                    Buffer(k, d[a : a + k.nbytes])
                    for d, (a, k) in zip(data, part.args, strict=True)
                ]
                work(ins, Buffer(kind, target[at : at + kind.nbytes]))
        return (time.process_time() - begin) / _EXPERTS

    seconds = [(go(prepare), go(copy)) for _ in range(_ROUNDS)]
    return min(s for s, _ in seconds), min(s for _, s in seconds), result.nbytes


def _folder(room: Path, experts: int, runs: int) -> None:
    source, out = room / "source", room / "out"
    nbytes = _write(source, experts)
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(runs):
        warm(source)
        best = limit(source, out, nbytes, (1, 2))
        found.setdefault("limit", []).append((best.sample.seconds, best.cpu))
        for name, more in (("qconvert", ()), ("qconvert --jobs 1", ("--jobs", "1"))):
            warm(source)
            sample = timed(_qconvert("prepare", "trtllm-gen", str(source), str(out), *more))
            found.setdefault(name, []).append((sample.seconds, sample.cpu))
            remove(out)
    print(
        f"a layer of {experts} experts of DeepSeek-V3, {nbytes / 1e9:.2f} GB, {runs} runs, medians"
    )
    print(f"{'':<28} {'seconds':>10} {'GB/s':>10} {'CPU s':>6} {'x limit':>8}")
    first = statistics.median(seconds for seconds, _ in found["limit"])
    for name, samples in found.items():
        seconds = statistics.median(seconds for seconds, _ in samples)
        cpu = statistics.median(cpu for _, cpu in samples)
        print(
            f"{name:<28} {seconds:>10.2f} {nbytes / seconds / 1e9:>10.2f} {cpu:>6.1f} "
            f"{seconds / first:>8.2f}"
        )


def _write(folder: Path, experts: int) -> int:
    """A DeepSeek-V3-like model of one layer, its experts NVFP4 in modelopt's dialect."""
    folder.mkdir()
    hidden, intermediate = _SIZES["DeepSeek-V3"]
    config = {
        "model_type": "plain_moe", "num_hidden_layers": 1, "num_experts": experts,
        "hidden_size": hidden, "moe_intermediate_size": intermediate,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    }  # fmt: skip
    tensors: dict[str, TensorType] = {}
    for expert in range(experts):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            rows, columns = intermediate, hidden
            if projection == "down_proj":
                rows, columns = hidden, intermediate
            at = f"model.layers.0.mlp.experts.{expert}.{projection}"
            tensors[f"{at}.weight"] = TensorType("U8", (rows, columns // 2))
            tensors[f"{at}.weight_scale"] = TensorType("F8_E4M3", (rows, columns // 16))
            tensors[f"{at}.weight_scale_2"] = TensorType("F32", ())
            tensors[f"{at}.input_scale"] = TensorType("F32", ())
    header, _ = build_header(list(tensors.items()), {"format": "pt"})
    pool = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(header)
        for kind in tensors.values():
            stream.write(
                np.float32(0.5).tobytes() if not kind.shape else pool[: kind.nbytes].tobytes()
            )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return sum(kind.nbytes for kind in tensors.values())


if __name__ == "__main__":
    main()
