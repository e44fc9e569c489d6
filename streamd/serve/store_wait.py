"""Since when nothing has come of what the store is asked for: it doesn't answer, or refuses. Pure."""


class StoreWait:
    """Looks now and then. Whatever comes ends the wait, a wrong byte too: then it isn't the store that is away."""

    def __init__(self) -> None:
        self._received_bytes = 0
        self._since_s: float | None = None

    def look(self, now_s: float, *, received_bytes: int, is_asked: bool) -> None:
        """Note what has come so far, and whether something is under way or to be asked for again."""
        if received_bytes != self._received_bytes or not is_asked:
            self._received_bytes = received_bytes
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def seconds(self, now_s: float) -> float:
        """Say how long the wait has been so far; 0 when there is none."""
        return 0.0 if self._since_s is None else now_s - self._since_s
