"""Kinds of failure that need a kernel: what users of lazy file systems met there (`tests/test_failure_table.py`)."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.fault_proxy import FaultProxy, Hang, Rule, Status
from bench.mount_users import GONE
from bench.mounts import LIMIT_S, LiveMount, Mounts
from bench.slot_reader import READ_BYTES, SLOTS
from streamd.fuse import mountinfo, mounting

if TYPE_CHECKING:
    from tests.fuse.conftest import Saved

KIB, MIB = 1 << 10, 1 << 20


# Hangs


def test_a_connection_that_somebody_aborts_ends_its_reads_and_its_process(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str], calm: Callable[[LiveMount], None]
) -> None:
    """An administrator's way out, /sys/fs/fuse/connections/N/abort, with 128 reads that wait and a prefetch."""
    with mounts.start(uploaded.url, env=through, prefetch="all", options=["--no-cache"]) as mount:
        proxy.add(Rule(Hang(), times=None))
        reader = mount.reader(uploaded.pages)
        mount.until(lambda status: status["waiting_chunks"] and status["handles"])
        top = mountinfo.topmost(str(mount.mountpoint))
        assert top is not None
        mounting.abort_connection(top.device[1])
        mount.wait(limit_s=50)  # five seconds, and ten times that tell a hang
        assert not mount.is_mounted()
        outcome = reader.outcome()
        assert {name for _, name in outcome.errors} <= GONE
        assert outcome.wrong == outcome.short == []
        calm(mount)


def test_a_read_that_fails_is_seen_by_whoever_asks_for_the_status(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str]
) -> None:
    """gVisor may hide a loader's failure: the mount says itself that, how often and why reads of it failed."""
    mounts.configure(policy='hold_s = "200ms"')
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        assert mount.status()["failed_reads"] == 0
        proxy.add(Rule(Status(403), times=None))
        outcome = mount.reader(uploaded.pages, end=MIB).outcome()
        assert {name for _, name in outcome.errors} == {"EIO"}
        status = mount.status()  # at once: it is counted before the reader hears of it
        assert status["failed_reads"] >= len(outcome.errors)
        assert "forbidden" in status["last_failure"]
        assert any(line.get("event") == "reads fail" and line.get("level") == "error" for line in mount.log())


# Each reads all of a file, some of it at a time, and says the SHA-256. `pread` is libc's, since Python's own functions
# hide EINTR (PEP 475).
_READ = """
import ctypes, hashlib, mmap, os, signal, sys, threading, time
how, path = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
libc.pread.restype = ctypes.c_ssize_t
signals = 0
def note(*_):
    global signals
    signals += 1
signal.signal(signal.SIGUSR1, note)
reader, over = threading.get_ident(), False
def storm():
    while not over:
        signal.pthread_kill(reader, signal.SIGUSR1)
        time.sleep(0.001)
fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
size, at, digest = os.fstat(fd).st_size, 0, hashlib.sha256()
buffer = mmap.mmap(-1, 1 << 20)  # aligned, as O_DIRECT wants it
address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
thread = threading.Thread(target=storm)
thread.start()
try:
    if how == "mapped":
        with mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
            for at in range(0, size, 1 << 16):
                digest.update(mapped[at : at + (1 << 16)])
    else:
        while at < size:
            got = libc.pread(fd, address, 1 << 20, at)
            if got < 0:
                sys.exit(os.strerror(ctypes.get_errno()))
            if not got:
                sys.exit(f"end of file at {at}")
            digest.update(buffer[:got])
            at += got
finally:
    over = True
    thread.join()
print(digest.hexdigest(), signals)
"""


@pytest.mark.parametrize("how", ["plain", "direct", "mapped", "cached"])
def test_a_signal_every_millisecond_interrupts_no_read_however_the_file_is_opened(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None], how: str
) -> None:
    """`cached` is a file that the kernel keeps (the small ones); the other ways are those of pages.img."""
    name = "checkpoint.img" if how == "cached" else "pages.img"
    with mounts.start(f"{saved.url}?latency=10ms&rate=40MB/s", options=["--no-cache"]) as mount:
        result = subprocess.run(
            [sys.executable, "-c", _READ, how, mount.mountpoint / name], capture_output=True, text=True, timeout=LIMIT_S
        )
        assert (result.returncode, result.stderr) == (0, "")
        digest, signals = result.stdout.split()
        expected = subprocess.run(["sha256sum", saved.image / name], capture_output=True, text=True, check=True)
        assert digest == expected.stdout.split()[0]
        assert int(signals) > (0 if how == "cached" else 20)
        calm(mount)


# Bytes


def test_the_first_look_and_the_first_read_find_the_whole_file(mounts: Mounts, saved: "Saved") -> None:
    """Many at once, on a mount that nobody has looked at: no size is a placeholder, no first read is short."""
    size = saved.pages.stat().st_size
    with saved.pages.open("rb") as file:
        head = file.read(4096)
        file.seek(size - 4096)
        tail = file.read()
    wrong: list[object] = []
    for _ in range(4):
        with mounts.start(saved.url, options=["--no-cache"]) as mount:
            gate = threading.Barrier(32)

            def look(mount: LiveMount = mount, gate: threading.Barrier = gate) -> None:
                gate.wait()
                found = os.stat(mount.pages).st_size
                with mount.pages.open("rb", buffering=0) as file:
                    if found != size or os.fstat(file.fileno()).st_size != size:
                        wrong.append(found)
                    first = os.pread(file.fileno(), 4096, 0)
                    if first != head or os.pread(file.fileno(), 8192, size - 4096) != tail:
                        wrong.append(first)

            threads = [threading.Thread(target=look, daemon=True) for _ in range(32)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT_S)
                assert not thread.is_alive()
    assert wrong == []


# Requests


@pytest.mark.parametrize("shift", [0, 12345], ids=["aligned", "unaligned"])
def test_a_read_of_256_kib_is_one_request(mounts: Mounts, saved: "Saved", shift: int) -> None:
    """As runsc reads; buffered, or with another library, a read reaches the mount in parts of 128 KiB or less."""
    ranges = [(shift + at, READ_BYTES) for at in range(0, saved.pages.stat().st_size - READ_BYTES, READ_BYTES)]
    with mounts.start(saved.url, options=["--no-cache"]) as mount:
        outcome = mount.reader(saved.pages, ranges=ranges).outcome()
        assert outcome.is_clean
        reads = mount.status()["reads"]
        assert sum(reads[kind]["reads"] for kind in reads) == outcome.reads == len(ranges)


def test_a_slow_read_to_the_end_and_past_it_is_right_and_attributes_agree(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None]
) -> None:
    """At the end of a file the kernel may ask for the attributes of the handle, when it takes those it has for old."""
    with mounts.start(f"{saved.url}?rate=8MB/s", options=["--no-cache"]) as mount:
        began_s = time.monotonic()
        reading = subprocess.Popen(["cat", mount.pages], stdout=subprocess.PIPE)
        compared = subprocess.Popen(["cmp", "-", saved.pages], stdin=reading.stdout)
        try:
            fd = os.open(mount.pages, os.O_RDONLY)
            by_name, by_handle = os.stat(mount.pages), os.fstat(fd)
            assert by_name == by_handle
            assert reading.wait(LIMIT_S) == compared.wait(LIMIT_S) == 0
            assert time.monotonic() - began_s >= 2
            assert os.pread(fd, 1, by_handle.st_size) == b""
            assert os.fstat(fd) == by_handle
            os.close(fd)
        finally:
            for process in (reading, compared):
                process.kill()
                process.wait(LIMIT_S)
            assert reading.stdout
            reading.stdout.close()
        line = next(line for line in Path("/proc/mounts").read_text().splitlines() if f" {mount.mountpoint} " in line)
        assert {"ro", "nosuid", "nodev", "noexec", "default_permissions"} <= set(line.split()[3].split(","))
        calm(mount)


def test_many_readers_one_after_another_and_at_once_cost_one_fetch(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None]
) -> None:
    """A mount serves as many restores as come."""
    with mounts.start(saved.url, prefetch="all") as mount:
        for _ in range(20):
            assert mount.reader(saved.pages, slots=8, end=2 * MIB).outcome().is_clean
        readers = [mount.reader(saved.pages, slots=8) for _ in range(20)]
        assert all(saved.is_whole(reader.outcome()) for reader in readers)
        status = mount.status()
        assert status["origin_bytes"] == status["stored_bytes"]
        calm(mount)


# Memory


def _anonymous_bytes(pid: int, field: str = "RssAnon") -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("prefetch", ["none", "all"])
def test_the_least_limit_serves_128_slots_and_is_kept(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None], prefetch: str
) -> None:
    """Two readers want 64 MiB at once: they wait for room, none fails, and the process grows by little more."""
    limit = 32 * MIB
    mounts.configure(f"memory_max_bytes = {limit}")
    with mounts.start(f"{saved.url}?latency=5ms&rate=100MB/s", prefetch=prefetch, options=["--no-cache"]) as mount:
        before = _anonymous_bytes(mount.pid)
        readers = [mount.reader(saved.pages) for _ in range(2)]
        largest = 0
        while not all(reader.is_done() for reader in readers):
            largest = max(largest, _anonymous_bytes(mount.pid))
            time.sleep(0.02)
        assert all(saved.is_whole(reader.outcome()) for reader in readers)
        status = mount.status()
        # One demand read is always granted, whatever else is held: with one chunk, as it comes and decoded.
        assert status["memory_peak_bytes"] <= limit + MIB // 2
        # Replies on their way to the kernel (two readers' slots, at worst) and threads' stacks come on top.
        assert largest <= before + limit + 2 * SLOTS * READ_BYTES + 32 * MIB
        calm(mount)


def test_memory_is_returned_when_a_load_is_over(mounts: Mounts, saved: "Saved") -> None:
    with mounts.start(saved.url, prefetch="all") as mount:
        assert saved.is_whole(mount.reader(saved.pages).outcome())
        small = sum((saved.image / name).stat().st_size for name in ("checkpoint.img", "pages_meta.img"))
        mount.until(lambda status: status["memory_bytes"] == small)
        mount.until(lambda _: _anonymous_bytes(mount.pid) <= 120 * MIB)


def test_an_unmount_in_the_beginning_of_a_load_is_immediate(
    mounts: Mounts, saved: "Saved", calm: Callable[[LiveMount], None]
) -> None:
    with mounts.start(f"{saved.url}?rate=2MB/s", prefetch="all") as mount:
        mount.until(lambda status: status["origin_bytes"] >= status["stored_bytes"] / 20)
        began_s = time.monotonic()
        result = mounts.run("umount", mount.mountpoint)
        assert result.returncode == 0, result.stderr
        assert mount.wait() == 0
        assert time.monotonic() - began_s < 10  # the load would have taken 20 s: it is not waited for
        calm(mount)


# The kernel's own time-out

_REQUEST_TIMEOUT = Path("/proc/sys/fs/fuse/default_request_timeout")


@pytest.fixture
def lift_limit() -> Iterator[Callable[[], object]]:
    """Let mounts that begin now be ended by the kernel when a request waits for 15 s; give what lifts that again."""
    if not _REQUEST_TIMEOUT.exists():
        pytest.skip("fs.fuse.default_request_timeout is Linux 6.15 and later")
    before = _REQUEST_TIMEOUT.read_text()
    _REQUEST_TIMEOUT.write_text("15")
    yield lambda: _REQUEST_TIMEOUT.write_text(before)
    _REQUEST_TIMEOUT.write_text(before)


def test_the_policy_acts_before_a_kernel_that_limits_requests_ends_the_whole_mount(
    mounts: Mounts,
    uploaded: "Saved",
    proxy: FaultProxy,
    through: dict[str, str],
    lift_limit: Callable[[], object],
) -> None:
    """A request that waits for too long would end the connection, and with it every sandbox that loads from it."""
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        os.stat(mount.pages)  # the kernel has settled this mount's limit when it gets an answer
        lift_limit()
        assert any("request_timeout" in str(line) for line in mount.log())
        hang = proxy.add(Rule(Hang(), times=None))
        outcome = mount.reader(uploaded.pages, end=MIB, slots=2).outcome(90)
        assert {name for _, name in outcome.errors} == {"EIO"}
        assert outcome.longest_s < 15
        proxy.remove(hang)
        assert mount.is_mounted()
        assert uploaded.is_whole(mount.reader(uploaded.pages).outcome())
