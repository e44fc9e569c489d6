"""A request that is sent again asks for nothing new: whatever the order, it is as if each had been sent once."""

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from streamd.daemon.api.idempotency import RequestIdReused, RequestMemory
from streamd.daemon.api.limits import Limits
from streamd.daemon.api.models import ImageRequest, ImageStateName
from tests.daemon.api.fake_node import URL, InProcess

ONE = f"{1:032x}"

_requests = st.fixed_dictionaries(
    {
        "snapshot_url": st.sampled_from([URL, f"{URL}-b", "file:///store/a"]),
        "tenant": st.sampled_from(["", "shop"]),
        "prefetch": st.sampled_from(["none", "hot", "all"]),
    },
    optional={"credentials": st.sampled_from([{"token_file": "/t"}, {"command": ["/c", "x"]}])},
)


@st.composite
def _interleavings(draw: st.DrawFn) -> tuple[list[dict[str, object]], list[int]]:
    """Requests, and the order in which they are sent: each at least once, first sendings in their order."""
    requests = [{"request_id": f"r-{n}", **r} for n, r in enumerate(draw(st.lists(_requests, min_size=1, max_size=6)))]
    order = list(range(len(requests)))
    for again in draw(st.lists(st.sampled_from(order), max_size=12)):
        first = order.index(again)
        order.insert(draw(st.integers(first + 1, len(order))), again)
    return requests, order


@given(_interleavings())
def test_any_order_of_repeated_requests_equals_each_of_them_once(
    case: tuple[list[dict[str, object]], list[int]],
) -> None:
    requests, order = case
    repeated, once = InProcess(), InProcess()

    async def ask(api: InProcess, numbers: list[int]) -> list[tuple[int, bytes]]:
        answers = [await api.ask("POST", "/v1/images", requests[number]) for number in numbers]
        return [(answer.status, answer.body) for answer in answers]

    answers = trio.run(ask, repeated, order)
    single = trio.run(ask, once, list(range(len(requests))))
    assert answers == [single[number] for number in order]
    assert repeated.node.asked == once.node.asked
    assert repeated.node.events.published == once.node.events.published


@given(_requests, _requests)
def test_an_id_with_another_body_is_refused(one: dict[str, object], other: dict[str, object]) -> None:
    api = InProcess()

    async def ask() -> None:
        assert (await api.image("r", **one)).status == 200
        answer = await api.image("r", **other)
        if one == other:
            assert answer.status == 200
        else:
            assert (answer.status, answer.kind) == (409, "request-id-reused")
        assert len(api.node.asked) == 1

    trio.run(ask)


async def test_a_repeated_request_gets_the_image_as_it_is_now(api: InProcess) -> None:
    await api.image()
    api.node.set_state(ONE, ImageStateName.FAILED)
    answer = await api.image()
    assert (answer.json["id"], answer.json["state"]) == (ONE, "failed")


async def test_a_repeated_request_whose_image_is_gone_gets_no_new_one(api: InProcess) -> None:
    await api.image()
    api.node.forget(ONE)
    answer = await api.image()
    assert (answer.status, answer.kind) == (410, "ended")
    assert len(api.node.asked) == 1
    assert (await api.image("r-2")).status == 200


async def test_a_request_that_failed_can_be_sent_again(api: InProcess) -> None:
    api.node.is_draining = True
    assert (await api.image()).kind == "draining"
    api.node.is_draining = False
    assert (await api.image()).status == 200


async def test_a_field_that_is_left_out_is_the_same_as_its_default(api: InProcess) -> None:
    assert (await api.image()).status == 200
    assert (await api.image(tenant="", prefetch="all", credentials=None)).status == 200


async def test_ids_that_were_used_longest_ago_are_forgotten() -> None:
    api = InProcess(limits=Limits(request_ids=2))
    for request_id in ("a", "b", "a", "c"):  # b is the oldest when c comes
        assert (await api.image(request_id)).status == 200
    assert (await api.image("a", tenant="other")).kind == "request-id-reused"
    assert (await api.image("b", tenant="other")).status == 200


def test_what_is_remembered_holds_nothing_of_the_request() -> None:
    memory = RequestMemory(kept=2)
    request = msgspec.convert(
        {"snapshot_url": URL, "request_id": "r", "credentials": {"command": ["/c", "s3cr3t"]}}, ImageRequest
    )
    memory.note(request, ONE)
    assert "s3cr3t" not in repr(vars(memory))
    with pytest.raises(RequestIdReused):
        memory.image_of(msgspec.structs.replace(request, tenant="x"))
