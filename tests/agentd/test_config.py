"""The agent's settings: what the module's text shows is what is read, and every problem is told at once."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from agent import config
from agent.config import Config, ConfigError, StoreCredentials, load, parse


def test_the_documented_file_is_the_defaults() -> None:
    assert config.__doc__ is not None
    lines = [line.removeprefix("    ") for line in config.__doc__.splitlines() if line.startswith("    ")]
    found = parse(tomllib.loads("\n".join(lines)), source="documented")
    defaults = parse({}, source="empty")
    assert found.runtime.roots == (Path("/run/containerd/runsc/k8s.io"),)
    assert defaults.runtime.roots == Config().runtime.roots
    named = StoreCredentials(namespace="shop", bucket="snapshots", given={"token_file": "/run/tokens/shop"})
    assert (found.credentials, defaults.credentials) == ((named,), ())
    for name in Config.__dataclass_fields__:
        if name not in ("runtime", "credentials"):
            assert getattr(found, name) == getattr(defaults, name), name


def test_every_key_that_is_read_is_documented() -> None:
    assert config.__doc__ is not None
    read = set()
    for node in ast.walk(ast.parse(Path(config.__file__).read_text())):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("text", "texts", "choice", "boolean", "member", "members", "take"):
                key = node.args[0]
            elif name in ("_path", "_duration_s"):
                key = node.args[1]
            else:
                continue
            if isinstance(key, ast.Constant):
                read.add(key.value)
    documented = re.findall(r"^    (?:(?:# )?(\w+) = |\[\[?(\w+)\])", config.__doc__, re.MULTILINE)
    assert read == {key or table for key, table in documented}


def test_a_mistyped_key_is_told_what_was_meant() -> None:
    with pytest.raises(ConfigError, match="objects_dir: is not a known field; did you mean objects_directory"):
        parse({"objects_dir": "/x"}, source="x.toml")


def test_all_problems_are_reported_at_once() -> None:
    document = {
        "log_level": "loud",
        "objects_directory": "relative",
        "surprise": 1,
        "runtime": {"network": "bridge", "roots": ["relative"], "extra": True},
        "deadlines": {"image": "soon", "load": 0},
    }
    with pytest.raises(ConfigError) as caught:
        parse(document, source="x.toml")
    fields = {re.split(r"[:\[]", problem)[0] for problem in caught.value.problems}
    assert fields == {
        "log_level",
        "objects_directory",
        "surprise",
        "runtime.network",
        "runtime.roots",
        "runtime.extra",
        "deadlines.image",
        "deadlines.load",
    }


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= x")
    with pytest.raises(ConfigError, match="not TOML"):
        load(tmp_path / "bad.toml")
