"""Every Triton kernel on random weights, against its reference: a line a case, then a summary.

    python tests/kernel_matrix.py [fp8 gdn]

Real sizes where there is a GPU, small ones in Triton's interpreter elsewhere. It needs torch, triton,
numpy and this repository, nothing else installed. Exit code 1 where a case does not fit.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

KERNELS = ("fp8", "gdn")


def main(names: list[str]) -> int:
    from qconvert.validators.kernels.device import device, place

    where = device()
    if where == "cuda":
        import torch

        # Expected values are computed on it too, and not in TF32.
        torch.backends.cuda.matmul.allow_tf32 = False
    import triton

    print(f"# {place(where)}, triton {triton.__version__}, python {sys.version.split()[0]}")
    failed = 0
    for name in names or KERNELS:
        kernel = importlib.import_module(f"qconvert.validators.kernels.triton.{name}")
        start, count, wrong, most = time.monotonic(), 0, 0, 0.0
        for case in kernel.random_cases(where):
            bound = f"{case.bound:.3g}" if case.bound else "bitwise"
            verdict = "fits" if case.fits else "DIFFERS"
            print(f"{name}\t{verdict}\t{case.difference:g}\t{bound}\t{case.name}", flush=True)
            count, wrong = count + 1, wrong + (not case.fits)
            most = max(most, case.share)
        seconds = time.monotonic() - start
        print(
            f"# {name}: {count} cases, {wrong} differ; the most of a bound taken: {most:.3g}; "
            f"{seconds:.1f} s"
        )
        failed += wrong + (count == 0)
    print(f"# {'all fit' if not failed else f'{failed} do not fit'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    sys.exit(main(sys.argv[1:]))
