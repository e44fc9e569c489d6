"""What every store promises (`streamd/store/port.py`), asked of each kind, alone and under the retrying wrapper."""

import threading
from collections.abc import Callable

import google_crc32c
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamd.errors import StoreError, StoreErrorKind
from streamd.store.port import Buffer, Condition, ObjectInfo, Store

NewStore = Callable[[], Store]

# Above 8 MiB Google's client uploads in steps, by another protocol.
LARGE = bytes(range(251)) * ((9 << 20) // 251 + 1)

several_examples = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def read(store: Store, info: ObjectInfo, start: int = 0, end: int | None = None) -> bytes:
    end = info.size if end is None else end
    return b"".join(store.read(info.key, generation=info.generation, start=start, end=end))


def kind_of(call: Callable[[], object]) -> StoreErrorKind:
    with pytest.raises(StoreError) as caught:
        call()
    return caught.value.store_kind


@pytest.mark.parametrize(
    "data",
    [b"", b"a", bytearray(b"abc"), memoryview(b"abcdef")[1:5], memoryview(bytes(4096)).cast("I"), LARGE],
    ids=["empty", "bytes", "bytearray", "slice", "words", "large"],
)
def test_what_was_put_is_described_and_read_back(store: Store, data: Buffer) -> None:
    right = bytes(memoryview(data).cast("B"))
    info = store.put("id/packs/p/00000000", data, condition=Condition.ABSENT)
    assert (info.key, info.size) == ("id/packs/p/00000000", len(right))
    assert store.head(info.key) == info
    assert list(store.list("")) == [info]
    assert read(store, info) == right
    assert store.crc32c(info) == google_crc32c.value(right)


def test_put_if_absent_refuses_a_second_put_and_leaves_the_first(store: Store) -> None:
    first = store.put("k", b"first", condition=Condition.ABSENT)
    assert kind_of(lambda: store.put("k", b"second", condition=Condition.ABSENT)) is StoreErrorKind.CHANGED
    assert store.head("k") == first
    assert read(store, first) == b"first"


def test_of_many_puts_if_absent_at_the_same_time_one_wins_and_is_whole(store: Store) -> None:
    answers: dict[int, ObjectInfo] = {}
    refusals: list[StoreErrorKind] = []
    start = threading.Barrier(8, timeout=30)

    def put(number: int) -> None:
        start.wait()
        try:
            answers[number] = store.put("k", bytes([number]) * 300_000, condition=Condition.ABSENT)
        except StoreError as error:
            refusals.append(error.store_kind)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refusals == [StoreErrorKind.CHANGED] * 7
    [(winner, info)] = answers.items()
    assert store.head("k") == info
    assert read(store, info) == bytes([winner]) * 300_000


def test_a_generation_is_replaced_only_while_it_is_the_current_one(store: Store) -> None:
    first = store.put("k", b"first", condition=Condition.ABSENT)
    second = store.put("k", b"second", condition=first.generation)
    assert second.generation != first.generation
    assert kind_of(lambda: store.put("k", b"third", condition=first.generation)) is StoreErrorKind.CHANGED
    assert read(store, second) == b"second"


def test_replacing_what_was_deleted_is_refused(store: Store) -> None:
    info = store.put("k", b"first", condition=Condition.ABSENT)
    store.delete("k", generation=info.generation)
    assert kind_of(lambda: store.put("k", b"second", condition=info.generation)) is StoreErrorKind.CHANGED
    assert list(store.list("")) == []


def test_an_unconditional_put_writes_whatever_is_there(store: Store) -> None:
    store.put("k", b"first", condition=Condition.ANY)
    info = store.put("k", b"second", condition=Condition.ANY)
    assert read(store, info) == b"second"


def test_equal_bytes_written_again_are_another_generation(store: Store) -> None:
    first = store.put("k", b"same", condition=Condition.ANY)
    second = store.put("k", b"same", condition=Condition.ANY)
    assert first.generation != second.generation


def test_a_pinned_read_of_a_replaced_object_is_changed_and_of_a_deleted_one_gone(store: Store) -> None:
    first = store.put("k", b"first", condition=Condition.ABSENT)
    second = store.put("k", b"other", condition=first.generation)
    assert kind_of(lambda: read(store, first)) is StoreErrorKind.CHANGED
    store.delete("k", generation=second.generation)
    assert kind_of(lambda: read(store, first)) is StoreErrorKind.GONE
    assert kind_of(lambda: read(store, second)) is StoreErrorKind.GONE


def test_what_is_not_there_is_gone(store: Store) -> None:
    for prepared in (False, True):
        if prepared:
            store.put("other/x", b"", condition=Condition.ABSENT)
        assert kind_of(lambda: store.head("a/b")) is StoreErrorKind.GONE
        assert kind_of(lambda: store.delete("a/b", generation="1")) is StoreErrorKind.GONE
    # Whoever reads a version has seen the store: without it, it is out of reach, not empty (test_directory).
    assert kind_of(lambda: list(store.read("a/b", generation="1", start=0, end=1))) is StoreErrorKind.GONE


def test_delete_removes_that_generation_only(store: Store) -> None:
    first = store.put("a/b", b"first", condition=Condition.ABSENT)
    second = store.put("a/b", b"second", condition=first.generation)
    assert kind_of(lambda: store.delete("a/b", generation=first.generation)) is StoreErrorKind.CHANGED
    assert store.head("a/b") == second
    store.delete("a/b", generation=second.generation)
    assert list(store.list("")) == []
    assert store.put("a/b", b"again", condition=Condition.ABSENT).size == 5


def test_any_range_is_read_exactly(new_store: NewStore) -> None:
    store = new_store()
    data = bytes(range(256)) * 4096
    info = store.put("k", data, condition=Condition.ABSENT)

    @several_examples
    @given(st.tuples(st.integers(0, len(data)), st.integers(0, len(data))).map(sorted))
    def check(span: list[int]) -> None:
        assert read(store, info, *span) == data[slice(*span)]

    check()
    for start, end in [(0, 1), (len(data) - 1, len(data)), (0, len(data)), (65_535, 65_537), (262_144, 262_145)]:
        assert read(store, info, start, end) == data[start:end]


def test_an_empty_range_asks_nothing(store: Store) -> None:
    assert list(store.read("not/there", generation="1", start=5, end=5)) == []


def test_a_read_may_be_left_in_the_middle(store: Store) -> None:
    info = store.put("k", LARGE, condition=Condition.ABSENT)
    for _ in range(3):
        pieces = store.read("k", generation=info.generation, start=0, end=info.size)
        assert next(pieces)
        pieces.close()  # type: ignore[attr-defined]  # they are generators, as everybody's are
    assert read(store, info, 100, 200) == LARGE[100:200]


segments = st.sampled_from(["a", "b", "a-b", "a.b", "a0", "_a", "é", "packs", "00000000"])
keys = st.lists(segments, min_size=1, max_size=3).map("/".join)


def test_listing_gives_exactly_the_keys_with_the_prefix_in_order(new_store: NewStore) -> None:
    @several_examples
    @given(
        st.sets(keys, max_size=8), st.one_of(st.just(""), keys, keys.map(lambda key: key[:2]), keys.map("{}/".format))
    )
    def check(wanted: set[str], prefix: str) -> None:
        # In a directory a name can't be both an object and the directory of others; snapshots have no such keys.
        wanted = {key for key in wanted if not any(other.startswith(f"{key}/") for other in wanted)}
        store = new_store()
        store.put("z", b"", condition=Condition.ANY)
        for key in wanted:
            store.put(key, key.encode(), condition=Condition.ABSENT)
        right = sorted((key for key in {*wanted, "z"} if key.startswith(prefix)), key=str.encode)
        listed = list(store.list(prefix))
        assert [info.key for info in listed] == right
        assert listed == [store.head(key) for key in right]

    check()


def test_the_store_has_a_clock_which_is_that_of_its_objects(store: Store) -> None:
    store.put("first", b"", condition=Condition.ABSENT)
    before_s = store.now_s()
    updated_s = store.put("k", b"", condition=Condition.ABSENT).updated_s
    # File systems and listings round; a second is more than either does.
    assert before_s - 1 <= updated_s <= store.now_s() + 1
    assert [info.key for info in store.list("")] == ["_clock", "first", "k"]


@pytest.mark.parametrize(
    "key", ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", ".streamd/lock", "a\0b", "x" * 256]
)
def test_a_key_that_is_none_never_reaches_the_store(store: Store, key: str) -> None:
    for call in (
        lambda: store.put(key, b"", condition=Condition.ANY),
        lambda: store.head(key),
        lambda: store.delete(key, generation="1"),
        lambda: list(store.read(key, generation="1", start=0, end=1)),
    ):
        with pytest.raises(ValueError, match="not a key"):
            call()
