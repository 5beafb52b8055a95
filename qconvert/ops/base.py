"""Base classes of ops: answers that many share.

Mixins without fields: the repr of an op is its identity, and these leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Op, Output, Part, whole

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.dtypes import Shape


# --- Raw bytes seen as numpy arrays, without a copy -----------------------------------------------


T = TypeVar("T", bound="np.generic")


def array(
    data: memoryview, dtype: type[T], shape: Shape
) -> np.ndarray[tuple[int, ...], np.dtype[T]]:
    """An array over `data`, which must hold exactly that many bytes; writes go through to it."""
    import numpy as np

    return np.frombuffer(data, dtype=dtype).reshape(shape)


class Exact:
    """An op that loses nothing."""

    __slots__ = ()

    def loss(self, *args: TensorType) -> str | None:
        return None


class Uncut:
    """An op that is not cut, and works without memory of its own."""

    __slots__ = ()

    def parts(self: Op, limit: int, *args: TensorType) -> Iterator[Part]:
        yield whole(self, args)

    def scratch(self, *args: TensorType) -> int:
        return 0


class Columnwise(Uncut):
    """An op whose result rows are the columns [first, first + count) of its first argument, a matrix.
    Each needs every row of it, so that they are made together."""

    __slots__ = ()
    first: int
    count: int

    def row_step(self, *args: TensorType) -> int:
        return self.count

    def rows(self: Op, start: int, stop: int, *args: TensorType) -> Part:
        return whole(self, args)

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[Self, tuple[Output, ...]]:
        """The same op on the same arguments, for columns [start, stop) of those that it makes."""
        one: Any = self  # a dataclass, which a mixin does not know
        return replace(one, first=self.first + start, count=stop - start), args

    @contextmanager
    def by_column(self) -> Iterator[None]:
        """Errors of rows of the result as those of columns of the argument."""
        try:
            yield
        except RowError as error:
            raise RowError(self.first + error.row, error.what, by_column=True) from error

    def check_columns(self, matrix: TensorType) -> None:
        """Raise PlanError if the matrix has too few columns."""
        if self.first < 0 or self.count < 1 or self.first + self.count > matrix.shape[1]:
            raise PlanError(
                f"expected columns [{self.first}, {self.first + self.count}), one or more, to lie in "
                f"the matrix, found {matrix}"
            )
