"""The process that workers are forked from: it has imported everything, and does nothing else.

    python -m streamd.daemon.spawner FD

A worker that takes over a mount must serve within the second, and a pod's cold start waits for its worker: an
interpreter with our imports takes half a second of CPU, a fork some milliseconds. FD is one end of a SOCK_SEQPACKET
pair: each message, with the worker's end of its conversation as a descriptor, is answered by `{"pid": …}` with a
descriptor of that process (pidfd_open(2)), or by `{"error": …}`. When the pair's other end has gone, it ends; workers
live on.

It is the supervisor's child and never mounts, opens or stats anything. One thread, and never a task: it must be able
to fork.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback

# Libraries that start threads when they are imported: a fork has only the one that forks.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import streamd.logs  # noqa: F401  (before anybody imports structlog, for its reason)
from streamd.daemon import allocator, hardening, worker

_MESSAGE_BYTES = 4096
# What is imported only where it is needed. A worker can't: its user may not reach the interpreter's files (in /root).
_LATE = ("streamd.store.directory", "streamd.store.gcs", "streamd.store.shaped", "encodings.idna")


def main(fd: int) -> int:
    """Fork workers until nobody can ask for one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers here
    hardening.name_process("streamd-spawner")
    for name in _LATE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is here stays shared with the forks
    allocator.give_back()
    asked = socket.socket(fileno=fd)
    asked.set_inheritable(False)
    with contextlib.suppress(ConnectionError):  # who asked has died before the answer
        _fork_for(asked)
    return 0


def _fork_for(asked: socket.socket) -> None:
    while True:
        message, ancillary, _, _ = asked.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i", b"".join(content for _, _, content in ancillary))
        if not message:
            return
        if not fds:
            continue
        pid = os.fork()
        if not pid:
            asked.close()
            _become_worker(fds[0])
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, fds[0])
            try:
                process_fd = os.pidfd_open(pid)
                stack.callback(os.close, process_fd)
            except OSError as error:  # it has ended already
                asked.send(json.dumps({"error": f"the worker has ended at once ({error.strerror})"}).encode())
                continue
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [process_fd]))]
            asked.sendmsg([json.dumps({"pid": pid}).encode()], rights)


def _become_worker(fd: int) -> None:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        hardening.name_process("streamd-worker")
        code = worker.main(socket.socket(fileno=fd))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
