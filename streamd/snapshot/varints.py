"""A cursor over bytes with base-128 varints, which protobuf and gVisor's state encoding have in common."""

from streamd.errors import Damaged
from streamd.snapshot import Buffer


class Cursor:
    """Reads from `data`, forward; `what` names the data in messages. Every method raises `Damaged` at the end."""

    def __init__(self, data: Buffer, what: str) -> None:
        self.data = bytes(data)
        self.at = 0
        self.what = what

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self.data) - self.at

    def uint(self) -> int:
        """Take an unsigned number below 2**64: 7 bits a byte, lowest first, in ten bytes at most."""
        value = shift = 0
        data, at = self.data, self.at
        if at < len(data) and data[at] < 0x80:  # most are
            self.at = at + 1
            return data[at]
        while True:
            if at == len(data):
                raise Damaged(f"{self.what}: cut short at byte {at}")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise Damaged(f"{self.what}: a number of more than ten bytes at byte {self.at}")
        if value >= 1 << 64:
            raise Damaged(f"{self.what}: a number beyond 64 bits at byte {self.at}")
        self.at = at
        return value

    def take(self, count: int) -> bytes:
        """Take `count` bytes."""
        if count > self.left:
            raise Damaged(f"{self.what}: cut short: {count} bytes at byte {self.at}, but {self.left} are left")
        taken = self.data[self.at : self.at + count]
        self.at += count
        return taken
