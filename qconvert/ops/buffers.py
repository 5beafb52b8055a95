"""Raw bytes seen as numpy arrays, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.dtypes import Shape


T = TypeVar("T", bound="np.generic")


def array(
    data: memoryview, dtype: type[T], shape: Shape
) -> np.ndarray[tuple[int, ...], np.dtype[T]]:
    """An array over `data`, which must hold exactly that many bytes; writes go through to it."""
    import numpy as np

    return np.frombuffer(data, dtype=dtype).reshape(shape)
