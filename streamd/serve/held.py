"""Verified chunks in memory that aren't on their way to the cache file: those nobody has read, and those read. Pure.

What was read can be given up first, the longest ago before others. Of what wasn't, the one fetched furthest ahead (the
latest that came) is missed last: the stream comes from below.
"""

from collections import OrderedDict
from collections.abc import Iterator

from streamd.store.port import Buffer


class Pool:
    """Chunks in the order in which they came, and how many bytes they have together."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, Buffer] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, chunk: int) -> Buffer | None:
        """Give a chunk's bytes, None when it isn't in here."""
        return self._chunks.get(chunk)

    def first(self) -> tuple[int, Buffer]:
        """Give the chunk that came first; there is one."""
        return next(iter(self._chunks.items()))

    def last(self) -> tuple[int, Buffer]:
        """Give the chunk that came last; there is one."""
        return next(reversed(self._chunks.items()))

    def put(self, chunk: int, data: Buffer) -> None:
        """Take in a chunk that isn't in here, as the last one."""
        assert chunk not in self._chunks
        self._chunks[chunk] = data
        self.size += len(data)

    def pop(self, chunk: int) -> Buffer | None:
        """Take a chunk out, if it is in here."""
        data = self._chunks.pop(chunk, None)
        if data is not None:
            self.size -= len(data)
        return data


class Held:
    """The two pools; a chunk is in one of them at most."""

    def __init__(self) -> None:
        self.unread = Pool()
        self.read = Pool()

    def get(self, chunk: int) -> Buffer | None:
        """Give a chunk's bytes, None when it isn't held."""
        data = self.unread.get(chunk)
        return self.read.get(chunk) if data is None else data

    def touched(self, chunk: int) -> bool:
        """Count a chunk as read just now; False when it isn't held."""
        data = self.unread.pop(chunk)
        if data is None:
            data = self.read.pop(chunk)
        if data is None:
            return False
        self.read.put(chunk, data)
        return True

    def shed(self, size: int, *, unread_too: bool) -> Iterator[int]:
        """Give up chunks until they had `size` bytes together, or there are none; yield the bytes of each."""
        while size > 0 and (self.read or (unread_too and self.unread)):
            pool, (chunk, data) = (self.read, self.read.first()) if self.read else (self.unread, self.unread.last())
            pool.pop(chunk)
            size -= len(data)
            yield len(data)
