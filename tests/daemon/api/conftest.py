"""A running API, and one without a server."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from streamd.daemon.api.limits import Limits
from streamd.daemon.api.server import Allowed
from tests.daemon.api.fake_node import FakeNode, InProcess, Running

Run = Callable[..., Running]


@pytest.fixture
def api() -> InProcess:
    """The application without a server."""
    return InProcess()


@pytest.fixture
def run() -> Iterator[Run]:
    """Start APIs with limits of the test's; all have ended afterwards."""
    with ExitStack() as stack:

        def start(
            limits: Limits | None = None, allowed: Allowed | None = None, node: FakeNode | None = None
        ) -> Running:
            # A short path: a Unix socket's has 107 bytes at most.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="api-")))
            return stack.enter_context(Running(directory, limits or Limits(), allowed or Allowed(), node).started())

        yield start


@pytest.fixture
def running(run: Run) -> Running:
    """An API on a socket, with the limits as they are."""
    return run()
