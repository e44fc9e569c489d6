"""libfuse's session on a connection that is mounted already."""

import pyfuse3

from streamd.fuse.mounting import FuseMount
from streamd.fuse.operations import Operations
from streamd.serve.image import ServedImage

# runsc has 128 reads in flight for each restore; a second restore, an `ls`, a `stat` must still find a task. More are
# made when none is idle, and end when more than this are: while the store is down, the reads of every sandbox that
# restores from this mount hold one each, 32 sandboxes' here.
_TASKS_KEPT = 320
_TASKS_MAX = 32 * 128 + 64


def begin(image: ServedImage, mount: FuseMount) -> None:
    """Take over the mount's descriptor and answer the kernel's INIT once `serve` runs. One session a process."""
    pyfuse3.init(Operations(image), f"/dev/fd/{mount.fd}", set())


async def serve() -> None:
    """Answer requests until the kernel ends the connection and the last handler has returned."""
    await pyfuse3.main(min_tasks=_TASKS_KEPT, max_tasks=_TASKS_MAX)


def end() -> None:
    """Free what libfuse holds; the mount is gone by now, or whoever mounted it takes it away."""
    pyfuse3.close(unmount=False)
