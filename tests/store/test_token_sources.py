"""Tokens from files and from commands: what is believed, what is refused, and that no text ever has one."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.config import ConfigError
from streamd.errors import StoreError, StoreErrorKind
from streamd.store import token_command
from streamd.store.identity import Identity
from streamd.store.token_command import CommandFailed, run_command
from streamd.store.token_sources import (
    COMMAND_AGAIN_S,
    FILE_AGAIN_S,
    TOKEN_BYTES_MAX,
    CommandToken,
    FileToken,
    Token,
    TokenSource,
    parse_credentials,
)

K = StoreErrorKind
TOKEN = "ya29.c.SECRET-secret_0123456789~AAAA+/=="
WRITTEN_S = 1_700_000_000.0


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., FileToken]:
    """Writes a token file, 0600 and changed at `WRITTEN_S`, and gives the source that reads it `age_s` later."""

    def write(content: str | bytes | dict[str, Any], *, mode: int = 0o600, age_s: float = 0.0) -> FileToken:
        path = tmp_path / "token"
        data = json.dumps(content) if isinstance(content, dict) else content
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        path.chmod(mode)
        os.utime(path, (WRITTEN_S, WRITTEN_S))
        return FileToken(str(path), wall_clock=lambda: WRITTEN_S + age_s)

    return write


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a program, and gives its path."""

    def script(text: str, *, interpreter: str = "/bin/sh", mode: int = 0o700) -> str:
        path = tmp_path / "program"
        path.write_text(f"#!{interpreter}\n{textwrap.dedent(text)}")
        path.chmod(mode)
        return str(path)

    return script


def refused(source: TokenSource) -> StoreError:
    """The error of a fetch, whose whole traceback has no token."""
    with pytest.raises(StoreError) as caught:
        source.fetch()
    texts = [*traceback.format_exception(caught.value), repr(source), repr(vars(caught.value)), repr(caught.value)]
    assert not [text for text in texts if "SECRET" in text]
    return caught.value


def iso(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).isoformat()


@pytest.mark.parametrize("content", [TOKEN, f"{TOKEN}\n", f"  {TOKEN}\r\n"])
def test_a_bare_token_is_good_until_the_file_says_otherwise(write: Callable[..., FileToken], content: str) -> None:
    assert write(content).fetch() == Token(TOKEN, None, FILE_AGAIN_S)


@pytest.mark.parametrize(
    ("fields", "expires_in_s"),
    [
        ({}, None),
        ({"expires_in": 3600}, 3000.0),
        ({"expires_in": "3600"}, 3000.0),
        ({"expires_in": None}, None),
        ({"expiry": iso(WRITTEN_S + 900)}, 300.0),
        ({"expiry": iso(WRITTEN_S + 900).replace("+00:00", "Z")}, 300.0),
        ({"expiry": iso(WRITTEN_S + 900).replace("+00:00", "")}, 300.0),
        ({"expire_time": WRITTEN_S + 900}, 300.0),
        ({"expires_in": 3600, "expire_time": WRITTEN_S + 900, "token_type": "Bearer"}, 300.0),
        ({"expires_in": 60}, -540.0),
    ],
)
def test_json_says_when_the_token_ends(
    write: Callable[..., FileToken], fields: dict[str, Any], expires_in_s: float | None
) -> None:
    token = write({"access_token": TOKEN} | fields, age_s=600).fetch()
    assert token == Token(TOKEN, expires_in_s, FILE_AGAIN_S)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("{", "JSON that can't be read"),
        (f'{{"access_token": "{TOKEN}"', "JSON that can't be read"),
        ("{" * 9000, "JSON that can't be read"),
        ({"token": TOKEN}, "without an access_token"),
        ({"access_token": 7}, "without an access_token"),
        ({"access_token": ""}, "is empty"),
        (f"{TOKEN}\nX-Other: header", "not a token"),
        (f"{TOKEN} x", "not a token"),
        (b"\xff\xfe" + TOKEN.encode(), "not a token"),
        (f'["{TOKEN}"]', "not a token"),
        ({"access_token": TOKEN, "expiry": "tomorrow"}, "expiry can't be read"),
        ({"access_token": TOKEN, "expires_in": True}, "expires_in can't be read"),
        ({"access_token": TOKEN, "expires_in": float("inf")}, "expires_in can't be read"),
        ({"access_token": TOKEN, "expire_time": 10**300}, "expire_time can't be read"),
        ("x" * (TOKEN_BYTES_MAX + 1), f"more than {TOKEN_BYTES_MAX}"),
    ],
)
def test_what_is_no_token_is_refused_and_not_repeated(
    write: Callable[..., FileToken], content: str | bytes, said: str
) -> None:
    error = refused(write(content))
    assert error.store_kind is K.CREDENTIALS
    assert said in str(error)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620])
def test_a_file_that_others_can_read_or_change_is_refused(write: Callable[..., FileToken], mode: int) -> None:
    assert "by others" in str(refused(write(TOKEN, mode=mode)))


def test_a_file_that_its_group_can_read_is_believed(write: Callable[..., FileToken]) -> None:
    assert write(TOKEN, mode=0o640).fetch().value == TOKEN


def test_a_file_of_another_user_is_refused(write: Callable[..., FileToken]) -> None:
    source = write(TOKEN)
    os.chown(source.path, 65534, 65534)
    assert "belongs to another user" in str(refused(source))


def test_a_file_in_whose_place_others_can_put_another_is_refused_as_soon_as_they_can(
    write: Callable[..., FileToken], tmp_path: Path
) -> None:
    source = write(TOKEN)
    assert source.fetch().value == TOKEN
    tmp_path.chmod(0o777)
    assert f"{tmp_path} is writable by everybody" in str(refused(source))


def test_a_file_of_a_volume_of_kubernetes_is_believed(tmp_path: Path) -> None:
    """Its directory is everybody's, and sticky; `..data` is a symlink that is replaced whenever the token is."""
    tmp_path.chmod(0o1777)
    (tmp_path / "..2026").mkdir(mode=0o755)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "..data" / "token").touch(mode=0o600)
    (tmp_path / "..data" / "token").write_text(TOKEN)
    assert FileToken(f"{tmp_path}/..data/token").fetch().value == TOKEN


def test_what_is_not_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(TOKEN)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, said in [("link", "symbolic"), ("fifo", "is not a file"), (".", "is not a file"), ("none", "No such")]:
        assert said in str(refused(FileToken(f"{tmp_path}/{name}")))


def test_a_file_is_read_anew_at_every_fetch(write: Callable[..., FileToken]) -> None:
    source = write("first")
    assert source.fetch().value == "first"
    Path(source.path).write_text("second")
    os.utime(source.path, (WRITTEN_S, WRITTEN_S))
    assert source.fetch().value == "second", "though its size and times say that it is the same"


def test_an_identity_follows_its_file_and_survives_that_it_is_missing(write: Callable[..., FileToken]) -> None:
    source = write("first")
    now_s = [0.0]
    mine = Identity(source, clock=lambda: now_s[0], draw=lambda: 0.5, in_background=lambda call: call())
    assert (mine.fresh(), mine.epoch) == ("first", 1)
    Path(source.path).unlink()
    now_s[0] = FILE_AGAIN_S + 1
    assert mine.fresh() == "first"
    write("second")
    now_s[0] += 1
    mine.fresh()
    assert (mine.fresh(), mine.epoch) == ("second", 2)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_token_or_an_error(data: bytes) -> None:
    fd = os.memfd_create("token")
    os.fchmod(fd, 0o600)
    os.write(fd, data)

    class Held(FileToken):
        def _read(self) -> tuple[bytes, os.stat_result, bool]:
            return data, os.fstat(fd), True

    try:
        token = Held("/held").fetch()
        assert token.value.isascii()
        assert not set(token.value) & set(" \t\r\n\0")
    except StoreError:
        pass
    finally:
        os.close(fd)


# Commands


def test_a_command_prints_a_token_or_json(script: Callable[..., str]) -> None:
    assert CommandToken([script(f"echo '{TOKEN}'")]).fetch() == Token(TOKEN, None, COMMAND_AGAIN_S)
    path = script(f"""echo '{{"access_token": "{TOKEN}", "expires_in": 100}}'""")
    times = iter([50.0, 53.0])
    token = CommandToken([path], wall_clock=lambda: next(times)).fetch()
    assert token == Token(TOKEN, 97.0, None), "its life counts from when the command was started"


def test_a_command_gets_its_arguments_and_nothing_of_ours(
    script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "x")
    program = """
        import json, os, sys
        descriptors = os.listdir("/proc/self/fd")
        facts = [sys.argv[1:], sorted(os.environ), os.getcwd(), sys.stdin.read(), descriptors]
        print(json.dumps(facts + [os.getsid(0), os.getpid(), os.umask(0)]))
    """
    read_fd, write_fd = os.pipe()
    os.set_inheritable(read_fd, True)
    try:
        path = script(program, interpreter=f"{sys.executable} -IS")
        output = run_command([path, "a b", "$(id)"], output_bytes_max=4096)
    finally:
        os.close(read_fd)
        os.close(write_fd)
    arguments, environment, directory, stdin, descriptors, session, pid, umask = json.loads(output)
    assert arguments == ["a b", "$(id)"]
    assert set(environment) <= {"PATH", "LANG", "LC_CTYPE"}
    assert (directory, stdin, session, umask) == ("/", "", pid, 0o077)
    assert set(descriptors) <= {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("exit 3", K.CREDENTIALS, "ended with exit code 3"),
        ("echo not today >&2; echo more >&2; exit 1", K.CREDENTIALS, "ended with exit code 1: not today"),
        ("exit 75", K.TRANSIENT, "ended with exit code 75"),
        ("kill -9 $$", K.CREDENTIALS, "was killed by signal 9"),
        ("true", K.CREDENTIALS, "is empty"),
        (f"echo {TOKEN}; echo {TOKEN} >&2; exit 1", K.CREDENTIALS, "exit code 1: [redacted]"),
        ("echo Bearer SECRET >&2; exit 1", K.CREDENTIALS, "[redacted]"),
        ("echo 'key=SECRETSECRETSECRETSECRETSECRET' >&2; exit 1", K.CREDENTIALS, "[redacted]"),
        ("""echo '{"access_token": "SECRETLY"}'; echo 'bad "SECRETLY"' >&2; exit 1""", K.CREDENTIALS, "bad"),
        ("printf 'a\\033[31mred' >&2; exit 1", K.CREDENTIALS, "a[31mred"),
        ("head -c 20000 /dev/zero | tr '\\0' x", K.CREDENTIALS, f"more than {TOKEN_BYTES_MAX}"),
    ],
)
def test_a_command_that_fails_is_told_of_without_its_secrets(
    script: Callable[..., str], text: str, kind: StoreErrorKind, said: str
) -> None:
    error = refused(CommandToken([script(text), "--key=SECRET"]))
    assert error.store_kind is kind
    assert said in str(error)


def test_a_command_that_writes_without_end_is_stopped(script: Callable[..., str]) -> None:
    with pytest.raises(CommandFailed, match=r"did not end within 0\.5 s"):
        run_command([script("exec cat /dev/zero")], output_bytes_max=100, timeout_s=0.5)


def test_a_command_that_hangs_is_killed_with_all_that_it_started(script: Callable[..., str], tmp_path: Path) -> None:
    path = script(f"sleep 300 & echo $! > {tmp_path}/child; echo waiting >&2; wait")
    with pytest.raises(CommandFailed, match="did not end within 1 s: waiting") as caught:
        run_command([path], output_bytes_max=100, timeout_s=1)
    assert caught.value.is_transient
    assert has_ended(int((tmp_path / "child").read_text()))


def test_what_a_command_leaves_running_is_neither_waited_for_nor_left(
    script: Callable[..., str], tmp_path: Path
) -> None:
    path = script(f"sleep 300 & echo $! > {tmp_path}/child; echo {TOKEN}")
    assert run_command([path], output_bytes_max=100).decode().strip() == TOKEN
    assert has_ended(int((tmp_path / "child").read_text()))


def has_ended(pid: int) -> bool:
    """Wait for the end of a process that isn't our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        import select

        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(10_000))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(fd)


def children() -> set[str]:
    """This process's children, ended or not (other tests' servers are among them)."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_no_child_and_no_descriptor_is_left(script: Callable[..., str]) -> None:
    before, children_before = set(os.listdir("/proc/self/fd")), children()
    for text in ("echo x", "exit 1"):
        with suppress(CommandFailed):
            run_command([script(text)], output_bytes_max=100)
    with pytest.raises(CommandFailed, match="can't be run: No such file"):
        run_command(["/nonexistent/program"], output_bytes_max=100)
    assert set(os.listdir("/proc/self/fd")) == before
    assert children() == children_before


def test_a_program_that_others_can_change_is_not_run(script: Callable[..., str]) -> None:
    path = script("echo x", mode=0o722)
    with pytest.raises(CommandFailed, match="changed by other users"):
        run_command([path], output_bytes_max=100)
    os.chmod(path, 0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(CommandFailed, match="changed by other users"):
        run_command([path], output_bytes_max=100)
    os.chown(path, 0, 0)
    os.chmod(Path(path).parent, 0o777)
    with pytest.raises(CommandFailed, match=r"changed by other users: .* is writable by everybody"):
        run_command([path], output_bytes_max=100)
    with pytest.raises(CommandFailed, match="is not a program"):
        run_command(["/tmp"], output_bytes_max=100)


# What a mount asks for


def test_a_mount_names_a_file_a_command_or_nothing() -> None:
    assert parse_credentials(None) is None
    assert repr(parse_credentials({"token_file": "/run/t"})) == "token file '/run/t'"
    assert repr(parse_credentials({"command": ["/bin/x", "--key=SECRET"]})) == "token command '/bin/x'"


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"token_file": "relative"},
        {"token_file": TOKEN},
        {"token_file": 7},
        {"token_file": "/a\0b"},
        {"token_file": "/a", "command": ["/b"]},
        {"token_file": "/a", "other": TOKEN},
        {"token": TOKEN},
        {TOKEN: "x"},
        {"command": []},
        {"command": ["relative"]},
        {"command": "/bin/x"},
        {"command": ["/bin/x", 7]},
        {"command": ["/bin/x", "a\0b"]},
        {"command": ["/bin/x"], "shell": True},
    ],
)
def test_a_mistake_is_named_and_no_value_repeated(spec: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_credentials(spec)
    assert "SECRET" not in str(caught.value)
    assert "/bin/x" not in str(caught.value)
    assert len(caught.value.problems) == 1


def test_the_sources_need_no_client_of_googles() -> None:
    """A worker's start must not wait for their imports."""
    program = (
        "import sys, streamd.store.token_sources; print(any(name.startswith('google.auth') for name in sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output == "False\n"
    assert token_command.TIMEOUT_S <= 10
