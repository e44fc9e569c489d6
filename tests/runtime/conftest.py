"""The runsc of this machine, for tests that hold our words against its own."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def runsc_binary() -> Path:
    """Give the runsc that `setup.sh` chose, or $RUNSC."""
    found = Path(os.environ.get("RUNSC") or Path(__file__).parents[2] / ".tools" / "runsc")
    assert found.exists(), f"{found}: no runsc there; ./setup.sh makes one"
    return found
