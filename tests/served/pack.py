"""A runtime for a machine with a GPU and torch, but without an index to install from: what must travel.

    python tests/served/pack.py pack FOLDER [sglang]      here: download, cut, compress (about 40 MB)
    python tests/served/pack.py unpack FOLDER SITE      there: a folder for PYTHONPATH

Of vLLM's wheel (336 MB) travel the Python and the two libraries of kernels that need no symbol of torch
beyond its stable ABI, with the machine code of other GPUs set to zeros: the fat binary keeps its layout,
and zeros cost nothing once compressed. Attention's own libraries (480 MB) stay: Triton's are used, and
MLA's prefill is computed by `flash_attention.py`.

Of sglang's wheel travel the Python and the sources of kernels that nvcc compiles at their first use. The
sgl_kernel that sglang 0.5.23 names (sglang-kernel 0.4.10) needs torch 2.14.1: its library asks for five
symbols that torch 2.11 has not. That of 0.4.5 was built with torch 2.11 and CUDA 13, asks for none that
is absent, and has each name that sglang 0.5.23 imports on a GPU; of it travels the library of Hopper.
"""

from __future__ import annotations

import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent


@dataclass(frozen=True, slots=True)
class Part:
    """What travels of one wheel: its files with an end of `kept` (its metadata too) that are not below
    `left_out`, and libraries of kernels. `wheel`: a requirement, or a file of requirements."""

    wheel: str
    kept: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


_VLLM = Part(
    "requirements-loaders-vllm-wheel.txt",
    (".py", ".json", ".jinja"),
    ("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/"),
    ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"),
)
_SGLANG = Part(
    "sglang==0.5.23",
    (".py", ".json", ".jinja", ".cu", ".cuh", ".h", ".hpp", ".cpp",
     "/mem_cache.cpython-312-x86_64-linux-gnu.so"),
    ("sglang/test/", "sglang/multimodal_gen/", "sglang/kernels/jit/csrc/diffusion/",
     "sglang/kernels/jit/benchmark/"),
)  # fmt: skip
_SGL_KERNEL = Part("sglang-kernel==0.4.5", (".py",), (), ("sgl_kernel/sm90/common_ops.abi3.so",))
# What travels of each runtime: wheels as they are, and parts of wheels.
_RUNTIMES: Mapping[str, tuple[str, tuple[Part, ...]]] = {
    "vllm": ("requirements-served.txt", (_VLLM,)),
    "sglang": ("requirements-served-sglang.txt", (_SGLANG, _SGL_KERNEL)),
}
_ARCHITECTURE = 90
# A fat binary (`fatbinary.h`): containers of entries, each machine code or PTX of one architecture.
_MAGIC, _PTX, _CODE = 0xBA55ED50, 1, 2
_PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_26_x86_64",
              "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
              "manylinux1_x86_64")  # fmt: skip


def pack(target: Path, runtime: str) -> None:
    """Write a runtime's wheels, of parts of wheels the Python as a tar file, and the libraries."""
    wheels = target / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    requirements, parts = _RUNTIMES[runtime]
    _download(["-r", str(_ROOT / requirements)], wheels)
    for part in parts:
        _pack_part(part, target)


def _pack_part(part: Part, target: Path) -> None:
    asked = ["-r", str(_ROOT / part.wheel)] if part.wheel.endswith(".txt") else [part.wheel]
    _download(asked, target)
    (wheel,) = target.glob("*.whl")
    with (
        zipfile.ZipFile(wheel) as packed,
        tarfile.open(target / f"{wheel.name.partition('-')[0]}.tar.xz", "w:xz") as python,
    ):
        for info in packed.infolist():
            kept = info.filename.endswith(part.kept) or ".dist-info/" in info.filename
            if kept and not info.is_dir() and not info.filename.startswith(part.left_out):
                member = tarfile.TarInfo(info.filename)
                member.size = info.file_size
                with packed.open(info) as content:
                    python.addfile(member, content)
        for name in part.libraries:
            # Its folder is part of its name, for `unpack`.
            library = target / name.replace("/", "+")
            library.write_bytes(packed.read(name))
            _keep_architecture(library, _ARCHITECTURE)
            with library.open("rb") as raw, lzma.open(f"{library}.xz", "wb") as small:
                shutil.copyfileobj(raw, small)
            library.unlink()
    wheel.unlink()


def _download(asked: list[str], target: Path) -> None:
    platforms = [part for one in _PLATFORMS for part in ("--platform", one)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
         "--no-cache-dir", "--python-version", "3.12", "--implementation", "cp", *platforms,
         "-d", str(target), *asked], check=True,
    )  # fmt: skip


def _keep_architecture(library: Path, architecture: int) -> None:
    """Set to zeros all code that a GPU of this architecture does not run: machine code of others, and
    PTX but for the newest that it can compile where there is no machine code of its own."""
    content = bytearray(library.read_bytes())
    for entries in _containers(content, *_section(library)):
        own = any((kind, arch) == (_CODE, architecture) for kind, arch, _, _ in entries)
        ptx = max(
            (arch for kind, arch, _, _ in entries if kind == _PTX and arch <= architecture),
            default=0,
        )
        for kind, arch, start, size in entries:
            if (kind, arch) != ((_CODE, architecture) if own else (_PTX, ptx)):
                content[start : start + size] = bytes(size)
    library.write_bytes(content)


def _section(library: Path) -> tuple[int, int]:
    """Offset and size of the section of fat binaries. Raises ValueError where there is none."""
    listed = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        if ".nv_fatbin" in line:
            fields = line.split("]")[1].split()
            return int(fields[3], 16), int(fields[4], 16)
    raise ValueError(f"{library.name} has no section .nv_fatbin")


def _containers(
    content: bytearray, start: int, size: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """The entries of each container: kind, architecture, offset and size of its code."""
    at = start
    while at < start + size - 16:
        magic, _, header, length = struct.unpack_from("<IHHQ", content, at)
        if magic != _MAGIC:
            at += 8
            continue
        entry, end, entries = at + header, at + header + length, []
        while entry < end:
            kind, _, own_header, held = struct.unpack_from("<HHIQ", content, entry)
            (arch,) = struct.unpack_from("<I", content, entry + 28)
            entries.append((kind, arch, entry + own_header, held))
            entry += own_header + held
        yield entries
        at = start + -(-(end - start) // 8) * 8


def unpack(source: Path, site: Path) -> None:
    """Make a folder of packages of what `pack` wrote."""
    site.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(_library, path, site) for path in source.glob("*.so.xz")]
        for wheel in (source / "wheels").glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)
        for packed in source.glob("*.tar.xz"):
            with tarfile.open(packed) as python:
                python.extractall(site, filter="data")
        for one in made:
            one.result()
    if (site / "vllm").exists():
        shutil.copy(_HERE / "flash_attention.py", site / "vllm" / "vllm_flash_attn" / "__init__.py")


def _library(path: Path, site: Path) -> None:
    library = site / path.stem.replace("+", "/")
    library.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path) as small, library.open("wb") as raw:
        shutil.copyfileobj(small, raw)


if __name__ == "__main__":
    what, *folders = sys.argv[1:]
    if what == "pack":
        pack(Path(folders[0]), *(folders[1:] or ["vllm"]))
    else:
        unpack(*map(Path, folders))
