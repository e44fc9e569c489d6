"""front.c, compiled: `python -m agent.wrapper.building OUTPUT`, which setup does for `streamd-runsc` beside `streamd`.

The result is static, and finds its Python part at the place that it has now. Its configuration's path is fixed when it
is compiled, because a runtime can't trust the environment that it is called with.
"""

import os
import subprocess
import sys
from pathlib import Path

from agent.errors import AgentError

CONFIG = Path("/etc/streamd/runsc.toml")
_SOURCE = Path(__file__).with_name("front.c")


class CantBuild(AgentError):
    """The compiler refused, or isn't there."""


def build(output: Path, *, config: Path = CONFIG) -> Path:
    """Compile the wrapper into `output`, which is replaced at once. Raises: `CantBuild`."""
    # The interpreter itself: it needs none of the environment's packages, and a shim would cost 0.2 s.
    interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    values = {"CONFIG": config, "PYTHON": interpreter, "PACKAGES": _SOURCE.parents[2]}
    defines = [f'-D{name}="{_c_string(str(value))}"' for name, value in values.items()]
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-static"]
    try:
        done = subprocess.run(
            ["gcc", *flags, *defines, "-o", temporary, _SOURCE], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise CantBuild(f"gcc: {error.strerror}") from error
    if done.returncode:
        raise CantBuild(f"{_SOURCE} can't be compiled:\n{done.stderr}")
    temporary.replace(output)
    return output


def _c_string(text: str) -> str:
    """Give what a C string holds between its quotes, and what a Python string in it does too. Raises: `CantBuild`."""
    if not text.isprintable() or set(text) & set("\"'\\"):
        raise CantBuild(f"{text!r} can't be a path of the wrapper's")
    return text


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]))
    except CantBuild as error:
        sys.exit(str(error))
