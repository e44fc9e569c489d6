"""Trying again: the schedule, and the wrapper over a store that fails as it is told."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.faults import Cut, Fail, Fault, FaultyStore
from streamd.errors import StoreError, StoreErrorKind
from streamd.store.directory import DirectoryStore
from streamd.store.port import Condition, ObjectInfo, Store
from streamd.store.retry import Backoff, retrying

TRANSIENT, THROTTLED = StoreErrorKind.TRANSIENT, StoreErrorKind.THROTTLED
CREDENTIALS, CHANGED, GONE = StoreErrorKind.CREDENTIALS, StoreErrorKind.CHANGED, StoreErrorKind.GONE
FINAL = [StoreErrorKind.FORBIDDEN, StoreErrorKind.CORRUPT, CHANGED, GONE]


class Time:
    """A clock that moves when someone waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def wait(self, delay_s: float) -> None:
        self.now_s += delay_s
        self.waits.append(delay_s)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyStore:
    return FaultyStore(DirectoryStore(str(tmp_path / "store")))


@pytest.fixture
def store(faulty: FaultyStore, time: Time) -> Store:
    return retrying(faulty, deadline_s=30, clock=time.clock, wait=time.wait, jitter=lambda: 0.0)


def refused(call: Callable[[], object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        call()
    return caught.value


@given(st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
def test_a_delay_is_positive_bounded_and_never_above_the_unjittered_one(attempt: int, random: float) -> None:
    backoff = Backoff(first_s=0.1, factor=2, limit_s=10, jitter=0.5)
    whole_s = backoff.delay_s(attempt, 0.0)
    assert 0.05 <= whole_s / 2 <= backoff.delay_s(attempt, random) <= whole_s <= 10
    assert whole_s <= backoff.delay_s(attempt + 1, 0.0)


def test_delays_double_up_to_the_limit() -> None:
    delays = [Backoff().delay_s(attempt, 0.0) for attempt in range(10)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10]


@pytest.mark.parametrize("kind", [TRANSIENT, THROTTLED])
@pytest.mark.parametrize("operation", ["list", "head", "put", "delete", "crc32c", "now_s", "read"])
def test_every_call_is_tried_again_until_the_store_is_back(
    store: Store, faulty: FaultyStore, time: Time, operation: str, kind: StoreErrorKind
) -> None:
    info = store.put("k", b"abc", condition=Condition.ABSENT)
    faulty.add(Fault(Fail(kind), operation=operation, times=5))  # type: ignore[arg-type]

    def deleted() -> list[ObjectInfo]:
        store.delete("k", generation=info.generation)
        return list(faulty.list(""))

    calls: dict[str, Callable[[], object]] = {
        "list": lambda: list(store.list("")) == [info],
        "head": lambda: store.head("k") == info,
        "put": lambda: store.put("l", b"", condition=Condition.ABSENT).size == 0,
        "delete": lambda: not deleted(),
        "crc32c": lambda: store.crc32c(info) == 0x364B3FB7,
        "now_s": lambda: store.now_s() > 0,
        "read": lambda: b"".join(store.read("k", generation=info.generation, start=0, end=3)) == b"abc",
    }
    assert calls[operation]()
    assert time.waits == [0.1, 0.2, 0.4, 0.8, 1.6]


@pytest.mark.parametrize("kind", FINAL)
def test_what_is_an_answer_is_not_asked_again(
    store: Store, faulty: FaultyStore, time: Time, kind: StoreErrorKind
) -> None:
    faulty.add(Fault(Fail(kind), operation=None, times=None))
    for call in (
        lambda: store.head("k"),
        lambda: list(store.list("")),
        lambda: store.put("k", b"", condition=Condition.ABSENT),
        lambda: store.delete("k", generation="1"),
        lambda: list(store.read("k", generation="1", start=0, end=1)),
    ):
        faulty.requests.clear()
        assert refused(call).store_kind is kind
        assert len(faulty.requests) == 1
    assert time.waits == []


def test_credentials_are_tried_once_more_and_then_believed(store: Store, faulty: FaultyStore) -> None:
    info = store.put("k", b"abc", condition=Condition.ABSENT)
    faulty.add(Fault(Fail(CREDENTIALS), operation="head"))
    assert store.head("k") == info
    faulty.add(Fault(Fail(CREDENTIALS), operation="head", times=None))
    faulty.requests.clear()
    assert refused(lambda: store.head("k")).store_kind is CREDENTIALS
    assert len(faulty.requests) == 2


def test_a_store_that_stays_away_is_given_up_at_the_deadline_with_its_last_error(
    store: Store, faulty: FaultyStore, time: Time
) -> None:
    faulty.add(Fault(Fail(TRANSIENT), operation="head", times=None))
    error = refused(lambda: store.head("k"))
    assert (error.store_kind, error.key) == (TRANSIENT, "k")
    assert 20 < time.now_s <= 30
    assert f"tried {len(faulty.requests)} times" in str(error)


DATA = bytes(range(256)) * 4


@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=6), start=st.integers(0, 100), end=st.integers(900, 1024))
def test_a_read_resumes_at_its_last_good_byte(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], start: int, end: int
) -> None:
    time = Time()
    faulty = FaultyStore(DirectoryStore(str(tmp_path_factory.mktemp("store"))))
    store = retrying(faulty, deadline_s=30, clock=time.clock, wait=time.wait)
    info = store.put("k", DATA, condition=Condition.ABSENT)
    for cut in cuts:
        faulty.add(Fault(Cut(cut)))
    faulty.requests.clear()
    body = b"".join(store.read("k", generation=info.generation, start=start, end=end))
    assert body == DATA[start:end]
    assert faulty.counts["k"].bytes_read == end - start  # no byte was fetched twice
    starts = [request.start for request in faulty.requests]
    assert starts == sorted(starts)


def test_progress_of_a_read_starts_its_deadline_anew(store: Store, faulty: FaultyStore, time: Time) -> None:
    info = store.put("k", DATA, condition=Condition.ABSENT)
    for _ in range(len(DATA)):
        faulty.add(Fault(Cut(1)))
    assert b"".join(store.read("k", generation=info.generation, start=0, end=len(DATA))) == DATA
    assert time.now_s > 60


def test_a_read_whose_object_is_replaced_meanwhile_fails_and_is_no_mixture(store: Store, faulty: FaultyStore) -> None:
    info = store.put("k", DATA, condition=Condition.ABSENT)
    faulty.add(Fault(Cut(10)))
    pieces = store.read("k", generation=info.generation, start=0, end=len(DATA))
    assert next(pieces) == DATA[:10]
    store.put("k", DATA[::-1], condition=info.generation)
    assert refused(lambda: list(pieces)).store_kind is CHANGED


def test_a_listing_that_breaks_off_goes_on_without_repeating(time: Time, tmp_path: Path) -> None:
    inner = DirectoryStore(str(tmp_path / "store"))
    infos = [inner.put(f"k{number}", b"", condition=Condition.ABSENT) for number in range(5)]

    class Breaking(FaultyStore):
        left = 3

        def list(self, prefix: str):  # type: ignore[no-untyped-def]
            for number, info in enumerate(super().list(prefix)):
                if number == 4 - self.left and self.left:
                    self.left -= 1
                    raise StoreError(TRANSIENT, prefix, "broke off")
                yield info

    store = retrying(Breaking(inner), deadline_s=30, clock=time.clock, wait=time.wait)
    assert list(store.list("")) == infos


@pytest.mark.parametrize("size", [0, 5, 2 << 20])
def test_a_put_whose_answer_was_lost_is_a_success(store: Store, faulty: FaultyStore, size: int) -> None:
    data = bytes(size)
    faulty.add(Fault(Fail(TRANSIENT, after=True), operation="put"))
    info = store.put("k", data, condition=Condition.ABSENT)
    assert store.head("k") == info
    faulty.add(Fault(Fail(TRANSIENT, after=True), operation="put"))
    again = store.put("k", data + b"1", condition=info.generation)
    assert store.head("k") == again
    assert again.size == size + 1


@pytest.mark.parametrize(
    ("there", "mine"),
    [(b"other", b"mine!"), (b"theirs", b"mine!"), (bytes(2 << 20), b"\1" * (2 << 20))],
    ids=["same size", "another size", "large"],
)
def test_a_put_whose_answer_was_lost_does_not_take_anothers_object_for_its_own(
    store: Store, faulty: FaultyStore, there: bytes, mine: bytes
) -> None:
    faulty.add(Fault(Fail(TRANSIENT), operation="put", nth=1))
    first = store.put("k", there, condition=Condition.ABSENT)
    assert refused(lambda: store.put("k", mine, condition=Condition.ABSENT)).store_kind is CHANGED
    assert store.head("k") == first


def test_an_equal_object_that_was_there_before_the_first_attempt_is_a_refusal(store: Store) -> None:
    store.put("k", b"same", condition=Condition.ABSENT)
    assert refused(lambda: store.put("k", b"same", condition=Condition.ABSENT)).store_kind is CHANGED


def test_a_delete_whose_answer_was_lost_is_a_success(store: Store, faulty: FaultyStore) -> None:
    info = store.put("k", b"", condition=Condition.ABSENT)
    faulty.add(Fault(Fail(TRANSIENT, after=True), operation="delete"))
    store.delete("k", generation=info.generation)
    assert list(store.list("")) == []
    assert refused(lambda: store.delete("k", generation=info.generation)).store_kind is GONE


def test_each_failure_that_is_tried_again_is_told(faulty: FaultyStore, time: Time) -> None:
    heard: list[tuple[StoreErrorKind, float]] = []
    store = retrying(
        faulty,
        deadline_s=30,
        on_retry=lambda error, delay_s: heard.append((error.store_kind, delay_s)),
        clock=time.clock,
        wait=time.wait,
        jitter=lambda: 0.0,
    )
    faulty.add(Fault(Fail(TRANSIENT), operation="put"))
    faulty.add(Fault(Fail(THROTTLED), operation="put"))
    store.put("k", b"", condition=Condition.ABSENT)
    assert heard == [(TRANSIENT, 0.1), (THROTTLED, 0.2)]


def test_closing_ends_a_wait_with_the_last_error(faulty: FaultyStore) -> None:
    faulty.add(Fault(Fail(TRANSIENT), operation="head", times=None))
    store: Store
    store = retrying(
        faulty, deadline_s=1e9, backoff=Backoff(first_s=1e6, limit_s=1e6), on_retry=lambda *_: store.close()
    )
    assert refused(lambda: store.head("k")).store_kind is TRANSIENT
