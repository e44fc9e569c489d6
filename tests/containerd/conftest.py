"""A real containerd whose runc is the wrapper, over the real runsc, and an agent that answers as it is told."""

import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.wrapper.building import build
from bench.containerd import Containerd
from bench.pods import runsc_binary


@dataclass(slots=True)
class Node:
    """containerd, and what the wrapper of its runtime asks and is answered.

    `answer` is called with each question; `questions` are all of them, in order.
    """

    containerd: Containerd
    answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    questions: list[dict[str, Any]] = field(default_factory=list)

    def reports(self) -> list[tuple[str, int]]:
        """Give whose restores were reported, and how they ended."""
        found = [question for question in self.questions if question["request"] == "report"]
        return [(report["container"]["container_id"], report["exit_code"]) for report in found]

    def serve(self, listener: socket.socket) -> None:
        """Be the agent until the listener is shut down; while there is no `answer` it says nothing and hangs up."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    question = json.loads(connection.makefile("rb").readline())
                    self.questions.append(question)
                    if self.answer is not None:
                        answer = {"version": 1, **self.answer(question)}
                        connection.sendall(json.dumps(answer).encode() + b"\n")


@pytest.fixture
def node() -> Iterator[Node]:
    """Give a containerd of this test's own, to be entered."""
    # A short name: there are Unix sockets in it.
    with tempfile.TemporaryDirectory(prefix="containerd-", dir="/var/tmp") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        config = directory / "runsc.toml"
        config.write_text(
            f'runsc = "{runsc_binary()}"\nagent_socket = "{directory}/agent.sock"\n'
            f'run_directory = "{directory}/run"\nlog_socket = "{directory}/log.sock"\n'
        )
        wrapper = build(directory / "streamd-runsc", config=config)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(directory / "agent.sock"))
        listener.listen()
        node = Node(Containerd(directory, wrapper))
        thread = threading.Thread(target=node.serve, args=(listener,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(listener.shutdown, socket.SHUT_RDWR)
        yield node
