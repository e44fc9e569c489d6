"""The buffer from which the kernel copies replies.

pyfuse3 writes a reply in the same step in which the handler returns it, and nothing else runs on the Trio thread in
between, so one buffer serves every read that is put together from pieces or from the cache file. It is page-aligned
(unaligned ones cost a third of the throughput) and every page of it was touched, so that the copy can't fail (design
§5).
"""

import mmap

# The kernel's largest read: 256 pages (fs.fuse.max_pages_limit), runsc asks for 256 KiB at most.
REPLY_BYTES_MAX = 1 << 20


class ReplyBuffer:
    """One reply at a time: what `view` gave is valid until the next `view`, so nothing may be awaited before its
    use."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, REPLY_BYTES_MAX, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        for page in range(0, REPLY_BYTES_MAX, mmap.PAGESIZE):
            self._memory[page] = 0

    def view(self, size: int) -> memoryview:
        """Give the first `size` bytes to fill; a size that no kernel asks for gets memory of its own."""
        return self._view[:size] if size <= REPLY_BYTES_MAX else memoryview(bytearray(size))
