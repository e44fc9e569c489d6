"""The runsc of this machine, for tests that hold our words against its own."""

from pathlib import Path

import pytest

from bench import pods


@pytest.fixture(scope="session")
def runsc_binary() -> Path:
    """Give the runsc that `setup.sh` chose, or $RUNSC."""
    return pods.runsc_binary()
