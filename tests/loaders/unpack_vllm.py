"""Unpack the Python of a wheel of vLLM, and the data that it reads, without its compiled kernels.

python tests/loaders/unpack_vllm.py FOLDER_WITH_THE_WHEEL TARGET
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

_KEPT = (".py", ".json", ".jinja")


def unpack(wheel: Path, target: Path) -> int:
    """The number of files unpacked; ValueError where a name leads out of the target."""
    with zipfile.ZipFile(wheel) as packed:
        kept = [name for name in packed.namelist() if name.endswith(_KEPT) or ".dist-info/" in name]
        for name in kept:
            if not (target / name).resolve().is_relative_to(target.resolve()):
                raise ValueError(f"{wheel.name} holds {name!r}, which is outside of {target}")
        packed.extractall(target, kept)
    return len(kept)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    (only,) = source.glob("vllm-*.whl")
    print(unpack(only, target), "files of", only.name)
