"""One accountant for all image bytes that a worker holds in memory. Pure.

Counted: what a fetch under way will deliver, and what was delivered and is not in the cache file yet (or never will
be). Not counted: a reply while it is copied to the kernel. One demand read can always be granted, so a cap that is too
small slows everything down and fails nothing.
"""


class Accountant:
    """Bytes held against a cap; prefetch stops `reserve_bytes` before it, demand at it."""

    def __init__(self, cap_bytes: int, *, reserve_bytes: int) -> None:
        if not 0 <= reserve_bytes <= cap_bytes:
            raise ValueError(f"reserve {reserve_bytes} is not within the cap {cap_bytes}")
        self.cap_bytes = cap_bytes
        self.reserve_bytes = reserve_bytes
        self.held_bytes = 0
        self.peak_bytes = 0
        self._demand_fetches = 0

    def has_room_ahead(self, size: int) -> bool:
        """Whether work that nobody has asked for may take `size` bytes."""
        return self.held_bytes + size <= self.cap_bytes - self.reserve_bytes

    def has_room_for_demand(self, size: int) -> bool:
        """Whether a read that somebody waits for may take `size` bytes; the only one always may."""
        return self._demand_fetches == 0 or self.held_bytes + size <= self.cap_bytes

    def shortage_ahead(self, size: int) -> int:
        """Bytes to give back first, if that can be done, so that prefetch may take `size`."""
        return max(0, self.held_bytes + size - (self.cap_bytes - self.reserve_bytes))

    def shortage_for_demand(self, size: int) -> int:
        """Bytes to give back first, if that can be done, so that `size` more stay within the cap."""
        return max(0, self.held_bytes + size - self.cap_bytes)

    def start_demand(self) -> None:
        """Count a demand fetch under way."""
        self._demand_fetches += 1

    def end_demand(self) -> None:
        """Count a demand fetch as ended."""
        assert self._demand_fetches > 0
        self._demand_fetches -= 1

    def take(self, size: int) -> None:
        """Hold `size` more bytes."""
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def give(self, size: int) -> None:
        """Hold `size` bytes less."""
        assert size <= self.held_bytes, "gave more than was taken"
        self.held_bytes -= size
