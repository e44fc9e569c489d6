"""One mount's session: our loop for reads, libfuse for everything else, on a connection that is mounted already."""

import pyfuse3
import trio

from streamd.fuse.connection import Connection
from streamd.fuse.operations import Operations
from streamd.serve.image import ServedImage

# Tasks of libfuse's side: nothing that it answers waits for anything, but for a process's command line (`open`).
_TASKS_KEPT = 4
_TASKS_MAX = 64


class Session:
    """Serves a mount. One a process: libfuse's session is global in pyfuse3."""

    def __init__(self, image: ServedImage, device_fd: int, *, init: bytes | None = None) -> None:
        """Serve a mount's descriptor; the kernel's INIT, or the one that was kept, is answered once `serve` runs."""
        self._connection = Connection(image, device_fd, init=init)
        pyfuse3.init(Operations(image), f"/dev/fd/{self._connection.library_fd}", set())

    async def serve(self) -> None:
        """Answer requests until the kernel ends the connection."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._library)
            await self._connection.serve()
            nursery.cancel_scope.cancel()

    async def _library(self) -> None:
        await pyfuse3.main(min_tasks=_TASKS_KEPT, max_tasks=_TASKS_MAX)

    def let_go(self) -> None:
        """Read and answer nothing any more: from now on the connection is another process's."""
        self._connection.let_go()

    def end(self) -> None:
        """Free what libfuse holds; the mount is gone by now, or whoever mounted it takes it away."""
        pyfuse3.close(unmount=False)
        self._connection.close()
