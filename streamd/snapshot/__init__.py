"""What a snapshot is: gVisor's file formats, and ours. Pure: no file, clock, thread or network is touched here."""

from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
