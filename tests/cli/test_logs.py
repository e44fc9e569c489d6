"""Logs: lines a machine can read, in files that stay small, without secrets."""

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from streamd.errors import Refused
from streamd.logs import BoundedLog, configure


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = before


def test_a_line_is_one_json_object_with_time_level_and_facts() -> None:
    out = io.StringIO()
    configure("info", log=out)
    structlog.get_logger().info("chunk fetched", took_ms=12, path=Path("/a"))
    structlog.get_logger().debug("not asked for")
    [line] = out.getvalue().splitlines()
    record = json.loads(line)
    assert (record["event"], record["level"], record["took_ms"], record["path"]) == ("chunk fetched", "info", 12, "/a")
    assert record["timestamp"].endswith("Z")


def test_an_exception_stays_on_its_line() -> None:
    out = io.StringIO()
    configure("info", log=out)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        structlog.get_logger().exception("handler failed")
    [line] = out.getvalue().splitlines()
    assert "ZeroDivisionError" in json.loads(line)["exception"]


@pytest.mark.parametrize("key", ["token", "access_token", "Authorization", "password", "client_secret", "environ"])
def test_a_value_that_is_named_like_a_secret_is_hidden(key: str) -> None:
    out = io.StringIO()
    configure("info", log=out)
    structlog.get_logger().info("asked", **{key: "hunter2"})
    assert "hunter2" not in out.getvalue()


def test_what_libraries_say_from_warnings_up_is_in_the_log_too() -> None:
    out = io.StringIO()
    configure("debug", log=out)
    logging.getLogger("urllib3").warning("pool %s is full", 3)
    logging.getLogger("urllib3").info("not asked for")
    [line] = out.getvalue().splitlines()
    assert json.loads(line)["event"] == "pool 3 is full"


def test_a_log_never_grows_beyond_its_bound_and_loses_only_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = BoundedLog(path, max_bytes=1000)
    for number in range(500):
        log.write(f"line {number:04}\n")
    log.close()
    older = tmp_path / "a.log.1"
    assert sorted(tmp_path.iterdir()) == [path, older]
    assert path.stat().st_size <= 1000
    assert older.stat().st_size <= 1000
    lines = (older.read_text() + path.read_text()).splitlines()
    assert lines == [f"line {number:04}" for number in range(500 - len(lines), 500)]
    assert len(lines) >= 100
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_goes_on_where_a_former_process_left_it(tmp_path: Path) -> None:
    for text in ("first\n", "second\n"):
        log = BoundedLog(tmp_path / "a.log")
        log.write(text)
        log.close()
    assert (tmp_path / "a.log").read_text() == "first\nsecond\n"


def test_a_log_is_not_written_through_what_others_planted(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(Refused, match="belongs to uid 65534"):
        BoundedLog(tmp_path / "theirs" / "a.log")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "a.log").symlink_to("victim")
    with pytest.raises(OSError, match="symbolic"):
        BoundedLog(tmp_path / "a.log")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_log_stays_in_its_directory_when_that_is_moved(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = BoundedLog(tmp_path / "logs" / "a.log", max_bytes=10)
    (tmp_path / "logs").rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").symlink_to("elsewhere")
    for number in range(3):
        log.write(f"line {number}\n")
    log.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "moved" / "a.log").read_text() == "line 2\n"


def test_a_log_that_cannot_be_written_loses_lines_and_nothing_else() -> None:
    log = BoundedLog(Path("/dev/full"))
    assert log.write("lost\n") == 5
    log.close()
    assert log.write("lost as well\n") == 13
