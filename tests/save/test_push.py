"""Push: what is in the store afterwards, and what is when something went wrong at any of its calls."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.images import checkpoint_img, expected, make_image, pages_meta_img
from bench.memory_store import MemoryStore
from streamd.errors import Damaged, Exit, Refused, StoreError, StoreErrorKind, StreamdError
from streamd.save.lifecycle import collect
from streamd.save.pull import pull
from streamd.save.push import PushFailed, PushOptions, PushProgress, PushResult, push
from streamd.save.verify import verify
from streamd.snapshot.manifest import Codec, decode
from streamd.store.catalog import open_snapshot
from streamd.store.directory import DirectoryStore
from streamd.store.port import Store

# Packs of a few chunks, so that a small image has many.
SMALL = PushOptions(chunk_bytes=64 << 10, pack_bytes=256 << 10, uploads=2, encoders=2, created_s=1.0)
OTHER_CHUNKS = PushOptions(chunk_bytes=32 << 10, pack_bytes=256 << 10, uploads=2, encoders=2)


def save(image: Path, store: Store, push_id: str = "p", *, options: PushOptions = SMALL) -> PushResult:
    return push(image, store, snapshot_id="snap", push_id=push_id, options=options)


def image_files(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in ("checkpoint.img", "pages_meta.img", "pages.img")}


def visible(store: MemoryStore) -> bool:
    return "snap/manifest" in store.objects


def test_what_was_pushed_is_pulled_back_byte_for_byte(image: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    result = save(image, store)
    assert image_files(image) == image_files(_pulled(store, tmp_path))
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint.img", "pages.img", "pages_meta.img"]
    assert result.image_bytes == sum(map(len, image_files(image).values()))
    assert result.stored_bytes == sum(info.size for info, _ in store.objects.values() if "/packs/" in info.key)
    assert verify(store, "snap").ok


def _pulled(store: Store, tmp_path: Path) -> Path:
    pull(store, "snap", tmp_path / "out")
    return tmp_path / "out"


def test_chunks_lie_in_file_order_and_zeros_nowhere(image: Path) -> None:
    store = MemoryStore()
    result = save(image, store)
    pinned = open_snapshot(store, "snap")
    table = pinned.manifest.table
    assert pinned.manifest.files[0].name == "checkpoint.img"
    stored = [row for row in range(len(table)) if table.codec[row] != Codec.ZERO]
    places = [(int(table.pack[row]), int(table.offset[row])) for row in stored]
    assert places == sorted(places)
    assert places[0] == (0, 0)
    ends = {pack: offset + int(table.frame_bytes[row]) for row, (pack, offset) in zip(stored, places, strict=True)}
    assert [ends[index] for index in range(result.packs)] == [pack.size for pack in pinned.manifest.packs]
    assert max(ends.values()) <= SMALL.pack_bytes
    pages = expected(0, 4 << 20, seed=3)
    zeros = sum(64 << 10 for at in range(0, 4 << 20, 64 << 10) if not any(pages[at : at + (64 << 10)]))
    assert result.zero_bytes == zeros > 0


def test_the_same_image_gives_the_same_objects(image: Path) -> None:
    first, second = MemoryStore(), MemoryStore()
    save(image, first)
    save(image, second, options=replace(SMALL, encoders=1, uploads=1))
    assert {key: data for key, (_, data) in first.objects.items()} == {
        key: data for key, (_, data) in second.objects.items()
    }


def test_the_manifest_holds_what_push_was_told_and_no_secrets(image: Path) -> None:
    store = MemoryStore()
    options = PushOptions(created_s=12.5, runsc_sha256="ab" * 32, cpu_features=("avx", "sse"), metadata={"k": "v"})
    save(image, store, options=options)
    manifest = decode(store.objects["snap/manifest"][1])
    assert manifest.created_s == 12.5
    assert manifest.gvisor.runsc_sha256 == "ab" * 32
    assert manifest.gvisor.cpu_features == ("avx", "sse")
    assert manifest.metadata == {"k": "v"}
    assert b"hunter2" not in store.objects["snap/manifest"][1]


def test_progress_ends_with_everything(image: Path) -> None:
    seen: list[PushProgress] = []
    result = push(image, MemoryStore(), snapshot_id="snap", push_id="p", options=SMALL, progress=seen.append)
    assert [report.done_bytes for report in seen] == sorted(report.done_bytes for report in seen)
    assert (seen[-1].done_bytes, seen[-1].total_bytes) == (result.image_bytes, result.image_bytes)
    assert (seen[-1].stored_bytes, seen[-1].packs) == (result.stored_bytes, result.packs)


# --- interrupted


class FailAt:
    """A hook that fails the nth call (of one kind), from 0, and those after it when `lasting`."""

    def __init__(self, nth: int, *, only: str = "", lasting: bool = True) -> None:
        self.calls = 0
        self._nth = nth
        self._only = only
        self._lasting = lasting
        self._lock = threading.Lock()

    def __call__(self, operation: str, key: str) -> None:
        if self._only not in ("", operation):
            return
        with self._lock:
            here, self.calls = self.calls, self.calls + 1
        if here == self._nth or (self._lasting and here > self._nth):
            raise StoreError(StoreErrorKind.TRANSIENT, key, "the store is gone")


def _calls(image: Path) -> int:
    store = MemoryStore(before=(count := FailAt(10**9)))
    save(image, store)
    return count.calls


def test_interrupted_at_any_call_nothing_is_visible_and_the_next_run_completes_it(image: Path, tmp_path: Path) -> None:
    calls = _calls(image)
    assert calls > 10
    for nth in range(calls):
        store = MemoryStore()
        store.before = FailAt(nth)
        with pytest.raises(PushFailed, match=r"--id snap --push-id p\b") as caught:
            save(image, store)
        assert caught.value.exit_code is Exit.UNREACHABLE
        assert not visible(store)
        there = sum("/packs/" in key for key in store.objects)
        store.before = None
        result = save(image, store)
        assert result.skipped_packs == there
        assert verify(store, "snap").ok


def test_an_answer_lost_at_any_put_leaves_a_push_that_can_be_completed(image: Path) -> None:
    store = MemoryStore()
    puts = save(image, store).packs + 1
    for nth in range(puts):
        store = MemoryStore(after=FailAt(nth, only="put", lasting=False))
        with pytest.raises(PushFailed) as caught:
            save(image, store)
        store.after = None
        committed = visible(store)
        assert committed == ("may be complete" in str(caught.value))
        result = save(image, store)
        assert result.was_there == committed
        assert verify(store, "snap").ok


def test_leftovers_of_an_interrupted_push_go_after_the_grace_and_nothing_else(image: Path) -> None:
    store = MemoryStore()
    push(image, store, snapshot_id="other", push_id="q", options=SMALL)
    kept = set(store.objects)
    store.before = FailAt(8)
    with pytest.raises(PushFailed):
        save(image, store)
    store.before = None
    assert set(store.objects) > kept
    collect(store, grace_s=100)
    assert set(store.objects) > kept
    for _ in range(2):
        store.clock_s += 3600
        collect(store, grace_s=100)
    assert set(store.objects) == kept


def test_a_pack_with_other_contents_ends_the_push_and_is_not_touched(image: Path) -> None:
    store = MemoryStore()
    store.before = FailAt(8)
    with pytest.raises(PushFailed):
        save(image, store)
    store.before = None
    before = dict(store.objects)
    with pytest.raises(Refused, match="other contents"):
        save(image, store, options=OTHER_CHUNKS)
    assert before.items() <= store.objects.items()
    assert not visible(store)


def test_an_id_that_exists_is_refused_before_anything_is_written(image: Path) -> None:
    store = MemoryStore()
    save(image, store)
    before = dict(store.objects)
    with pytest.raises(Refused, match="it exists"):
        save(image, store, "q")
    assert store.objects == before


def test_of_two_pushes_of_an_id_at_once_one_wins_and_the_winner_is_whole(image: Path) -> None:
    store = MemoryStore()
    barrier = threading.Barrier(2)

    def meet(operation: str, key: str) -> None:
        if operation == "put" and key == "snap/manifest":
            barrier.wait(30)

    store.before = meet
    outcomes: list[object] = []

    def run(push_id: str) -> None:
        try:
            outcomes.append(save(image, store, push_id))
        except StreamdError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run, args=(push_id,)) for push_id in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store.before = None
    (won,) = (outcome for outcome in outcomes if isinstance(outcome, PushResult))
    (lost,) = (outcome for outcome in outcomes if isinstance(outcome, StreamdError))
    assert lost.exit_code is Exit.REFUSED
    assert verify(store, "snap").ok
    assert {key.split("/")[2] for key in store.objects if "/packs/" in key} == {won.push_id}


def test_an_image_that_changes_under_the_push_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "image"
    make_image(directory, 4 << 20)
    for change in (lambda path: os.truncate(path, 1 << 20), lambda path: os.utime(path, ns=(0, 0))):
        store = MemoryStore()

        def before(operation: str, key: str, change: Callable[[Path], None] = change) -> None:
            if operation == "put":
                change(directory / "pages.img")

        store.before = before
        with pytest.raises(Refused, match=r"pages\.img (became shorter|changed)"):
            save(directory, store)
        assert not visible(store)
        make_image(directory, 4 << 20)


def test_a_cancelled_push_ends_at_once_even_if_an_upload_hangs(image: Path) -> None:
    store = MemoryStore()
    cancel, hang = threading.Event(), threading.Event()

    def before(operation: str, key: str) -> None:
        if operation == "put":
            cancel.set()
            hang.wait(60)

    store.before = before
    with pytest.raises(PushFailed, match="interrupted") as caught:
        push(image, store, snapshot_id="snap", push_id="p", options=SMALL, cancel=cancel)
    assert caught.value.exit_code is Exit.INTERRUPTED
    hang.set()
    assert not visible(store)


def test_a_store_on_a_full_disk_ends_the_push_and_leaves_no_snapshot(image: Path, tmp_path: Path) -> None:
    mountpoint = tmp_path / "full"
    mountpoint.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", mountpoint], check=True)
    try:
        store = DirectoryStore(str(mountpoint / "store"))
        with pytest.raises(PushFailed, match=os.strerror(errno.ENOSPC)):
            save(image, store)
        assert not any(info.key.endswith("/manifest") for info in store.list(""))
        subprocess.run(["mount", "-o", "remount,size=64m", mountpoint], check=True)
        assert save(image, store).skipped_packs
        assert verify(store, "snap").ok
    finally:
        subprocess.run(["umount", mountpoint], check=True)


_CHILD = """
import sys
from pathlib import Path
from streamd.save.push import PushOptions, push
from streamd.store.opening import open_store
image, url, wanted = sys.argv[1:]
def progress(report):
    if report.packs >= int(wanted):
        print("half way", flush=True)
        sys.stdin.read()  # stands still in the middle until it is killed
push(Path(image), open_store(url), snapshot_id="snap", push_id="p",
     options=PushOptions(chunk_bytes=64 << 10, pack_bytes=256 << 10, uploads=2, encoders=2), progress=progress)
"""


@pytest.fixture
def half_pushed(image: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has pushed some packs into tmp_path/store and stands still."""
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, image, f"file://{tmp_path}/store", "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "half way\n"
        yield process
        process.kill()


def test_a_killed_push_is_resumed_and_gc_finds_nothing_to_do(
    half_pushed: subprocess.Popen[str], image: Path, tmp_path: Path
) -> None:
    half_pushed.kill()
    half_pushed.wait(30)
    store = DirectoryStore(str(tmp_path / "store"))
    there = {info.key for info in store.list("snap/")}
    assert len(there) >= 3
    assert "snap/manifest" not in there
    result = save(image, store)
    assert result.skipped_packs == len(there)
    assert image_files(image) == image_files(_pulled(store, tmp_path))
    assert collect(store, grace_s=0).objects_deleted == 0
    assert verify(store, "snap").ok


def test_ctrl_c_ends_a_push_promptly_and_says_how_to_go_on(half_pushed: subprocess.Popen[str], tmp_path: Path) -> None:
    half_pushed.send_signal(signal.SIGINT)
    _, said = half_pushed.communicate(timeout=30)
    assert "interrupted; no snapshot was made" in said
    assert "--id snap --push-id p" in said
    assert not any(info.key == "snap/manifest" for info in DirectoryStore(str(tmp_path / "store")).list("snap/"))


def untouchable() -> MemoryStore:
    """A store that must not be asked anything."""

    def ask(operation: str, key: str) -> None:
        raise AssertionError(f"{operation} {key}")

    return MemoryStore(before=ask)


def no_reading(*_: object) -> None:
    raise AssertionError("pages.img is read")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(SMALL, chunk_bytes=4096), "8388[0-9]{3} chunks of 4096 bytes are more than the 4194304"),
        (replace(SMALL, metadata={"note": "x" * (1 << 20)}), "metadata together take 10[0-9]{5} bytes"),
        (replace(SMALL, metadata={str(number): "" for number in range(2**16 + 1)}), "65537 members"),
        (replace(SMALL, cpu_features=("a\x1b[2J",)), "cpu_features.*control characters"),
        (replace(SMALL, runsc_sha256="no digest"), "runsc_sha256"),
    ],
    ids=["too many chunks", "too much metadata", "too many facts", "no name", "no digest"],
)
def test_what_would_be_refused_at_the_end_is_refused_before_anything_is_read(
    options: PushOptions, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages_bytes = 32 << 30
    (tmp_path / "checkpoint.img").write_bytes(checkpoint_img())
    (tmp_path / "pages_meta.img").write_bytes(pages_meta_img(pages_bytes))
    (tmp_path / "pages.img").touch()
    os.truncate(tmp_path / "pages.img", pages_bytes)
    monkeypatch.setattr("streamd.save.encoding.BatchEncoder.encode", no_reading)
    checked: list[str] = []
    with pytest.raises((Refused, Damaged), match=message):
        push(
            tmp_path,
            untouchable(),
            snapshot_id="snap",
            push_id="p",
            options=options,
            on_checked=lambda: checked.append("checked"),
        )
    assert checked == []


def test_more_packs_than_a_manifest_may_have_are_refused_as_they_come(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamd.save.push.MAX_PACKS", 3)
    store = MemoryStore()
    with pytest.raises(Refused, match="more than 3 packs"):
        save(image, store)
    assert sum("/packs/" in key for key in store.objects) <= 3


def test_whoever_pushes_hears_that_the_directory_is_in_order_before_the_store_is_asked(image: Path) -> None:
    events: list[str] = []
    store = MemoryStore(before=lambda operation, _key: events.append(operation))
    push(image, store, snapshot_id="snap", push_id="p", options=SMALL, on_checked=lambda: events.append("checked"))
    assert events[0] == "checked"
    assert events.count("checked") == 1
