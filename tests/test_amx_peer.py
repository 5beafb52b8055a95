"""AMXINT4 and AMXINT8 against kt-kernel's own converter, byte for byte, and what it refuses.

All that both take is compared whenever peer tests run. Each refusal costs a process that aborts, so
some stand for the others; `QCONVERT_ALL=1 pytest -m peer tests/test_amx_peer.py` tries every one.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from kt_experts import layer_of, ours, run_kt
from kt_machine import needs_avx512
from sampled import thinned

from qconvert.core.errors import PlanError
from qconvert.formats.amx.format import Method, check_dims

pytestmark = pytest.mark.peer

# (I, H): rows and columns below and above a K block of 3584, ragged in blocks of rows, published ones.
SHAPES = [
    (256, 512), (512, 1024), (768, 2048), (1408, 2048), (1536, 4096), (2048, 7168), (2560, 3584),
    (256, 3712), (128, 7296),
]  # fmt: skip
METHODS: list[Method] = ["int4", "int8"]
NUMA = [1, 2, 4]


def fits(method: Method, intermediate: int, hidden: int, numa: int) -> bool:
    """Whether qconvert takes these sizes."""
    try:
        check_dims(method, hidden, intermediate, numa)
    except PlanError:
        return False
    return True


@needs_avx512
@pytest.mark.parametrize(("method", "numa"), thinned(itertools.product(METHODS, NUMA), 2))
def test_bytes_equal_kt_kernels(method: Method, numa: int, tmp_path: Path) -> None:
    shapes = [shape for shape in SHAPES if fits(method, *shape, numa)]
    assert shapes
    layers = [layer_of(*shape, seed=10 * number) for number, shape in enumerate(shapes)]
    for number, layer in enumerate(layers):
        np.savez(tmp_path / f"{number}.npz", allow_pickle=False, **layer)
    done = run_kt(method, numa, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for number, layer in enumerate(layers):
        for name, bits in layer.items():
            made = ours(method, numa, name, bits[0])
            for shard in range(numa):
                where = tmp_path / f"_layer_{number}" / f"_numa_{shard}"
                for kind, mine in (("quant", made[2 * shard]), ("scale", made[2 * shard + 1])):
                    (file,) = where.glob(f"*_{name}_0_*Byte_{kind}_.kt")
                    assert file.read_bytes() == mine, (shapes[number], name, shard, kind)


_REFUSED = [
    (method, shape, numa)
    for method in METHODS
    for numa in [*NUMA, 3]
    for shape in [*SHAPES, (192, 512), (256, 576), (96, 256)]
    if not fits(method, *shape, numa)
]


@pytest.mark.parametrize(("method", "shape", "numa"), thinned(_REFUSED, 8))
def test_what_qconvert_refuses_kt_kernel_does_not_convert(
    method: Method, shape: tuple[int, int], numa: int, tmp_path: Path
) -> None:
    np.savez(tmp_path / "0.npz", allow_pickle=False, **layer_of(*shape, seed=0))
    assert run_kt(method, numa, tmp_path).returncode != 0
