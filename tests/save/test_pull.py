"""Pull and verify: the right bytes or a clear refusal, and nothing half-made left behind."""

import os
import stat
import subprocess
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.faults import Action, Corrupt, Fail, Fault, FaultyStore
from bench.memory_store import MemoryStore
from streamd.errors import Damaged, Exit, NotFound, Refused, StoreErrorKind, StreamdError
from streamd.save.lifecycle import remove
from streamd.save.pull import PullProgress, pull
from streamd.save.push import PushOptions, push
from streamd.save.reading import cut, spans
from streamd.save.verify import verify
from streamd.snapshot.manifest import ChunkTable, Codec
from streamd.store.port import Condition

OPTIONS = PushOptions(chunk_bytes=64 << 10, pack_bytes=256 << 10, uploads=2, encoders=2, created_s=1.0)


@pytest.fixture
def store(image: Path) -> MemoryStore:
    result = MemoryStore()
    push(image, result, snapshot_id="snap", push_id="p", options=OPTIONS)
    return result


def test_zeros_stay_holes_and_nobody_else_may_read(store: MemoryStore, tmp_path: Path) -> None:
    result = pull(store, "snap", tmp_path / "out")
    status = (tmp_path / "out" / "pages.img").stat()
    assert status.st_blocks * 512 <= status.st_size - result.zero_bytes + 4096
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_an_empty_directory_will_do_and_progress_ends_with_everything(store: MemoryStore, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    result = pull(store, "snap", tmp_path, progress=seen.append)
    assert seen[-1] == PullProgress(result.image_bytes, result.image_bytes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: (path.mkdir(), (path / "x").write_text("")), "not empty"),
        (lambda path: path.write_text(""), "not a directory"),
        (lambda path: ((path.parent / "elsewhere").mkdir(), path.symlink_to("elsewhere")), "symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "symbolic link"),
        (os.mkfifo, "not a directory"),
    ],
    ids=["a directory that is not empty", "a file", "a link to an empty directory", "a link to nothing", "a FIFO"],
)
def test_what_is_in_the_way_is_refused_and_left(
    make: Callable[[Path], object], message: str, store: MemoryStore, tmp_path: Path
) -> None:
    make(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Refused, match=message):
        pull(store, "snap", tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_of_a_snapshot_that_is_not_there_or_removed_nothing_is_made(store: MemoryStore, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        pull(store, "other", tmp_path / "out")
    with pytest.raises(NotFound):
        verify(store, "other")
    remove(store, "snap")
    with pytest.raises(Refused, match="being removed"):
        pull(store, "snap", tmp_path / "out")
    with pytest.raises(Refused, match="being removed"):
        verify(store, "snap")
    assert not list(tmp_path.iterdir())


# What goes wrong with reads of a pack: the exit code.
FAILURES: dict[str, tuple[Action, Exit]] = {
    "a flipped byte": (Corrupt(at_byte=100), Exit.DAMAGED),
    "a pack deleted meanwhile": (Fail(StoreErrorKind.GONE), Exit.NOT_FOUND),
    "a pack replaced meanwhile": (Fail(StoreErrorKind.CHANGED), Exit.REFUSED),
    "the store gone": (Fail(StoreErrorKind.TRANSIENT), Exit.UNREACHABLE),
    "no permission": (Fail(StoreErrorKind.FORBIDDEN), Exit.NOT_PERMITTED),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("existed", [True, False], ids=["into an empty directory", "into a new directory"])
def test_a_pull_that_fails_leaves_things_as_they_were(
    case: str, existed: bool, store: MemoryStore, tmp_path: Path
) -> None:
    action, code = FAILURES[case]
    faulty = FaultyStore(store)
    faulty.add(Fault(action, key="*/packs/*", nth=1))
    target = tmp_path / "out"
    if existed:
        target.mkdir()
    with pytest.raises(StreamdError) as caught:
        pull(faulty, "snap", target)
    assert caught.value.exit_code is code
    assert target.exists() == existed
    assert not existed or not list(target.iterdir())


def damage(store: MemoryStore, key: str, change: Callable[[bytes], bytes]) -> None:
    store.put(key, change(store.objects[key][1]), condition=Condition.ANY)


def test_verify_names_the_chunk_with_a_flipped_bit_and_only_that(store: MemoryStore, image: Path) -> None:
    damage(store, "snap/packs/p/00000001", lambda data: data[:1000] + bytes([data[1000] ^ 4]) + data[1001:])
    result = verify(store, "snap")
    assert not result.ok
    (chunk,) = result.damaged
    assert (chunk.pack, chunk.file) == ("snap/packs/p/00000001", "pages.img")
    assert chunk.offset % OPTIONS.chunk_bytes == 0
    (problem,) = result.pack_problems
    assert "SHA-256" in problem


def test_verify_lists_the_chunks_of_a_pack_that_is_missing_or_cut(store: MemoryStore) -> None:
    whole = verify(store, "snap")
    assert whole.ok
    sizes = {key: info.size for key, (info, _) in store.objects.items()}
    del store.objects["snap/packs/p/00000002"]
    damage(store, "snap/packs/p/00000003", lambda data: data[:-1])
    damage(store, "snap/packs/p/00000004", lambda data: data + b"more")
    result = verify(store, "snap")
    by_pack: dict[str, int] = {}
    for chunk in result.damaged:
        by_pack[chunk.pack] = by_pack.get(chunk.pack, 0) + 1
    assert by_pack["snap/packs/p/00000002"] > 1
    assert by_pack["snap/packs/p/00000003"] == 1  # the last one
    assert "snap/packs/p/00000004" not in by_pack
    assert result.pack_problems == (
        "snap/packs/p/00000002: missing",
        f"snap/packs/p/00000003: {sizes['snap/packs/p/00000003'] - 1} bytes instead of"
        f" {sizes['snap/packs/p/00000003']}",
        f"snap/packs/p/00000004: {sizes['snap/packs/p/00000004'] + 4} bytes instead of"
        f" {sizes['snap/packs/p/00000004']}",
    )


def test_verify_does_not_call_a_store_that_fails_a_damaged_snapshot(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    faulty.add(Fault(Fail(StoreErrorKind.TRANSIENT), key="*/packs/*", nth=2))
    with pytest.raises(StreamdError) as caught:
        verify(faulty, "snap")
    assert caught.value.exit_code is Exit.UNREACHABLE


def test_verify_refuses_a_manifest_that_it_cannot_read(store: MemoryStore) -> None:
    damage(store, "snap/manifest", lambda data: data[:-1])
    with pytest.raises(Damaged, match="manifest"):
        verify(store, "snap")


rows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 5)), max_size=30)


@settings(deadline=None)
@given(rows, st.sampled_from([None, 1, 7, 1000]), st.randoms(use_true_random=False))
def test_spans_hold_every_stored_chunk_once_and_lie_back_to_back(
    drawn: list[tuple[int, int, int]], span_bytes: int | None, random: Random
) -> None:
    ends = [0, 0, 0]
    table = [(0, 0, 0, Codec.ZERO)]
    for pack, gap, size in drawn:
        table.append((pack, ends[pack] + gap, size, Codec.RAW))
        ends[pack] += gap + size
    random.shuffle(table)  # any order will do
    count = len(table)
    columns = ChunkTable(
        length=np.full(count, 4096, np.uint32),
        pack=np.array([row[0] for row in table], np.uint32),
        offset=np.array([row[1] for row in table], np.uint32),
        frame_bytes=np.array([row[2] for row in table], np.uint32),
        codec=np.array([row[3] for row in table], np.uint8),
        digest=np.zeros((count, 16), np.uint8),
    )
    found = list(spans(columns, span_bytes=span_bytes))
    assert sorted(row for span in found for row in span.rows) == [
        row for row in range(count) if table[row][3] is not Codec.ZERO
    ]
    for span in found:
        assert {table[row][0] for row in span.rows} == {span.pack}
        for row, after in zip(span.rows[:-1], span.rows[1:], strict=True):
            assert table[row][1] + table[row][2] == table[after][1]


def test_a_full_disk_is_told_and_leaves_nothing(store: MemoryStore, tmp_path: Path) -> None:
    mountpoint = tmp_path / "full"
    mountpoint.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mountpoint], check=True)
    try:
        with pytest.raises(StreamdError, match=os.strerror(28)):
            pull(store, "snap", mountpoint / "out")
        assert not list(mountpoint.iterdir())
    finally:
        subprocess.run(["umount", mountpoint], check=True)


@given(data=st.data(), body=st.binary(max_size=60))
def test_a_body_in_any_pieces_is_cut_at_the_same_places(data: st.DataObject, body: bytes) -> None:
    edges = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    starts = [0, *(end for _, end in ranges)]
    parts = [(start - before, end - start) for before, (start, end) in zip(starts, ranges, strict=False)]
    steps = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    at = [0, *sorted(steps), len(body)]
    pieces = iter([body[a:b] for a, b in pairwise(at)])
    assert list(cut(pieces, parts, "k")) == [body[start:end] for start, end in ranges]


def test_what_lies_between_frames_is_passed_over_and_not_held() -> None:
    piece = bytes(64 << 10)
    tracemalloc.start()
    try:
        (frame,) = cut((piece for _ in range(1024)), [((64 << 20) - 4096, 4096)], "k")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert frame == bytes(4096)


def test_verify_counts_all_damage_and_lists_the_first(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in store.objects if "/packs/" in key]:
        del store.objects[key]
    whole = verify(store, "snap")
    assert len(whole.damaged) == whole.damaged_count > 5
    monkeypatch.setattr("streamd.save.verify.MAX_LISTED", 5)
    result = verify(store, "snap")
    assert (result.damaged, result.damaged_count) == (whole.damaged[:5], whole.damaged_count)


def test_verify_reads_no_more_than_a_pack_has_by_the_manifest(store: MemoryStore) -> None:
    key = "snap/packs/p/00000001"
    size = len(store.objects[key][1])
    damage(store, key, lambda data: data + bytes(1 << 20))
    faulty = FaultyStore(store)
    result = verify(faulty, "snap")
    assert result.pack_problems == (f"{key}: {size + (1 << 20)} bytes instead of {size}",)
    assert faulty.counts[key].bytes_read == size


def test_verify_says_why_a_manifest_can_not_be_read(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    faulty.add(Fault(Fail(StoreErrorKind.FORBIDDEN), key="snap/manifest"))
    with pytest.raises(StreamdError) as caught:
        verify(faulty, "snap")
    assert caught.value.exit_code is Exit.NOT_PERMITTED
