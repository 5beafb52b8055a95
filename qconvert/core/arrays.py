"""Types of numpy's arrays of any shape, for annotations. They exist where types are checked alone, since
importing numpy takes 0.1 s: import this file under `TYPE_CHECKING`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Int8s = np.ndarray[tuple[int, ...], np.dtype[np.int8]]
    UInt8s = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    Int16s = np.ndarray[tuple[int, ...], np.dtype[np.int16]]
    UInt16s = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
    Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    UInt32s = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
    Float32s = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    Float64s = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
