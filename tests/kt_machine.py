"""kt-kernel's wheel has builds for processors with AVX512 alone."""

from __future__ import annotations

from pathlib import Path

import pytest

_CPU = Path("/proc/cpuinfo")
needs_avx512 = pytest.mark.skipif(
    not (_CPU.is_file() and "avx512bw" in _CPU.read_text()),
    reason="kt-kernel does not run on this processor: no AVX512",
)
