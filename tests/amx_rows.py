"""Rows that quantizers get wrong, as bf16 bits: heavy tails, outliers, ties, zeros, denormals, huge
values; made of integers and numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

Bits = np.ndarray[Any, np.dtype[np.uint16]]
KINDS = 10


def bf16(values: np.ndarray[Any, Any]) -> Bits:
    """Float32 cut to bf16 bits; which way it rounds does not matter to who makes test data."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def matrix(rows: int, columns: int, seed: int) -> Bits:
    """A matrix whose rows are of all kinds, in turn."""
    random = np.random.default_rng(seed)
    values = random.standard_t(4, (rows, columns)) * 0.02
    values[:, :: max(2, columns // 32)] *= 8  # outlier channels
    bits = bf16(values)
    for row in range(rows):
        kind = row % KINDS
        if kind == 1:  # gaussian
            bits[row] = bf16(random.standard_normal(columns))
        elif kind == 2:  # zeros of both signs
            bits[row] = random.integers(0, 2, columns) << 15
        elif kind == 3:  # denormals only
            bits[row] = random.integers(0, 128, columns) | random.integers(0, 2, columns) << 15
        elif kind == 4:  # denormals beside the smallest normal numbers
            bits[row] = random.integers(0, 0x0400, columns) | random.integers(0, 2, columns) << 15
        elif kind == 5:  # up to 3e38
            bits[row] = random.integers(0x7E00, 0x7F80, columns) | (
                random.integers(0, 2, columns) << 15
            )
        elif kind == 6:  # multiples of 1/16 of a step of 7, or 1/2 of one of 127: ties
            bits[row] = bf16(random.integers(-112, 113, columns))
            bits[row, 0] = bf16(np.array([112.0]))[0]
        elif kind == 7:
            bits[row] = bf16(random.integers(-254, 255, columns) / 2)
            bits[row, -1] = bf16(np.array([127.0]))[0]
        elif kind == 8:  # one value far above all others
            bits[row, seed % columns] = bf16(np.array([1e6]))[0]
        elif kind == 9:  # any finite bits
            bits[row] = random.integers(0, 0x7F80, columns) | random.integers(0, 2, columns) << 15
    return bits
