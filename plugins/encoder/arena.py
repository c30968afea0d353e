"""Places in a workspace that launches share: what is given back is taken again, because launches follow each other."""

from __future__ import annotations

from ..plan import WORKSPACE, Pointer

ALIGNMENT = 256


class Arena:
    """Takes the first gap that is large enough."""

    def __init__(self) -> None:
        self.nbytes = 0
        """The workspace's size, so far."""
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> Pointer:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        for begin, taken in sorted(self._taken.items()):
            if begin - offset >= size:
                break
            offset = begin + taken
        self._taken[offset] = size
        self.nbytes = max(self.nbytes, offset + size)
        return Pointer(WORKSPACE, offset)

    def give(self, place: Pointer) -> None:
        """Say that no later launch reads what is there now."""
        del self._taken[place.offset]
