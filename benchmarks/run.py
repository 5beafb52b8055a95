"""qconvert against other tools and against this machine's own limit, in one run.

    make bench
    .venv/bin/python benchmarks/run.py dequant --layers 6 --runs 5 --json out.json --plot out.svg
    .venv/bin/python benchmarks/run.py --smallest      checks that every case runs, on about 50 MB each

Contenders run in turn, A B C A B C, because shared machines change speed from minute to minute;
medians are printed. The limit is the same bytes without the work: the source read (warm), the bytes of
the result written and synced, each in the fastest way found, one after the other. Every command
is timed as a whole process, imports and planning included, its children's CPU time and memory too.
qconvert's time includes the sync of all it wrote; the peer's and cp's own do not sync.

Cases:
  dequant  block-FP8 MoE to BF16, compared with compressed-tensors' converter
  fuse     Qwen3.5's GDN projections fused, everything still FP8
  copy     the same checkpoint, written again unchanged
  hashing  dequant with and without hashing
  sizes    dequant from 0.6 to 8 GB: time and memory against size
  jobs     dequant with 1, 2, 4 ... workers
  amx      BF16 experts to AMXINT4 and AMXINT8, two NUMA shards, compared with kt-kernel's converter
  w4a16    BF16 experts to packed INT4, groups of 128, compared with llm-compressor's model_free_ptq;
           checks that the tensors of both are the same bytes
  encoders  BF16 experts to FP8 (blocks, rows), INT8, MXFP4, MXFP8 and NVFP4, compared with
           llm-compressor's model_free_ptq
  decoders  what those and w4a16 make, back to BF16, compared with compressed-tensors' converter
  long     the same encoders, AMX and decoders over 12 GB of matrices as large as Qwen3-235B's: what they
           take beside the limit where a conversion's start weighs as little as it does for users
  replica  layers of Qwen3-235B-A22B, BF16, to packed INT4 with 10 and 16 jobs, scaled to its 94
  kernels  row ops alone, numpy's form and compiled loops (the extra `fast`), on one core
  validate  dequant's and amx's results against their source, at every level, from a cold cache
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data import Model, bf16_moe, qwen3_5, qwen3_235b, qwen3_moe, write_checkpoint
from measure import Sample, cold_read, forget, limit, memcpy_rate, remove, timed, warm

_PEER = """
import sys
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint
convert_checkpoint(model_stub=sys.argv[1], save_directory=sys.argv[2], max_workers=int(sys.argv[3]),
    converter=FP8BlockDequantizer(targets=["re:.*proj$"], weight_block_size=(128, 128)))
"""
_PTQ = """
import sys
from compressed_tensors.quantization import QuantizationConfig
from llmcompressor.entrypoints.model_free import model_free_ptq
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
group = {"targets": [r"re:.*\\.mlp\\.experts\\..*"], "weights": weights}
model_free_ptq(sys.argv[1], sys.argv[2], max_workers=int(sys.argv[3]), device="cpu",
    config=QuantizationConfig(config_groups={"group_0": group}, format="pack-quantized"))
"""
_SCHEME = """
import sys
from llmcompressor.entrypoints.model_free import model_free_ptq
model_free_ptq(sys.argv[1], sys.argv[2], max_workers=int(sys.argv[3]), device="cpu", scheme=sys.argv[4],
    ignore=["lm_head", "re:.*embed_tokens", "re:.*self_attn.*", "re:.*mlp.gate$", "re:.*norm"])
"""
_DEQUANTIZER = """
import sys
from compressed_tensors.entrypoints.convert import convert_checkpoint
from compressed_tensors.entrypoints.convert.converters import ct_dequantizer
convert_checkpoint(model_stub=sys.argv[1], save_directory=sys.argv[2], max_workers=int(sys.argv[3]),
    converter=ct_dequantizer.CompressedTensorsDequantizer(sys.argv[1]))
"""
# What writes experts in an encoding, llm-compressor's scheme (None: it has none for weights alone), and
# the bytes of a weight.
_ENCODED: dict[str, tuple[tuple[str, ...], str | None, float]] = {
    "fp8 block": (
        ("fp8", "--dialect", "compressed-tensors", "--targets", "experts"),
        "FP8_BLOCK",
        1,
    ),
    "fp8 rows": (("fp8", "--channel", "--targets", "experts"), "FP8_DYNAMIC", 1),
    "int8": (("int8", "--targets", "experts"), "INT8", 1),
    "mxfp4": (("mx",), "MXFP4A16", 17 / 32),
    "mxfp8": (("mx", "--bits", "8"), "MXFP8", 33 / 32),
    "nvfp4": (("nvfp4", "--dialect", "compressed-tensors"), "NVFP4A16", 9 / 16),
    "w4a16": (("w4a16", "--rtn"), None, 33 / 64),
}
# As sitecustomize.py it is imported by every interpreter, workers included.
_NO_HASH = """
import xxhash
class Nothing:
    def __init__(self, data=b""): pass
    def update(self, data): pass
    def hexdigest(self): return "0" * 32
xxhash.xxh3_128 = Nothing
"""
_SIZES = (1, 2, 4, 8, 12)  # layers, 0.62 GB each
_FEW = 8  # experts per layer at the smallest size


@dataclass(frozen=True)
class Row:
    """A contender's medians. `x_limit` is seconds over the limit's, `x_peer` the peer's over ours."""

    case: str
    name: str
    gigabytes: float
    seconds: float
    cpu: float
    peak_mb: float
    x_limit: float
    x_peer: float | None
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Contender:
    name: str
    command: Sequence[str]


def _qconvert(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "qconvert", *arguments]


def _compare(
    case: str,
    source: Path,
    read: int,
    written: int,
    contenders: Sequence[Contender],
    runs: int,
    peer: str | None = None,
) -> Iterator[Row]:
    """Run everything in turn, and the limit among them."""
    out = source.parent / "out"
    threads = sorted({1, len(os.sched_getaffinity(0))})
    samples: dict[str, list[Sample]] = {"limit": []}
    ways: list[str] = []

    for _ in range(runs):
        warm(source)
        found = limit(source, out, written, threads)
        samples["limit"].append(found.sample)
        ways.append(found.how)
        _tell(case, "limit", found.sample)
        for contender in contenders:
            warm(source)
            sample = timed(contender.command)
            samples.setdefault(contender.name, []).append(sample)
            _tell(case, contender.name, sample)
            remove(out)
    print(f"\n{case}: {read / 1e9:.2f} GB in, {written / 1e9:.2f} GB out, {runs} runs, medians")
    print(f"limit: warm read, then write by {statistics.mode(ways)}")
    print(f"memcpy, one thread: {memcpy_rate() / 1e9:.1f} GB/s")
    head = f"{'':<24} {'seconds':>8} {'GB/s in':>8} {'CPU s':>7} {'peak MB':>8} {'x limit':>8}"
    print(head + (f" {'x faster':>9} {'x CPU':>6} {'x memory':>9}" if peer else ""))
    median = {name: _median(found) for name, found in samples.items()}
    for name, found_samples in samples.items():
        mine = median[name]
        ratio = mine.seconds / median["limit"].seconds
        line = (
            f"{name:<24} {mine.seconds:>8.2f} {read / 1e9 / mine.seconds:>8.2f} "
            f"{mine.cpu:>7.1f} {mine.peak_mb:>8.0f} {ratio:>8.2f}"
        )
        faster = None
        if peer and name != "limit":
            theirs = median[peer]
            faster = theirs.seconds / mine.seconds
            line += (
                f" {faster:>9.2f} {mine.cpu / theirs.cpu:>6.2f} "
                f"{mine.peak_mb / theirs.peak_mb:>9.2f}"
            )
        print(line, flush=True)
        yield Row(
            case, name, read / 1e9, mine.seconds, mine.cpu, mine.peak_mb, ratio, faster,
            tuple(found_samples),
        )  # fmt: skip


def _tell(case: str, name: str, sample: Sample) -> None:
    text = f"{case}: {name} {sample.seconds:.2f} s, {sample.cpu:.1f} CPU s"
    print(text, file=sys.stderr, flush=True)


def _median(samples: Sequence[Sample]) -> Sample:
    return Sample(
        statistics.median(sample.seconds for sample in samples),
        statistics.median(sample.cpu for sample in samples),
        statistics.median(sample.peak_mb for sample in samples),
    )


def _moe(options: argparse.Namespace, layers: int | None = None) -> Model:
    """Block-FP8 experts, as many layers as asked."""
    if options.smallest:
        return qwen3_moe(1, _FEW)
    return qwen3_moe(options.layers if layers is None else layers)


def _bf16_moe(options: argparse.Namespace) -> Model:
    return bf16_moe(1, _FEW) if options.smallest else bf16_moe(options.layers)


def _qwen3_5(options: argparse.Namespace) -> Model:
    return qwen3_5(1, _FEW) if options.smallest else qwen3_5(max(1, options.layers // 2))


def _made(work: Path, model: Model) -> tuple[Path, int]:
    source = work / "source"
    return source, write_checkpoint(source, model)


def _doubled(model: Model) -> int:
    """Bytes of a model once FP8 has become BF16 and its scales are dropped."""
    return sum(
        2 * kind.nbytes if kind.dtype == "F8_E4M3" else kind.nbytes
        for name, kind in model.tensors.items()
        if not name.endswith("_scale_inv")
    )


def _dequant(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    model = _moe(options)
    source, read = _made(work, model)
    out = str(work / "out")
    contenders = [
        Contender("qconvert", _qconvert("dequant", str(source), out)),
        Contender("qconvert --jobs 1", _qconvert("dequant", str(source), out, "--jobs", "1")),
    ]
    peer = None if options.no_peer else "compressed-tensors"
    if peer:
        cores = str(len(os.sched_getaffinity(0)))
        contenders.append(Contender(peer, [sys.executable, "-c", _PEER, str(source), out, cores]))
    yield from _compare("dequant", source, read, _doubled(model), contenders, options.runs, peer)


def _fuse(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    source, read = _made(work, _qwen3_5(options))
    command = _qconvert("fuse", str(source), str(work / "out"), "--for", "sglang")
    yield from _compare("fuse", source, read, read, [Contender("qconvert", command)], options.runs)


def _copy(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    source, read = _made(work, _qwen3_5(options))
    contenders = [
        Contender("qconvert", _qconvert("run", "copy", str(source), str(work / "out"))),
        Contender(
            "cp, sync", ["sh", "-c", 'cp -r "$0" "$1" && sync', str(source), str(work / "out")]
        ),
    ]
    yield from _compare("copy", source, read, read, contenders, options.runs)


def _hashing(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    model = _moe(options)
    source, read = _made(work, model)
    (work / "sitecustomize.py").write_text(_NO_HASH)
    command = _qconvert("dequant", str(source), str(work / "out"))
    contenders = []
    for name, extra in (("", ()), (" --jobs 1", ("--jobs", "1"))):
        without = ["env", f"PYTHONPATH={work}", *command, *extra]
        contenders.append(Contender(f"hashing{name}", [*command, *extra]))
        contenders.append(Contender(f"not hashing{name}", without))
    yield from _compare("hashing", source, read, _doubled(model), contenders, options.runs)


def _sizes(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    for layers in _SIZES[:1] if options.smallest else _SIZES:
        model = _moe(options, layers)
        source, read = _made(work, model)
        command = _qconvert("dequant", str(source), str(work / "out"))
        ours = [Contender("qconvert", command)]
        yield from _compare("sizes", source, read, _doubled(model), ours, options.runs)
        remove(source)


def _jobs(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    model = _moe(options)
    source, read = _made(work, model)
    cores = len(os.sched_getaffinity(0))
    counts = [2**n for n in range(8) if 2**n <= max(8, cores)]
    contenders = [
        Contender(
            f"qconvert --jobs {count}",
            _qconvert("dequant", str(source), str(work / "out"), "--jobs", str(count)),
        )
        for count in counts
    ]
    alone = _qconvert("dequant", str(source), str(work / "out"))
    contenders.append(Contender("qconvert", alone))
    # File systems lock a file that is written to: with more files, more workers can write.
    smaller = [*alone, "--max-shard-size", "1GB"]
    contenders.append(Contender("qconvert, 1 GB shards", smaller))
    yield from _compare("jobs", source, read, _doubled(model), contenders, options.runs)


def _amx(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    model = _bf16_moe(options)
    source, read = _made(work, model)
    out, peer_script = str(work / "out"), str(Path(__file__).parent / "kt_peer.py")
    for method, divisor in (("int4", 4), ("int8", 2)):
        ours = _qconvert("amx", str(source), out, "--method", method, "--numa", "2")
        contenders = [
            Contender(f"qconvert {method}", ours),
            Contender(f"qconvert {method} --jobs 1", [*ours, "--jobs", "1"]),
            Contender(f"qconvert {method} search", [*ours, "--rounding", "search"]),
        ]
        peer = None if options.no_peer else f"kt-kernel {method}"
        if peer:
            theirs = [peer_script, str(source), out, f"AMX{method.upper()}", "2"]
            contenders.append(Contender(peer, [sys.executable, *theirs]))
        case = f"amx {method}"
        yield from _compare(case, source, read, read // divisor, contenders, options.runs, peer)


def _w4a16(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    model = _bf16_moe(options)
    source, read = _made(work, model)
    out = str(work / "out")
    ours = _qconvert("w4a16", str(source), out, "--rtn")
    contenders = [
        Contender("qconvert", ours),
        Contender("qconvert --jobs 1", [*ours, "--jobs", "1"]),
    ]
    peer = None if options.no_peer else "llm-compressor"
    if peer:
        cores = str(len(os.sched_getaffinity(0)))
        theirs = [sys.executable, "-c", _PTQ, str(source), out, cores]
        contenders.append(Contender(peer, theirs))
        other = work / "other"
        timed(ours)
        timed([*theirs[:4], str(other), cores])
        count = _same_tensors(work / "out", other)
        print(f"w4a16: {count} tensors, all the same bytes in both")
        remove(work / "out")
        remove(other)
    written = read * 33 // 128  # 4 bits a weight, and 16 a group of 128
    yield from _compare("w4a16", source, read, written, contenders, options.runs, peer)


def _replica(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    """A run's start and end are counted once, what its layers take is scaled up: two sizes tell."""
    layers = 1 if options.smallest else max(2, options.layers)
    experts = _FEW if options.smallest else 128
    out, rows = str(work / "out"), []
    for count in (1, layers) if layers > 1 else (1,):
        source, read = _made(work, qwen3_235b(count, experts))
        contenders = [
            Contender(
                f"qconvert --jobs {jobs}",
                _qconvert("w4a16", str(source), out, "--rtn", "--jobs", str(jobs)),
            )
            for jobs in (10, 16)
        ]
        case = f"replica {count} of 94 layers"
        made = list(_compare(case, source, read, read * 33 // 128, contenders, options.runs))
        rows.append(made)
        yield from made
        remove(source)
    if len(rows) == 2:
        for small, large in zip(*rows, strict=True):
            each = (large.seconds - small.seconds) / (layers - 1)
            print(
                f"{large.name}: {each:.2f} s a layer, {small.seconds + 93 * each:.0f} s for 94 layers, "
                f"peak {large.peak_mb:.0f} MB"
            )


def _encoders(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    source, read = _made(work, _bf16_moe(options))
    out, cores = str(work / "out"), str(len(os.sched_getaffinity(0)))
    for name, ((command, *more), scheme, each) in _ENCODED.items():
        if scheme is None:  # a case of its own
            continue
        contenders = [Contender("qconvert", _qconvert(command, str(source), out, *more))]
        peer = None if options.no_peer else "llm-compressor"
        if peer:
            theirs = [sys.executable, "-c", _SCHEME, str(source), out, cores, scheme]
            contenders.append(Contender(peer, theirs))
        written = int(read / 2 * each)
        case = f"encoders {name}"
        yield from _compare(case, source, read, written, contenders, options.runs, peer)


def _decoders(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    plain, _ = _made(work, _bf16_moe(options))
    out, cores = str(work / "out"), str(len(os.sched_getaffinity(0)))
    written = sum(file.stat().st_size for file in plain.glob("*.safetensors"))
    for name, ((command, *more), _, _) in _ENCODED.items():
        source = work / name.replace(" ", "-")
        timed(_qconvert(command, str(plain), str(source), *more))
        read = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        contenders = [Contender("qconvert", _qconvert("dequant", str(source), out))]
        # It decodes in BF16 where scales are BF16, and NVFP4 not at all under a class of its own.
        peer = None if options.no_peer else "compressed-tensors"
        if peer:
            theirs = [sys.executable, "-c", _DEQUANTIZER, str(source), out, cores]
            contenders.append(Contender(peer, theirs))
        case = f"decoders {name}"
        yield from _compare(case, source, read, written, contenders, options.runs, peer)
        remove(source)


def _long(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    model = qwen3_235b(1, _FEW) if options.smallest else qwen3_235b(options.layers, 53)
    plain, read = _made(work, model)
    out, runs = str(work / "out"), options.runs
    for method, divisor in (("int4", 4), ("int8", 2)):
        ours = [
            Contender(
                "qconvert", _qconvert("amx", str(plain), out, "--method", method, "--numa", "2")
            )
        ]
        yield from _compare(f"long amx {method}", plain, read, read // divisor, ours, runs)
    for name, ((command, *more), _, each) in _ENCODED.items():
        source = work / name.replace(" ", "-")
        ours = [Contender("qconvert", _qconvert(command, str(plain), out, *more))]
        yield from _compare(f"long to {name}", plain, read, int(read / 2 * each), ours, runs)
        timed(_qconvert(command, str(plain), str(source), *more))
        packed = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        back = [Contender("qconvert", _qconvert("dequant", str(source), out))]
        yield from _compare(f"long from {name}", source, packed, read, back, runs)
        remove(source)


def _same_tensors(first: Path, second: Path) -> int:
    """How many tensors two folders have, if name, type and content are equal. SystemExit if not."""
    import torch
    from safetensors import safe_open

    def opened(folder: Path) -> dict[str, Any]:
        found = {}
        for file in sorted(folder.glob("*.safetensors")):
            handle: Any = safe_open(file, framework="pt")
            found.update(dict.fromkeys(handle.keys(), handle))
        return found

    ours, theirs = opened(first), opened(second)
    if ours.keys() != theirs.keys():
        raise SystemExit(f"names differ: {sorted(ours.keys() ^ theirs.keys())[:4]}")
    for name, handle in ours.items():
        a, b = handle.get_tensor(name), theirs[name].get_tensor(name)
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            raise SystemExit(f"{name}: differs between the two")
    return len(ours)


def _validate(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    model = _moe(options)
    source, read = _made(work, model)
    out, cpu = work / "bf16", work / "cpu"
    timed(_qconvert("dequant", str(source), str(out)))
    timed(_qconvert("amx", str(source), str(cpu), "--method", "int4", "--numa", "2"))
    threads = sorted({1, len(os.sched_getaffinity(0))})
    for made in (out, cpu):
        command = _qconvert("validate", str(made), "--against", str(source), "--level")
        runs: dict[str, list[Sample]] = {"limit": [], "full": [], "full --jobs 1": [], "sample": []}
        for _ in range(options.runs):
            runs["limit"].append(cold_read([source, made], threads))
            for name in list(runs)[1:]:
                forget([source, made])
                runs[name].append(timed([*command, *name.split()]))
        nbytes = read + sum(file.stat().st_size for file in made.glob("*.safetensors"))
        case = f"validate {made.name}"
        print(f"\n{case}: {nbytes / 1e9:.2f} GB in both folders, {options.runs} runs, medians")
        print("limit: both read once from the disk, nothing cached")
        medians = {name: _median(found) for name, found in runs.items()}
        for name, found in medians.items():
            ratio = found.seconds / medians["limit"].seconds
            print(
                f"{name:<16} {found.seconds:>8.2f} s {nbytes / 1e9 / found.seconds:>6.2f} GB/s "
                f"{found.cpu:>7.1f} CPU s {found.peak_mb:>6.0f} MB {ratio:>6.2f} x limit",
                flush=True,
            )
            yield Row(
                case, name, nbytes / 1e9, found.seconds, found.cpu, found.peak_mb, ratio, None,
                tuple(runs[name]),
            )  # fmt: skip


def _kernels(work: Path, options: argparse.Namespace) -> Iterator[Row]:
    # Not for the other cases: it needs numba's extra, and numpy in this process.
    from kernels import measured

    print(f"\n{'op, GB/s of BF16':<20} {'numpy':>8} {'compiled':>9} {'x':>6}")
    for found in measured(options.runs):
        size, faster = found.nbytes / 1e9, found.numpy / found.compiled
        print(
            f"{found.name:<20} {size / found.numpy:>8.2f} {size / found.compiled:>9.2f} {faster:>6.1f}",
            flush=True,
        )
        for name, seconds in (("numpy", found.numpy), ("compiled", found.compiled)):
            times = seconds / found.compiled
            sample = Sample(seconds, seconds, 0)
            yield Row(
                f"kernels {found.name}", name, size, seconds, seconds, 0, times, None, (sample,)
            )


_CASES: dict[str, Callable[[Path, argparse.Namespace], Iterator[Row]]] = {
    "dequant": _dequant,
    "fuse": _fuse,
    "copy": _copy,
    "hashing": _hashing,
    "sizes": _sizes,
    "jobs": _jobs,
    "amx": _amx,
    "w4a16": _w4a16,
    "encoders": _encoders,
    "decoders": _decoders,
    "long": _long,
    "kernels": _kernels,
    "validate": _validate,
    "replica": _replica,
}
_BY_NAME_ALONE = {"replica"}  # 38 GB at six layers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="which of them [default: all but replica]")
    parser.add_argument("--layers", type=int, default=6, help="size of the data, 0.62 GB each")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--smallest", action="store_true", help="about 50 MB per case, one run")
    parser.add_argument("--work", type=Path, help="folder for the data [default: temporary]")
    parser.add_argument("--json", type=Path, help="write all samples there")
    parser.add_argument("--plot", type=Path, help="draw seconds against the limit there (SVG, PNG)")
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    for case in options.cases:
        if case not in _CASES:
            parser.error(f"no case {case!r}; choose of {', '.join(_CASES)}")
    if options.smallest:
        options.runs = 1
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    print(f"{len(os.sched_getaffinity(0))} cores")
    for case in options.cases or [name for name in _CASES if name not in _BY_NAME_ALONE]:
        work = Path(tempfile.mkdtemp(prefix="qconvert-bench-", dir=options.work))
        try:
            rows += _CASES[case](work, options)
        finally:
            remove(work)
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if options.plot:
        from plot import draw

        draw([(row.case, row.name, row.gigabytes, row.x_limit) for row in rows], options.plot)


if __name__ == "__main__":
    main()
