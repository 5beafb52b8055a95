"""Memory that is taken piece after piece and given back in the same order, by one thread to another.

Two windows of fixed size hold up who fills them where runs of bytes are short: of a matrix's codes, its
scales and the next matrix's codes the third waits for the first to be on the disk (NVFP4 of 12.9 GB:
1.2 of 9 worker seconds). Pieces of a ring are as long as what is in them.
"""

from __future__ import annotations

from threading import Condition

from qconvert.run.pages import fresh_pages


class Ring:
    """Of `size` bytes, two times `window` or more. Positions count on from round to round, so that the
    difference of two is the memory between them; a piece does not go over the end. `block` is what
    positions are multiples of. One thread takes, one gives back."""

    def __init__(self, size: int, window: int, block: int) -> None:
        # What is passed over at the end, and a piece after it, are less than all of it: nobody waits for
        # ever.
        assert size >= 2 * window
        self._size, self._window, self._block = size, window, block
        self._pages = fresh_pages(self._size)
        self._changed = Condition()
        # Everything before it was given back; everything from the second on is free.
        self._oldest = self._next = 0

    def begin(self, least: int) -> int:
        """Where a piece of `least` bytes, at most a window, may begin. What is left before the end is
        passed over if it is less, or less than half a window."""
        assert least <= self._window
        left = self._size - self._next % self._size
        if left < max(least, self._window // 2):
            self._next += left
        return self._next

    def memory(self, begin: int) -> memoryview:
        """The most that a piece can be, a window or less; see `wait` for how much of it is free."""
        at = begin % self._size
        return self._pages[at : min(at + self._window, self._size)]

    def wait(self, stop: int) -> None:
        """Return when all memory before this position is free."""
        if stop - self._oldest <= self._size:  # it only grows: no lock is needed to see that
            return
        with self._changed:
            while stop - self._oldest > self._size:
                self._changed.wait()

    def end(self, stop: int) -> int:
        """The piece that was begun ends here: the position after it."""
        self._next = -(-stop // self._block) * self._block
        return self._next

    def give(self, stop: int) -> None:
        """A piece, up to the position after it, and all before it are not needed any more."""
        with self._changed:
            self._oldest = stop
            self._changed.notify()
