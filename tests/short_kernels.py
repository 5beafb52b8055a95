"""The command line with one case of random weights a kernel: in Triton's interpreter all of them take
longer than a folder does. All of them: tests/kernel_matrix.py.

    python tests/short_kernels.py validate OUT --kernels
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import ModuleType
from typing import Any


def modules() -> tuple[ModuleType, ...]:
    from qconvert.validators.kernels.triton import fp8, gdn

    return fp8, gdn


def shorten() -> None:
    for module in modules():
        _shorten(module)


def _shorten(module: ModuleType) -> None:
    whole: Callable[[str], Iterator[Any]] = module.random_cases
    module.random_cases = lambda device: islice(whole(device), 1)  # type: ignore[attr-defined]


if __name__ == "__main__":
    from qconvert.cli.main import main
    from qconvert.validators.kernels.device import device

    device()
    shorten()
    main(sys.argv[1:])
