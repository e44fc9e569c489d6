"""What each route answers, and that whatever is wrong with a request gets a problem."""

from pathlib import Path

import msgspec
import pytest
import structlog
import trio
import trio.testing

from streamd.daemon.api import openapi, problems
from streamd.daemon.api.app import Ended
from streamd.daemon.api.idempotency import RequestIdReused
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.models import ImageStateName, Opener
from streamd.daemon.api.port import Draining, ImageInUse
from streamd.errors import Damaged, Exit, NotFound, StoreError, StoreErrorKind, StreamdError, Unreachable
from tests.daemon.api.fake_node import URL, FakeNode, InProcess

ONE = f"{1:032x}"
SECRET = "s3cr3t-t0ken"


async def test_an_image_is_asked_for_and_described(api: InProcess) -> None:
    answer = await api.image(tenant="shop", prefetch="hot")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "id": ONE,
        "snapshot_url": URL,
        "tenant": "shop",
        "state": "preparing",
        "created_s": 1000.0,
        "prefetch": "hot",
        "credentials": "default",
        "mountpoint": None,
        "restarts": 0,
        "worker_pid": None,
        "worker_started_s": None,
        "leases": [],
        "openers": [],
        "progress": {"resident_bytes": 0, "total_bytes": 0},
        "fault_waits": {"count": 0, "p50_ms": 0.0, "p99_ms": 0.0},
        "release_gaps": {"p50_ms": 0.0, "p99_ms": 0.0},
        "stalls": 0,
        "failed_reads": 0,
        "fetch_max_bytes_per_s": 0,
        "bytes_by_tier": {},
        "last_error": None,
        "cache_problem": None,
        "store_away": None,
    }
    assert (await api.ask("GET", f"/v1/images/{ONE}")).json == answer.json
    assert (await api.ask("GET", "/v1/images")).json == {"images": [answer.json]}


async def test_the_same_snapshot_and_tenant_share_an_image_and_another_tenant_does_not(api: InProcess) -> None:
    ids = [(await api.image(f"r-{n}", tenant=tenant)).json["id"] for n, tenant in enumerate(["a", "a", "b"])]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("credentials", [{"token_file": f"/run/{SECRET}"}, {"command": ["/bin/token", SECRET]}])
async def test_credentials_reach_the_node_and_no_answer_names_more_than_their_kind(
    api: InProcess, credentials: dict[str, object]
) -> None:
    answer = await api.image(credentials=credentials)
    assert answer.json["credentials"] in credentials
    asked = api.node.asked[0].credentials
    assert asked is not None
    assert msgspec.to_builtins(asked) == credentials
    everything = [answer, await api.ask("GET", "/v1/images"), await api.ask("GET", "/metrics")]
    everything.append(await api.image(credentials=credentials, prefetch="none"))  # refused: another request
    wrong = {"token_file": f"/{SECRET}", "command": [f"/{SECRET}"]}
    everything.append(await api.image("r-2", credentials=wrong))
    everything.append(await api.image("r-3", credentials={"token_file": SECRET}))
    everything.append(await api.image("r-4", credentials={"command": [SECRET]}))
    for said in (*(answer.body.decode() for answer in everything), repr(asked), repr(api.node.asked)):
        assert SECRET not in said


async def test_waiting_for_an_image_ends_when_it_is_not_preparing_any_more(api: InProcess) -> None:
    await api.image()
    async with trio.open_nursery() as nursery:
        answers: list[str] = []

        async def wait() -> None:
            answers.append((await api.ask("GET", f"/v1/images/{ONE}?wait_s=60")).json["state"])

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        api.node.events.publish("something-else")
        await trio.testing.wait_all_tasks_blocked()
        assert answers == []
        api.node.set_state(ONE, ImageStateName.SERVING)
    assert answers == ["serving"]


async def test_waiting_for_an_image_is_bounded(api: InProcess, autojump_clock: trio.testing.MockClock) -> None:
    await api.image()
    before_s = trio.current_time()
    assert (await api.ask("GET", f"/v1/images/{ONE}?wait_s=2.5")).json["state"] == "preparing"
    assert trio.current_time() - before_s == pytest.approx(2.5)


async def test_waiting_for_an_image_that_goes_away_says_so(api: InProcess) -> None:
    await api.image()
    async with trio.open_nursery() as nursery:
        kinds: list[str] = []

        async def wait() -> None:
            kinds.append((await api.ask("GET", f"/v1/images/{ONE}?wait_s=60")).kind)

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        api.node.forget(ONE)
    assert kinds == ["not-found"]


async def test_an_image_in_use_is_released_by_force_only(api: InProcess) -> None:
    await api.image()
    image = api.node.known[ONE]
    opener = Opener(handle=3, file="pages.img", pid=17, command="runsc", container="web")
    api.node.known[ONE] = msgspec.structs.replace(image, openers=[opener])
    refused = await api.ask("POST", f"/v1/images/{ONE}/release")
    assert (refused.status, refused.kind) == (409, "in-use")
    assert refused.json["openers"] == [msgspec.to_builtins(opener)]
    assert "runsc (pid 17) has pages.img open" in refused.json["detail"]
    assert api.node.known[ONE].state is ImageStateName.PREPARING
    forced = await api.ask("POST", f"/v1/images/{ONE}/release", {"force": True})
    assert (forced.status, forced.json["state"]) == (200, "draining")


@pytest.mark.parametrize("chosen", [{}, {"handle": (1 << 64) - 1}, {"container": "web"}])
async def test_reads_are_failed_as_chosen(api: InProcess, chosen: dict[str, object]) -> None:
    await api.image()
    assert (await api.ask("POST", f"/v1/images/{ONE}/fail", chosen or None)).json == {"failed": 1}
    assert msgspec.to_builtins(api.node.failed[0]) == chosen


async def test_cache_records_health_and_drain(api: InProcess) -> None:
    assert (await api.ask("GET", "/v1/cache")).json["images"][0]["is_pinned"] is True
    names = [record["name"] for record in (await api.ask("GET", "/v1/records?limit=2")).json["records"]]
    assert names == ["0.record", "1.record"]
    assert (await api.ask("GET", "/v1/health")).json["status"] == "ok"
    api.node.warnings = ["the disk is full"]
    health = await api.ask("GET", "/v1/health")
    assert (health.status, health.json["status"], health.json["warnings"]) == (503, "degraded", ["the disk is full"])
    assert (await api.ask("GET", "/v1/drain")).json == {"is_draining": False}
    assert (await api.ask("POST", "/v1/drain")).json == {"is_draining": True}
    refused = await api.image()
    assert (refused.status, refused.kind, refused.headers["retry-after"]) == (503, "draining", "5")
    assert (await api.ask("DELETE", "/v1/drain")).json == {"is_draining": False}
    assert (await api.image()).status == 200


# What is wrong with a request: method, path, body, headers → status, kind
IMAGES = "/v1/images"
BAD_REQUESTS: dict[str, tuple[str, str, object, dict[str, str], int, str]] = {
    "unknown path": ("GET", "/v1/image", None, {}, 404, "no-such-path"),
    "slash at the end": ("GET", "/v1/images/", None, {}, 404, "no-such-path"),
    "path above": ("GET", "/v1/images/../../etc/passwd", None, {}, 404, "no-such-path"),
    "wrong method": ("DELETE", IMAGES, None, {}, 405, "wrong-method"),
    "unknown method": ("BREW", IMAGES, None, {}, 405, "wrong-method"),
    "no body": ("POST", IMAGES, None, {}, 400, "bad-request"),
    "not JSON": ("POST", IMAGES, b"{", {}, 400, "bad-request"),
    "not UTF-8": ("POST", IMAGES, b'{"snapshot_url":"gs://\xff"}', {}, 400, "bad-request"),
    "nested deeply": ("POST", IMAGES, b"[" * 16000, {}, 422, "invalid"),
    "nested deeply in a field": ("POST", IMAGES, b'{"x":' * 3000, {}, 422, "invalid"),
    "not an object": ("POST", IMAGES, [], {}, 422, "invalid"),
    "wrong media type": ("POST", IMAGES, {}, {"content-type": "text/plain"}, 415, "wrong-media-type"),
    "too long": ("POST", IMAGES, b" " * (16 << 10 | 1), {}, 413, "too-large"),
    "too long where none is needed": ("GET", IMAGES, b" " * (16 << 10 | 1), {}, 413, "too-large"),
    "missing field": ("POST", IMAGES, {"snapshot_url": URL}, {}, 422, "invalid"),
    "unknown field": ("POST", IMAGES, {"snapshot_url": URL, "request_id": "r", "x": 1}, {}, 422, "invalid"),
    "wrong type": ("POST", IMAGES, {"snapshot_url": 1, "request_id": "r"}, {}, 422, "invalid"),
    "no store": ("POST", IMAGES, {"snapshot_url": "http://a/b", "request_id": "r"}, {}, 422, "invalid"),
    "line break at the end": ("POST", IMAGES, {"snapshot_url": URL, "request_id": "r\n"}, {}, 422, "invalid"),
    "empty id": ("POST", IMAGES, {"snapshot_url": URL, "request_id": ""}, {}, 422, "invalid"),
    "long id": ("POST", IMAGES, {"snapshot_url": URL, "request_id": "r" * 65}, {}, 422, "invalid"),
    "unknown image": ("GET", f"{IMAGES}/{9:032x}", None, {}, 404, "not-found"),
    "image id that isn't one": ("GET", f"{IMAGES}/..", None, {}, 404, "not-found"),
    "unknown parameter": ("GET", f"{IMAGES}?all=1", None, {}, 422, "invalid"),
    "parameter twice": ("GET", "/v1/records?limit=1&limit=1", None, {}, 422, "invalid"),
    "limit of nothing": ("GET", "/v1/records?limit=0", None, {}, 422, "invalid"),
    "half a limit": ("GET", "/v1/records?limit=1.5", None, {}, 422, "invalid"),
    "limit not a number": ("GET", "/v1/records?limit=nan", None, {}, 422, "invalid"),
    "wait too long": ("GET", f"{IMAGES}/{ONE}?wait_s=61", None, {}, 422, "invalid"),
    "force not a boolean": ("POST", f"{IMAGES}/{ONE}/release", {"force": 1}, {}, 422, "invalid"),
    "handle and container": ("POST", f"{IMAGES}/{ONE}/fail", {"handle": 1, "container": "a"}, {}, 422, "invalid"),
    "handle below": ("POST", f"{IMAGES}/{ONE}/fail", {"handle": -1}, {}, 422, "invalid"),
    "handle above": ("POST", f"{IMAGES}/{ONE}/fail", {"handle": 1 << 64}, {}, 422, "invalid"),
    "no image to fail": ("POST", f"{IMAGES}/{9:032x}/fail", {}, {}, 404, "not-found"),
    "no image to release": ("POST", f"{IMAGES}/{9:032x}/release", {}, {}, 404, "not-found"),
    "no image to lease": ("POST", f"{IMAGES}/{9:032x}/leases", {"owner": "a", "purpose": "b"}, {}, 404, "not-found"),
    "lease of nobody": ("POST", f"{IMAGES}/{ONE}/leases", {"owner": "", "purpose": "b"}, {}, 422, "invalid"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_a_bad_request_gets_a_problem_and_changes_nothing(api: InProcess, case: str) -> None:
    await api.image()
    before = dict(api.node.known)
    method, path, body, headers, status, kind = BAD_REQUESTS[case]
    answer = await api.ask(method, path, body, headers=headers)
    assert (answer.status, answer.kind) == (status, kind)
    assert api.node.known == before


@pytest.mark.parametrize(
    "credentials",
    [
        {},
        {"token_file": "relative"},
        {"token_file": "/a\nb"},
        {"token_file": None},
        {"command": []},
        {"command": ["relative"]},
        {"command": ["/a\nb"]},
        {"command": ["/a", "\0"]},
        {"command": ["/a\0"]},
        {"command": ["/a"] * 65},
        {"command": "/bin/sh"},
        {"token_file": "/a", "command": ["/a"]},
        {"token": SECRET},
    ],
)
async def test_wrong_credentials_are_refused(api: InProcess, credentials: dict[str, object]) -> None:
    answer = await api.image(credentials=credentials)
    assert (answer.status, answer.kind) == (422, "invalid")
    assert SECRET not in answer.body.decode()


async def test_a_wrong_method_is_told_the_right_ones(api: InProcess) -> None:
    answer = await api.ask("PATCH", "/v1/drain")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, POST"
    assert (await api.ask("HEAD", "/v1/drain")).status == 200


async def test_http_2_is_turned_away(api: InProcess) -> None:
    answer = await api.ask("GET", "/v1/images", http_version="2")
    assert (answer.status, answer.kind) == (505, "wrong-version")


async def test_a_body_that_never_ends_is_given_up(api: InProcess, autojump_clock: trio.testing.MockClock) -> None:
    answer = await api.ask("POST", "/v1/images", parts=[b"{"])
    assert (answer.status, answer.kind) == (408, "too-slow")


# What the node raises → status, kind
ERRORS: dict[str, tuple[StreamdError, int, str]] = {
    "not found": (NotFound("x"), 404, "not-found"),
    "damaged": (Damaged("x"), 502, "damaged"),
    "unreachable": (Unreachable("x"), 503, "unreachable"),
    "draining": (Draining(), 503, "draining"),
    "in use": (ImageInUse(ONE, leases=[], openers=[]), 409, "in-use"),
    "ended": (Ended("x"), 410, "ended"),
    "id used again": (RequestIdReused("r"), 409, "request-id-reused"),
    "failed": (StreamdError("x"), 500, "failed"),
    **{
        f"store: {kind}": (StoreError(kind, "manifest", "x"), status, kind.value)
        for kind, status in {
            StoreErrorKind.TRANSIENT: 503,
            StoreErrorKind.THROTTLED: 503,
            StoreErrorKind.CREDENTIALS: 403,
            StoreErrorKind.GONE: 404,
            StoreErrorKind.FORBIDDEN: 403,
            StoreErrorKind.CHANGED: 409,
            StoreErrorKind.CORRUPT: 502,
        }.items()
    },
}


@pytest.mark.parametrize("case", ERRORS)
async def test_an_error_of_the_node_keeps_its_kind_its_words_and_its_exit_code(case: str) -> None:
    error, status, kind = ERRORS[case]
    api = InProcess(FakeNode(raises=error))
    answer = await api.image()
    assert (answer.status, answer.kind) == (status, kind)
    assert answer.json["detail"] == str(error)
    assert answer.json["exit_code"] == int(error.exit_code)


def test_every_exit_code_has_a_status() -> None:
    assert set(problems.STATUS_OF_EXIT) == set(Exit)
    assert {kind.value for kind in StoreErrorKind} <= {str(error.kind) for error, _, _ in ERRORS.values()}


async def test_a_fact_does_not_take_the_place_of_a_member_of_the_problem() -> None:
    error = StreamdError("said")
    vars(error).update(status="a fact", type="a fact", detail="a fact", path=Path("/a"))
    described = problems.problem(error)
    assert described["status"] == 500
    assert described["detail"] == "said"
    assert described["path"] == "/a"


async def test_a_bug_is_an_answer_and_a_line_in_the_log_and_says_nothing_of_itself() -> None:
    class Broken(FakeNode):
        def images(self) -> list[object]:  # type: ignore[override]
            raise ZeroDivisionError(SECRET)

    with structlog.testing.capture_logs() as logged:
        answer = await InProcess(Broken()).ask("GET", "/v1/images")
    assert (answer.status, answer.kind) == (500, "internal")
    assert [entry["event"] for entry in logged] == ["request failed"]
    assert SECRET not in answer.body.decode()


@pytest.mark.parametrize("path", ["/v1/cache", "/v1/records"])
async def test_what_hangs_is_given_up_and_the_rest_answers(path: str, autojump_clock: trio.testing.MockClock) -> None:
    api = InProcess(FakeNode(is_hung=True))
    async with trio.open_nursery() as nursery:
        answers: list[tuple[int, str]] = []

        async def hang() -> None:
            answer = await api.ask("GET", path)
            answers.append((answer.status, answer.kind))

        nursery.start_soon(hang)
        await trio.testing.wait_all_tasks_blocked()
        for other in ("/v1/images", "/v1/health", "/metrics", "/openapi.json", "/v1/drain"):
            assert (await api.ask("GET", other)).status == 200
        assert answers == []
    assert answers == [(504, "no-answer")]


async def test_no_thread_of_trios_pool_is_needed(api: InProcess) -> None:
    limiter = trio.to_thread.current_default_thread_limiter()
    before, limiter.total_tokens = limiter.total_tokens, 1
    limiter.acquire_on_behalf_of_nowait("everything else")
    try:
        with trio.fail_after(30):
            assert (await api.image()).status == 200
            assert (await api.ask("GET", "/nothing")).status == 404
            assert (await api.ask("GET", "/metrics")).status == 200
    finally:
        limiter.release_on_behalf_of("everything else")
        limiter.total_tokens = before


async def test_leases_beyond_the_bound_are_refused() -> None:
    api = InProcess(limits=Limits(streams=0))
    await api.image()
    answer = await api.ask("POST", f"/v1/images/{ONE}/leases", {"owner": "a", "purpose": "b"})
    assert (answer.status, answer.kind) == (503, "busy")
    assert api.node.known[ONE].leases == []
    assert (await api.ask("GET", "/v1/events")).kind == "busy"


async def test_every_operation_has_a_handler_and_its_problems_are_described(api: InProcess) -> None:
    document = (await api.ask("GET", "/openapi.json")).json
    for operation in openapi.OPERATIONS:
        assert document["paths"][operation.path][operation.method.lower()]["operationId"] == operation.name
    documented = {
        int(s) for path in document["paths"].values() for op in path.values() for s in op["responses"] if s != "default"
    }
    assert {row[4] for row in BAD_REQUESTS.values()} - {405} <= documented
