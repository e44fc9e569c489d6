"""The process that workers are forked from, on its bad days."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.daemons import Daemon
from streamd.daemon.wire import wire_pair

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved


def test_a_spawner_whose_supervisor_dies_before_the_answer_ends_quietly() -> None:
    ours, its = wire_pair()
    ours_of_worker, its_of_worker = wire_pair()
    with its, ours_of_worker, its_of_worker:
        process = subprocess.Popen(
            [sys.executable, "-m", "streamd.daemon.spawner", str(its.fileno())],
            stderr=subprocess.PIPE,
            pass_fds=[its.fileno()],
        )
        socket.send_fds(ours, [b"{}"], [its_of_worker.fileno()])
        ours.close()
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


def test_a_spawner_that_hangs_is_replaced_and_the_image_gets_its_worker(
    daemon: Daemon, saved: "Saved", calm: Callable[[Daemon], None]
) -> None:
    image = daemon.image(saved.slow(8))
    reader = image.reader(saved.pages)
    image.until_open(reader)
    hanging = daemon.spawner_pid()
    daemon.send(hanging, signal.SIGSTOP)
    image.kill_worker()
    daemon.tape.until("worker-replaced", image=image.id)
    assert saved.is_whole(reader.outcome())
    assert daemon.spawner_pid() != hanging
    calm(daemon)
