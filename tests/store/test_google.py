"""What Google's store makes of answers, and of none: a real server that answers as it is told, through both clients."""

import base64
import contextlib
import errno
import gc
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import pytest

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.credentials import DefaultToken, Tokens, default_tokens
from streamd.store.gcs import PIECE_BYTES, GoogleStore, Timeouts, emulator_address
from streamd.store.google_errors import kind_of_status
from streamd.store.port import Condition, Store

if TYPE_CHECKING:
    from tests.store.conftest import Answer, Puppet
else:
    Answer = Puppet = Any

K = StoreErrorKind
IMPATIENT = Timeouts(connect_s=0.5, silence_s=0.5, body_s=20, write_s=0.5)
BODY = os.urandom(700_000)
N = len(BODY)

# status, body, what it means; the rows of the table that both clients share
STATUSES = [
    (301, "", K.FORBIDDEN),
    (400, "", K.FORBIDDEN),
    (401, "", K.CREDENTIALS),
    (403, "", K.FORBIDDEN),
    (403, "rateLimitExceeded", K.THROTTLED),
    (404, "", K.GONE),
    (405, "", K.FORBIDDEN),
    (408, "", K.TRANSIENT),
    (409, "", K.FORBIDDEN),
    (410, "", K.TRANSIENT),
    (412, "", K.CHANGED),
    (416, "", K.FORBIDDEN),
    (418, "", K.FORBIDDEN),
    (429, "", K.THROTTLED),
    (500, "", K.TRANSIENT),
    (502, "", K.TRANSIENT),
    (503, "", K.TRANSIENT),
    (503, "SlowDown", K.THROTTLED),
    (504, "", K.TRANSIENT),
    (599, "", K.TRANSIENT),
]
CALLS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: b"".join(store.read("k", generation="7", start=0, end=N)),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list("")),
    "put": lambda store: store.put("k", b"abc", condition=Condition.ABSENT),
    "put large": lambda store: store.put("k", bytes(9 << 20), condition=Condition.ABSENT),
    "delete": lambda store: store.delete("k", generation="7"),
}


@pytest.fixture
def answer(puppet: Puppet) -> type[Answer]:
    """The class of answers, which a test module can't import."""
    return puppet.answer


@pytest.fixture
def store(puppet: Puppet) -> Iterator[Store]:
    with contextlib.closing(GoogleStore("bucket", "p", emulator_host=puppet.address)) as store:
        yield store


@pytest.fixture
def impatient(puppet: Puppet) -> Iterator[Store]:
    """The same with short time-outs."""
    with contextlib.closing(GoogleStore("bucket", "p", emulator_host=puppet.address, timeouts=IMPATIENT)) as store:
        yield store


def refused(call: Callable[[], object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        call()
    return caught.value


def described(answer: type[Answer], generation: int = 7) -> Answer:
    """The answer to "describe the object"."""
    fields = {"name": "p/k", "size": str(N), "generation": str(generation), "crc32c": "AAAAAA=="}
    body = json.dumps({**fields, "updated": "2026-03-02T10:00:00.000Z"}).encode()
    return answer(status=200, body=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("status", "body", "kind"), STATUSES)
def test_the_table_classes_every_status(status: int, body: str, kind: StoreErrorKind) -> None:
    assert kind_of_status(status, body) is kind


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("status", "body", "kind"), STATUSES)
def test_each_call_asks_once_and_classes_the_answer_by_the_table(
    store: Store, puppet: Puppet, answer: type[Answer], name: str, status: int, body: str, kind: StoreErrorKind
) -> None:
    explained = f"<Error><Code>{body}</Code><Message>as told</Message></Error>"
    if name != "read":
        explained = json.dumps({"error": {"code": status, "message": "as told", "errors": [{"reason": body}]}})
    puppet.script = lambda *_: answer(status=status, body=explained.encode())
    error = refused(lambda: CALLS[name](store))
    assert error.store_kind is kind
    assert error.key == ("" if name == "list" else "k")
    # A 404 to a pinned read is told apart by one head, which gets the same answer here.
    assert len(puppet.requests) == (2 if (name, status) == ("read", 404) else 1)
    assert "127.0.0.1" not in str(error)
    if status >= 400 and body == "":
        assert str(status) in str(error)


def test_the_servers_explanation_is_in_the_message(store: Store, puppet: Puppet, answer: type[Answer]) -> None:
    text = "alice does not have storage.objects.get access"
    xml = f"<Error><Code>AccessDenied</Code><Message>Access denied.</Message><Details>{text}</Details></Error>"
    puppet.script = lambda *_: answer(status=403, body=xml.encode())
    assert str(refused(lambda: CALLS["read"](store))) == f"k: 403 Forbidden: {text}"
    told = {"error": {"code": 403, "message": text, "errors": [{"message": text, "reason": "forbidden"}]}}
    puppet.script = lambda *_: answer(
        status=403, body=json.dumps(told).encode(), headers={"Content-Type": "application/json"}
    )
    assert str(refused(lambda: CALLS["head"](store))) == f"k: 403 Forbidden: {text}"


@pytest.mark.parametrize("name", CALLS)
def test_silence_a_dropped_connection_and_a_refused_one_are_transient(
    impatient: Store, puppet: Puppet, answer: type[Answer], name: str
) -> None:
    for told in (answer(hang=True), answer(drop=True)):
        puppet.script = lambda *_, told=told: told
        puppet.requests.clear()
        assert refused(lambda: CALLS[name](impatient)).store_kind is K.TRANSIENT
        assert len(puppet.requests) == 1
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and doesn't listen
        host = f"127.0.0.1:{unused.getsockname()[1]}"
        with contextlib.closing(GoogleStore("bucket", emulator_host=host, timeouts=IMPATIENT)) as nobody:
            error = refused(lambda: CALLS[name](nobody))
            assert error.store_kind is K.TRANSIENT
            assert "ConnectionRefused" in str(error)


@pytest.mark.parametrize("name", ["read", "head"])
def test_a_name_that_is_not_found_is_transient(name: str) -> None:
    with contextlib.closing(GoogleStore("bucket", emulator_host="no-such-host.invalid", timeouts=IMPATIENT)) as store:
        assert refused(lambda: CALLS[name](store)).store_kind is K.TRANSIENT


NONSENSE = [
    "[]",
    "{}",
    "null",
    "3",
    '"x"',
    "[" * 100_000,
    '{"size":"x","generation":"7","updated":"2026-03-02T10:00:00Z"}',
    '{"size":"-5","generation":"7","updated":"2026-03-02T10:00:00Z"}',
    '{"size":"5","generation":"x","updated":"2026-03-02T10:00:00Z"}',
    '{"size":"5","generation":"7","updated":"x"}',
    '{"size":"5","generation":"7","updated":"2026-03-02T10:00:00Z","crc32c":"x"}',
    '{"size":"5","generation":"7"}',
]


@pytest.fixture
def no_collection_in_deep_recursion() -> Iterator[None]:
    """Finalizers that run at the recursion limit fail, whosever they are."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection_in_deep_recursion")
@pytest.mark.parametrize("body", NONSENSE, ids=lambda body: body[:60])
@pytest.mark.parametrize("name", ["head", "put", "put large", "list"])
def test_json_that_makes_no_sense_is_transient(
    store: Store, puppet: Puppet, answer: type[Answer], name: str, body: str
) -> None:
    if name == "list":
        body = f'{{"items":[{body}]}}'
    puppet.script = lambda *_: answer(status=200, body=body.encode(), headers={"Content-Type": "application/json"})
    assert refused(lambda: CALLS[name](store)).store_kind is K.TRANSIENT


@pytest.mark.parametrize("body", ["[]", "3", '"x"', '{"items":3}', '{"items":{"a":1}}', '{"items":[{"name":7}]}'])
def test_a_listing_that_makes_no_sense_is_transient(
    store: Store, puppet: Puppet, answer: type[Answer], body: str
) -> None:
    puppet.script = lambda *_: answer(status=200, body=body.encode(), headers={"Content-Type": "application/json"})
    assert refused(lambda: CALLS["list"](store)).store_kind is K.TRANSIENT


@pytest.mark.parametrize("body", ['{"error":"x"}', '{"error":["x"]}', '{"error":null}', "[]", "3", '"x"', "{}", "{"])
@pytest.mark.parametrize(("status", "kind"), [(401, K.CREDENTIALS), (403, K.FORBIDDEN), (404, K.GONE)])
@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_counts_whatever_comes_with_it(
    store: Store, puppet: Puppet, answer: type[Answer], name: str, status: int, kind: K, body: str
) -> None:
    puppet.script = lambda *_: answer(status=status, body=body.encode(), headers={"Content-Type": "application/json"})
    assert refused(lambda: CALLS[name](store)).store_kind is kind


@pytest.mark.parametrize(
    "text", ["Bearer ya29.secret", "Bearer: secret", "bearer%20secret", "access_token=secret", "Authorization: secret"]
)
def test_a_token_that_a_server_repeats_is_not_in_the_message(
    store: Store, puppet: Puppet, answer: type[Answer], text: str
) -> None:
    told = {"error": {"code": 403, "message": f"you sent {text} twice"}}
    xml = f"<Error><Message>you sent {text} twice</Message></Error>"
    puppet.script = lambda method, path, _: answer(
        status=403,
        body=(xml if "alt=media" in path else json.dumps(told)).encode(),
        headers={"Content-Type": "application/json"},
    )
    for name in CALLS:
        message = str(refused(lambda name=name: CALLS[name](store)))  # type: ignore[misc]
        assert "you sent [redacted] twice" in message
        assert "secret" not in message


@pytest.mark.parametrize("name", ["read", "head", "list", "put", "put large"])
def test_an_answer_that_makes_no_sense_is_transient(
    store: Store, puppet: Puppet, answer: type[Answer], name: str
) -> None:
    puppet.script = lambda *_: answer(status=200, body=b"<html>a proxy's sign-in page</html>")
    assert refused(lambda: CALLS[name](store)).store_kind is K.TRANSIENT


@pytest.mark.parametrize("sent", [0, 1, N // 2, N - 1])
@pytest.mark.parametrize("end", ["cut", "hang", "short"])
def test_a_body_that_ends_early_gives_what_came_and_then_is_transient(
    impatient: Store, puppet: Puppet, answer: type[Answer], sent: int, end: str
) -> None:
    told = answer(body=BODY, sent=sent, hang=end == "hang", announced=sent if end == "short" else None)
    puppet.script = lambda *_: told
    got = bytearray()

    def read() -> None:
        for piece in impatient.read("k", generation="7", start=0, end=N):
            got.extend(piece)

    assert refused(read).store_kind is K.TRANSIENT
    assert BODY.startswith(got)
    assert sent - len(got) < PIECE_BYTES  # whole pieces, and the rest of them is asked for again


@pytest.mark.parametrize("announced", [N, N + 1])
def test_a_body_that_is_too_long_is_cut(store: Store, puppet: Puppet, answer: type[Answer], announced: int) -> None:
    puppet.script = lambda *_: answer(body=BODY, sent=N + 1, announced=announced)
    assert CALLS["read"](store) == BODY


def test_bytes_are_given_out_while_the_rest_of_the_body_is_still_to_come(
    store: Store, puppet: Puppet, answer: type[Answer]
) -> None:
    puppet.script = lambda *_: answer(body=BODY, sent=PIECE_BYTES + 5000, hang=True)
    pieces = store.read("k", generation="7", start=0, end=N)
    got = b""
    while len(got) < PIECE_BYTES:
        got += bytes(next(pieces))
    assert BODY.startswith(got)
    pieces.close()  # type: ignore[attr-defined]


def test_a_read_asks_for_its_range_and_generation(store: Store, puppet: Puppet, answer: type[Answer]) -> None:
    puppet.script = lambda *_: answer(body=BODY)
    assert b"".join(store.read("k", generation="7", start=10, end=20)) == BODY[10:20]
    [(method, path, headers)] = puppet.requests
    assert (method, path) == ("GET", "/download/storage/v1/b/bucket/o/p%2Fk?alt=media&generation=7")
    assert headers["Range"] == "bytes=10-19"


def test_an_answer_of_another_generation_is_changed(store: Store, puppet: Puppet, answer: type[Answer]) -> None:
    puppet.script = lambda *_: answer(body=BODY, headers={"x-goog-generation": "8"})
    assert refused(lambda: CALLS["read"](store)).store_kind is K.CHANGED


@pytest.mark.parametrize(("generation", "kind"), [(8, K.CHANGED), (7, K.TRANSIENT)])
def test_a_pinned_read_that_finds_nothing_asks_what_is_there_now(
    store: Store, puppet: Puppet, answer: type[Answer], generation: int, kind: StoreErrorKind
) -> None:
    puppet.script = lambda method, path, number: described(answer, generation) if number else answer(status=404)
    assert refused(lambda: CALLS["read"](store)).store_kind is kind
    puppet.script = lambda method, path, number: answer(status=503 if "alt=media" not in path else 404)
    assert refused(lambda: CALLS["read"](store)).store_kind is K.TRANSIENT  # not known is not gone


@pytest.fixture
def uploads(puppet: Puppet, answer: type[Answer]) -> Callable[[str], list[bytes]]:
    """Make the server take uploads and describe them with a crc32c (base64); gives the bodies that come."""

    def take(crc: str) -> list[bytes]:
        bodies: list[bytes] = []

        def script(method: str, path: str, number: int) -> Answer:
            if "uploadType=resumable" in path:
                return answer(status=200, headers={"Location": f"{puppet.address}/session"})
            if method == "PUT" and number % 3 == 1:
                return answer(status=308, headers={"Range": f"bytes=0-{(8 << 20) - 1}"})
            told = described(answer)
            return answer(status=200, body=told.body.replace(b"AAAAAA==", crc.encode()), headers=told.headers)

        puppet.script = script
        puppet.on_body = bodies.append
        return bodies

    return take


SMALL, SMALL_CRC = b"abc", "Nks/tw=="
LARGE, LARGE_CRC = bytes(9 << 20), base64.b64encode(google_crc32c.value(bytes(9 << 20)).to_bytes(4, "big")).decode()


@pytest.mark.parametrize(("data", "crc"), [(SMALL, SMALL_CRC), (LARGE, LARGE_CRC)], ids=["at once", "in steps"])
def test_preconditions_and_checksums_go_with_an_upload(
    store: Store, puppet: Puppet, uploads: Callable[[str], list[bytes]], data: bytes, crc: str
) -> None:
    conditions: list[tuple[str | Condition, str]] = [(Condition.ABSENT, "0"), ("123", "123"), (Condition.ANY, "")]
    for condition, sent in conditions:
        puppet.requests.clear()
        bodies = uploads(crc)
        store.put("k", data, condition=condition)
        assert f"ifGenerationMatch={sent}" in puppet.requests[0][1] if sent else "if" not in puppet.requests[0][1]
        assert f'"crc32c": "{crc}"'.encode() in bodies[0]  # the object's description, which the store checks


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["at once", "in steps"])
def test_an_upload_that_the_store_sums_up_differently_is_corrupt_and_not_deleted_by_the_client(
    store: Store, puppet: Puppet, uploads: Callable[[str], list[bytes]], data: bytes
) -> None:
    uploads("AAAAAA==")
    error = refused(lambda: store.put("k", data, condition=Condition.ABSENT))
    assert error.store_kind is K.CORRUPT
    assert "DELETE" not in [method for method, _, _ in puppet.requests]


class FakeCredentials:
    """Credentials whose tokens are t1, t2, …; each stays valid until it is spoiled."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.valid = False
        self.refreshes = 0
        self.fail: Exception | None = None

    def refresh(self, request: Any) -> None:
        if self.fail:
            raise self.fail
        self.refreshes += 1
        self.token, self.valid = f"t{self.refreshes}", True


def signed(puppet: Puppet) -> tuple[FakeCredentials, GoogleStore]:
    credentials = FakeCredentials()
    tokens = Tokens(credentials, None)
    return credentials, GoogleStore("bucket", "p", emulator_host=puppet.address, tokens=tokens)


def sent_tokens(puppet: Puppet) -> list[str]:
    return [
        next((value for name, value in headers.items() if name.lower() == "authorization"), "")
        for _, _, headers in puppet.requests
    ]


def test_both_clients_send_the_token_of_one_provider_and_take_the_next_when_it_runs_out(
    puppet: Puppet, answer: type[Answer]
) -> None:
    credentials, store = signed(puppet)
    puppet.script = lambda method, path, _: described(answer) if "alt=media" not in path else answer(body=BODY)
    with contextlib.closing(store):
        for _ in range(2):
            CALLS["read"](store)
            CALLS["head"](store)
            credentials.valid = False  # as its expiry comes near
    assert sent_tokens(puppet) == ["Bearer t1", "Bearer t1", "Bearer t2", "Bearer t2"]
    assert credentials.refreshes == 2


@pytest.mark.parametrize("name", ["read", "head"])
def test_a_refused_token_is_not_used_again(puppet: Puppet, answer: type[Answer], name: str) -> None:
    _, store = signed(puppet)

    def script(method: str, path: str, number: int) -> Answer:
        if "Bearer t1" in sent_tokens(puppet)[-1]:
            return answer(status=401)
        return described(answer) if "alt=media" not in path else answer(body=BODY)

    puppet.script = script
    with contextlib.closing(store):
        error = refused(lambda: CALLS[name](store))
        assert error.store_kind is K.CREDENTIALS
        assert "t1" not in str(error)
        assert CALLS[name](store)
    assert sent_tokens(puppet) == ["Bearer t1", "Bearer t2"]


def test_many_reads_refused_at_once_share_one_refresh(puppet: Puppet, answer: type[Answer]) -> None:
    credentials, store = signed(puppet)
    all_here = threading.Barrier(8, timeout=30)
    bodies: list[object] = []

    def script(method: str, path: str, number: int) -> Answer:
        if number < 8:
            all_here.wait()
            return answer(status=401)
        return answer(body=BODY)

    def reader() -> None:
        assert refused(lambda: CALLS["read"](store)).store_kind is K.CREDENTIALS
        bodies.append(CALLS["read"](store))

    puppet.script = script
    threads = [threading.Thread(target=reader) for _ in range(8)]
    with contextlib.closing(store):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert bodies == [BODY] * 8
    assert credentials.refreshes == 2


def test_no_token_to_be_had_is_credentials_and_an_unreachable_giver_of_them_transient(puppet: Puppet) -> None:
    from google.auth import exceptions

    credentials, store = signed(puppet)
    with contextlib.closing(store):
        for failure, kind in [
            (exceptions.RefreshError("invalid_grant: Account deleted"), K.CREDENTIALS),  # type: ignore[no-untyped-call]
            (exceptions.TransportError("metadata server is away"), K.TRANSIENT),  # type: ignore[no-untyped-call]
            # Not the library's own: a program that it runs can't be run, doesn't speak JSON, takes too long.
            (PermissionError(errno.EPERM, "Operation not permitted", "/s3cr3t"), K.CREDENTIALS),
            (ValueError("s3cr3t is not JSON"), K.CREDENTIALS),
            (subprocess.TimeoutExpired(["s3cr3t"], 5), K.CREDENTIALS),
        ]:
            credentials.fail = failure
            for name in CALLS:
                error = refused(lambda name=name: CALLS[name](store))  # type: ignore[misc]
                assert error.store_kind is kind
                assert "s3cr3t" not in str(error)
    assert puppet.requests == []


def test_what_is_about_no_object_names_the_store(puppet: Puppet, answer: type[Answer]) -> None:
    from google.auth import exceptions

    credentials, store = signed(puppet)
    with contextlib.closing(store):
        puppet.script = lambda *_: answer(status=404)
        error = refused(lambda: list(store.list("y/")))
        assert str(error).startswith("gs://bucket/p: 404 Not Found")
        assert error.key == "y/"
        credentials.fail = exceptions.RefreshError("invalid_grant")  # type: ignore[no-untyped-call]
        credentials.valid = False
        for call in (lambda: list(store.list("y/")), lambda: store.head("k")):
            assert str(refused(call)) == "gs://bucket/p: no Google access token: invalid_grant"


def test_a_machine_without_credentials_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    with contextlib.closing(GoogleStore("bucket")) as store:
        error = refused(lambda: store.head("k"))
    assert error.store_kind is K.CREDENTIALS
    assert "/nowhere/key.json" in str(error)


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "found"])
def test_nothing_is_run_to_find_default_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Google's library asks `gcloud` for a project, which nobody here wants, for as long as that takes."""
    trace, program, file = tmp_path / "was run", tmp_path / "gcloud", tmp_path / "application_default_credentials.json"
    program.write_text(f"#!/bin/sh\n: >'{trace}'\n")
    program.chmod(0o755)
    file.write_text('{"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "t"}')
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    if is_named:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    assert default_tokens() is not None
    assert not trace.exists()


@pytest.mark.parametrize("host", ["127.0.0.1:4443", "http://127.0.0.1:4443", " http://127.0.0.1:4443/ "])
def test_an_emulators_host_may_have_a_scheme_or_not(host: str) -> None:
    assert emulator_address(host) == "http://127.0.0.1:4443"


def test_objects_whose_names_are_no_keys_are_not_listed(google_store: Store, emulator: Any) -> None:
    info = google_store.put("id/manifest", b"x", condition=Condition.ABSENT)
    prefix = google_store.url.removeprefix(f"gs://{emulator.bucket}/")
    for name in ("id/", "id//x", "id/../y", "id/.z"):
        path = f"/upload/storage/v1/b/{emulator.bucket}/o?uploadType=media&name={prefix}/{name}"
        assert emulator.request("POST", path, b"x") == 200
    assert list(google_store.list("")) == [info]


READ_ONLY = """
import sys
from streamd.store.opening import open_store
store = open_store("gs://bucket/p")
assert sum(map(len, store.read("k", generation="7", start=0, end=9))) == 9
print(sorted(name for name in sys.modules if name in ("google.auth", "google.cloud.storage", "requests")))
"""


def test_a_process_that_only_reads_imports_nothing_of_googles(puppet: Puppet, answer: type[Answer]) -> None:
    puppet.script = lambda *_: answer(body=BODY)
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": puppet.address}
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_default_credentials_as_a_source_give_a_new_token_each_time(
    puppet: Puppet, answer: type[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = subprocess.run(["openssl", "genrsa", "2048"], capture_output=True, text=True, check=True).stdout
    account = {"type": "service_account", "client_email": "a@b", "private_key": key, "private_key_id": "k"}
    (tmp_path / "key.json").write_text(json.dumps(account | {"token_uri": f"{puppet.address}/token"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))

    def script(method: str, path: str, number: int) -> Answer:
        if number == 2:
            return answer(status=400, body=b'{"error": "invalid_grant"}')
        return answer(status=200, body=json.dumps({"access_token": f"t{number}", "expires_in": 3600}).encode())

    puppet.script = script
    source = DefaultToken()
    for number in range(2):
        token = source.fetch()
        assert token.value == f"t{number}"
        assert token.expires_in_s is not None
        assert 3500 < token.expires_in_s <= 3600
    assert refused(source.fetch).store_kind is K.CREDENTIALS
    assert [(method, path) for method, path, _ in puppet.requests] == [("POST", "/token")] * 3


def test_a_machine_without_default_credentials_has_no_source_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    assert refused(DefaultToken().fetch).store_kind is K.CREDENTIALS
