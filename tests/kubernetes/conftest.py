"""One real control plane for all tests in here, with our kinds applied, and a namespace for each test."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.control_plane import ControlPlane

_BASE = Path(__file__).parents[2] / "deploy" / "base"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """Start etcd and an API server; no controllers."""
    with ControlPlane() as running:
        running.apply(_BASE)
        yield running


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    """Make a namespace, with its default service account."""
    name = f"test-{next(_numbers)}"
    plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    plane.make_service_account(name, "default")
    return name
