"""Bad days of the store, on the wire, under real clients and real mounts: only right bytes, or what the policy says.

The tables are the issue's. A read waits for what passes and fails only by the policy's last step; meanwhile everything
that doesn't need the store answers at once.
"""

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.fault_proxy import Action, Cut, Delay, Extra, FaultProxy, Flip, Hang, Rule, Status
from bench.mounts import LIMIT_S, LiveMount, Mounts
from bench.slot_reader import SLOTS, Outcome
from streamd.errors import Exit
from streamd.fuse import mountinfo
from streamd.snapshot.manifest import Codec
from streamd.store.gcs import PIECE_BYTES
from streamd.store.port import Condition

if TYPE_CHECKING:
    from bench.emulator import Emulator
    from tests.fuse.conftest import Saved

MIB = 1 << 20
# Commands that must answer from memory: what hangs does so until the store is back, and that is after them.
AT_ONCE_S = LIMIT_S


def answers_at_once(mounts: Mounts, mount: LiveMount) -> None:
    """Check that everything but a read of pages.img is answered while reads of it wait, and nothing unmounts it."""
    top = str(mount.mountpoint)
    for command in (["ls", "-la", top], ["stat", top], ["stat", "-f", top], ["cat", f"{top}/pages_meta.img"]):
        result = subprocess.run(command, capture_output=True, timeout=AT_ONCE_S)
        assert result.returncode == 0, (command, result.stderr)
    result = subprocess.run(["stat", mount.mountpoint / "gcs_opts.json"], capture_output=True, timeout=AT_ONCE_S)
    assert b"No such file" in result.stderr
    code, message = mounts.refused("umount", mount.mountpoint)
    assert code == Exit.REFUSED
    assert "pages.img open" in message
    assert mount.is_mounted()


PASSING = {
    "500 storm": Rule(Status(500), times=20),
    "503 storm": Rule(Status(503), times=20),
    "429 storm": Rule(Status(429), times=20),
    "408 now and then": Rule(Status(408), times=3),
    "401 until the credentials are good again": Rule(Status(401), times=4),
    "403 once": Rule(Status(403)),
    "404 of an object that is there": Rule(Status(404), times=3),
    "body cut at byte 0": Rule(Cut(0), times=4),
    "body cut at byte 1": Rule(Cut(1), times=4),
    "body cut at byte n-1": Rule(Cut(-1), times=4),
    "one byte too many": Rule(Extra(1), times=None),
    "one flipped bit on the way": Rule(Flip(30_000)),
    "late headers": Rule(Delay(0.5), times=4),
    "late body": Rule(Delay(0.5, at_byte=10_000), times=4),
}
# Whoever finds a fault in a row should find it in that row: each reads a part of pages.img that no other has touched.
PART_BYTES = 5 * MIB // 2


@pytest.fixture(scope="module")
def wire(emulator: "Emulator") -> Iterator[FaultProxy]:
    """A proxy for the rows that share a mount."""
    with FaultProxy(emulator.port) as running:
        yield running


@pytest.fixture(scope="module")
def patient(uploaded: "Saved", wire: FaultProxy) -> Iterator[LiveMount]:
    """A mount that waits for ever, as by default, for all rows of `PASSING`."""
    with Mounts() as mounts:
        environment = {"STORAGE_EMULATOR_HOST": wire.address}
        with mounts.start(uploaded.url, env=environment, options=["--no-cache"]) as mount:
            yield mount


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_waited_for(patient: LiveMount, uploaded: "Saved", wire: FaultProxy, name: str) -> None:
    start = list(PASSING).index(name) * PART_BYTES
    rule = wire.add(PASSING[name])
    outcome = patient.reader(uploaded.pages, read_bytes=64 << 10, start=start, end=start + PART_BYTES).outcome()
    wire.remove(rule)
    assert outcome.is_clean, outcome
    assert outcome.right_bytes == PART_BYTES
    assert rule.fired
    assert patient.complaints() == []


@pytest.mark.parametrize("action", [Status(503), Cut(-1), Cut(100_000)], ids=["503 storm", "cut at n-1", "cut"])
def test_what_passes_is_waited_for_with_prefetch_too(
    mounts: Mounts,
    uploaded: "Saved",
    proxy: FaultProxy,
    through: dict[str, str],
    calm: Callable[[LiveMount], None],
    action: Action,
) -> None:
    with mounts.start(uploaded.url, env=through, prefetch="all", options=["--no-cache"]) as mount:
        rule = proxy.add(Rule(action, times=20))
        assert uploaded.is_whole(mount.reader(uploaded.pages).outcome())
        assert rule.fired
        # What a cut body had brought is not fetched again.
        assert mount.status()["origin_bytes"] <= 1.02 * mount.status()["stored_bytes"]
        calm(mount)


@pytest.mark.parametrize("name", ["refused", "hang before the headers", "hang in the body"])
def test_an_outage_is_waited_for_while_everything_else_answers(
    mounts: Mounts,
    uploaded: "Saved",
    proxy: FaultProxy,
    through: dict[str, str],
    calm: Callable[[LiveMount], None],
    name: str,
) -> None:
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        if name == "refused":
            proxy.refuse()
        else:
            proxy.add(Rule(Hang(0 if "headers" in name else 10_000), times=None))
        reader = mount.reader(uploaded.pages)
        mount.until_waiting(100)  # the zero blocks are answered without the store
        answers_at_once(mounts, mount)
        if name == "refused":
            # Not at once: what was under way is cut off first, and may be all that has failed so far.
            mount.until(lambda status: "ConnectionRefused" in (status["last_failure"] or ""))
        assert not reader.is_done()
        proxy.clear()
        proxy.accept()
        assert uploaded.is_whole(reader.outcome())
        calm(mount)


def test_the_reads_of_several_sandboxes_leave_room_for_whoever_asks_for_something_else(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str]
) -> None:
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        proxy.add(Rule(Hang(), times=None))
        readers = [mount.reader(uploaded.pages) for _ in range(4)]
        mount.until_waiting(4 * SLOTS)
        answers_at_once(mounts, mount)
        proxy.clear()
        assert all(uploaded.is_whole(reader.outcome()) for reader in readers)
        assert mount.status()["origin_bytes"] <= 1.02 * mount.status()["stored_bytes"]


def test_a_connection_that_says_nothing_is_given_up_and_another_one_asked(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str]
) -> None:
    """The clients' time-out is 10 s of silence; the hangs here are never ended (60 s of them: tests/stress)."""
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        proxy.add(Rule(Hang(0), times=2))
        proxy.add(Rule(Hang(30_000), times=2))
        assert uploaded.is_whole(mount.reader(uploaded.pages).outcome())
        assert proxy.hanging == 4
        # Or, while others move, asked for a second time before it is given up.
        status = mount.status()
        assert status["second_tries"] or status["store_failures"]
        assert status["store_failures"].keys() <= {"transient"}


@pytest.fixture
def own_hosts(mounts: Mounts) -> Iterator[Callable[[str], list[str]]]:
    """Make a hosts file of the test's own, and give what starts a process that resolves names by it alone.

    The process has a mount namespace in which that file lies over /etc/hosts and no name server is there. What it
    mounts below the mounts' directory is seen outside, since that directory is a shared mount.
    """
    subprocess.run(["mount", "--bind", mounts.base, mounts.base], check=True)
    subprocess.run(["mount", "--make-private", mounts.base], check=True)
    subprocess.run(["mount", "--make-shared", mounts.base], check=True)
    hosts, resolver = mounts.base / "hosts", mounts.base / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")  # where none listens

    def knows(names: str) -> list[str]:
        hosts.write_text(f"127.0.0.1 localhost {names}\n")
        inside = (
            f'mount --make-private / && mount --bind "{hosts}" /etc/hosts && '
            f'mount --bind "{resolver}" "$(readlink -f /etc/resolv.conf)" && exec "$@"'
        )
        return ["unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", inside, "sh"]

    yield knows
    subprocess.run(["umount", "--lazy", mounts.base], check=True)


def test_a_name_that_does_not_resolve_is_waited_for(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, own_hosts: Callable[[str], list[str]]
) -> None:
    wrapper = own_hosts("store.test")
    environment = {"STORAGE_EMULATOR_HOST": f"http://store.test:{proxy.port}"}
    with mounts.start(uploaded.url, env=environment, wrapper=wrapper, options=["--no-cache"]) as mount:
        own_hosts("")
        proxy.refuse()  # the connections that are open need no name
        proxy.accept()
        reader = mount.reader(uploaded.pages)
        mount.until_waiting(100)
        before = proxy.reads
        mount.until(lambda status: status["store_failures"].get("transient", 0) >= 2)
        answers_at_once(mounts, mount)
        assert proxy.reads == before  # nobody found the store
        assert not reader.is_done()
        own_hosts("store.test")
        assert uploaded.is_whole(reader.outcome())


@pytest.mark.parametrize("action", [Status(403), Hang()], ids=["refused", "hanging"])
def test_a_store_that_takes_no_writes_is_read_all_the_same(
    mounts: Mounts,
    uploaded: "Saved",
    proxy: FaultProxy,
    through: dict[str, str],
    calm: Callable[[LiveMount], None],
    action: Action,
) -> None:
    """A mount would like to leave a lease in the store; many a reader may not write there."""
    rule = proxy.add(Rule(action, name="*/upload/*", times=None, reads_only=False))
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        mount.until(lambda _: rule.fired)
        assert uploaded.is_whole(mount.reader(uploaded.pages).outcome())
        assert mounts.run("umount", mount.mountpoint).returncode == 0
        assert mount.wait() == 0
        calm(mount)


def test_chunks_below_a_stall_are_served_while_the_rest_of_the_body_waits(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str]
) -> None:
    # A piece of a body, and a half, is there before it stalls, in every GET, so that second tries stall as well.
    stall = PIECE_BYTES * 3 // 2
    manifest = uploaded.pinned().manifest
    table, pages = manifest.table, manifest.files[-1]
    base = int(table.start[pages.first_chunk])
    second = [c for c in range(len(table)) if table.codec[c] != Codec.ZERO and table.pack[c] == 1]
    assert all(c >= pages.first_chunk for c in second)
    ranges = {c: (int(table.start[c]) - base, int(table.length[c])) for c in second}
    below = [ranges[c] for c in second if int(table.offset[c] + table.frame_bytes[c]) <= PIECE_BYTES]
    assert below
    rule = proxy.add(Rule(Hang(stall), name="*/packs/*/00000001", times=None))
    with mounts.start(uploaded.url, env=through, prefetch="none", options=["--no-cache"]) as mount:
        whole = mount.reader(uploaded.pages, ranges=list(ranges.values()))
        mount.until(lambda _: rule.fired and proxy.hanging)
        early = mount.reader(uploaded.pages, ranges=below).outcome()
        assert early.is_clean
        assert early.reads == len(below)
        proxy.remove(rule)
        assert whole.outcome().is_clean


def test_reads_of_one_handle_can_be_failed_without_hurting_the_other(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str]
) -> None:
    with mounts.start(uploaded.url, env=through, options=["--no-cache"]) as mount:
        proxy.add(Rule(Hang(0), times=None))
        doomed = mount.reader(uploaded.pages)
        [handle] = mount.until_waiting(100)["handles"]
        spared = mount.reader(uploaded.pages)
        mount.until_waiting(200)
        result = mounts.run("fail", mount.mountpoint, "--handle", str(handle["handle"]))
        assert result.returncode == 0, result.stderr
        outcome = doomed.outcome()
        assert {name for _, name in outcome.errors} == {"EIO"}
        assert len(outcome.errors) >= 100
        assert not outcome.wrong
        assert not spared.is_done()
        proxy.clear()
        assert uploaded.is_whole(spared.outcome())
        # What is opened later is served as before.
        assert uploaded.is_whole(mount.reader(uploaded.pages).outcome())
        assert mounts.refused("fail", mount.mountpoint, "--handle", "12345")[0] == Exit.NOT_FOUND


FAILING = {
    "401 for good": (Status(401), "credentials"),
    "403 for good": (Status(403), "forbidden"),
    "400, which no policy knows": (Status(400), "forbidden"),
}


@pytest.fixture(scope="module")
def impatient(uploaded: "Saved", wire: FaultProxy) -> Iterator[LiveMount]:
    """A mount with short holds, for all rows of `FAILING`."""
    with Mounts() as mounts:
        mounts.configure(policy='hold_s = "1s"\ncredentials_wait_s = "1s"')
        environment = {"STORAGE_EMULATOR_HOST": wire.address}
        with mounts.start(uploaded.url, env=environment, options=["--no-cache"]) as mount:
            yield mount


@pytest.mark.parametrize("name", FAILING)
def test_what_does_not_pass_fails_the_reads_after_the_hold(
    impatient: LiveMount, uploaded: "Saved", wire: FaultProxy, name: str
) -> None:
    action, kind = FAILING[name]
    start = list(FAILING).index(name) * PART_BYTES
    before = impatient.status()["store_failures"].get(kind, 0)
    rule = wire.add(Rule(action, times=None))
    end = start + PART_BYTES
    outcome = impatient.reader(uploaded.pages, read_bytes=64 << 10, start=start, end=end, go_on=True).outcome()
    assert outcome.wrong == outcome.short == []
    assert {error for _, error in outcome.errors} == {"EIO"}
    assert outcome.longest_s >= 1.0  # held first
    assert impatient.status()["store_failures"][kind] > before
    # They are asked for again when somebody wants them again.
    wire.remove(rule)
    outcome = impatient.reader(uploaded.pages, read_bytes=64 << 10, start=start, end=end).outcome()
    assert outcome.is_clean
    assert outcome.right_bytes == PART_BYTES
    assert impatient.complaints() == []


CHANGES = ("pack replaced by another of the same size", "pack replaced by the same bytes", "pack deleted")


@dataclass(frozen=True, slots=True)
class AfterChanges:
    """What a reader of everything got after pack 2 + i had changed in way `CHANGES[i]`, and the status then."""

    outcome: Outcome
    offsets: dict[str, set[int]]  # of the chunks in pages.img that each change hit
    status: dict[str, Any]


def _offsets_in_pack(saved: "Saved", pack: int) -> set[int]:
    manifest = saved.pinned().manifest
    table, pages = manifest.table, manifest.files[-1]
    base = int(table.start[pages.first_chunk])
    chunks = range(pages.first_chunk, len(table))
    return {int(table.start[c]) - base for c in chunks if table.codec[c] != Codec.ZERO and int(table.pack[c]) == pack}


@pytest.fixture(scope="module", params=["directory", "bucket"])
def after_changes(
    request: pytest.FixtureRequest,
    saved: "Saved",
    emulator: "Emulator",
    push_to_emulator: Callable[[str], "Saved"],
    copy_of: Callable[["Saved", Path], "Saved"],
    tmp_path_factory: pytest.TempPathFactory,
) -> AfterChanges:
    """Change three packs under one mount, each in a way of its own, then read everything."""
    if request.param == "bucket":
        snapshot = push_to_emulator("changes")
    else:
        snapshot = copy_of(saved, tmp_path_factory.mktemp("changes"))
    store, packs = snapshot.store, snapshot.pinned().packs[2:5]
    offsets = {change: _offsets_in_pack(snapshot, 2 + i) for i, change in enumerate(CHANGES)}
    same = b"".join(store.read(packs[1].key, generation=packs[1].generation, start=0, end=packs[1].size))
    with Mounts() as mounts:
        mounts.configure(policy='hold_s = "500ms"')
        environment = {"STORAGE_EMULATOR_HOST": emulator.address}
        with mounts.start(snapshot.url, env=environment, options=["--no-cache"]) as mount:
            store.put(packs[0].key, bytes(packs[0].size), condition=Condition.ANY)
            store.put(packs[1].key, same, condition=Condition.ANY)
            store.delete(packs[2].key, generation=packs[2].generation)
            outcome = mount.reader(snapshot.pages, read_bytes=64 << 10, go_on=True).outcome()
            return AfterChanges(outcome, offsets, mount.status())


@pytest.mark.parametrize("change", CHANGES)
def test_a_pack_that_changes_under_a_mount_fails_its_reads(after_changes: AfterChanges, change: str) -> None:
    failed = {offset for offset, name in after_changes.outcome.errors if name == "EIO"}
    assert after_changes.offsets[change] <= failed
    kinds = after_changes.status["store_failures"]
    assert kinds.keys() == {"gone", "changed"}  # told apart, and nothing else happened


def test_a_pack_that_changes_under_a_mount_gives_no_wrong_byte_and_fails_no_other_read(
    after_changes: AfterChanges,
) -> None:
    outcome = after_changes.outcome
    assert outcome.wrong == outcome.short == []
    assert {offset for offset, _ in outcome.errors} == set().union(*after_changes.offsets.values())


def test_a_bit_flipped_in_a_stored_frame_fails_reads_of_that_chunk_only(
    mounts: Mounts, copied: "Saved", calm: Callable[[LiveMount], None]
) -> None:
    manifest = copied.pinned().manifest
    table, pages = manifest.table, manifest.files[-1]
    inside = [c for c in range(pages.first_chunk, len(table)) if table.pack[c] == 2 and table.codec[c] != Codec.ZERO]
    victims = {inside[5], inside[20]}
    for chunk in victims:
        with copied.packs()[2].open("r+b") as file:
            at = int(table.offset[chunk]) + int(table.frame_bytes[chunk]) // 2
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))
    base = int(table.start[pages.first_chunk])
    for prefetch in ("none", "all"):
        with mounts.start(copied.url, prefetch=prefetch, options=["--no-cache"]) as mount:
            outcome = mount.reader(copied.pages, read_bytes=64 << 10, go_on=True).outcome()
            assert outcome.wrong == outcome.short == []
            assert {offset for offset, _ in outcome.errors} == {int(table.start[c]) - base for c in victims}
            assert {error for _, error in outcome.errors} == {"EIO"}
            assert mount.status()["store_failures"].keys() == {"corrupt"}
            calm(mount)
    assert mounts.run("verify", copied.url).returncode == Exit.DAMAGED


def test_a_store_that_can_not_be_reached_at_the_start_is_exit_code_6(
    mounts: Mounts, uploaded: "Saved", proxy: FaultProxy, through: dict[str, str]
) -> None:
    proxy.refuse()
    mountpoint = mounts.mountpoint()
    words = ("mount", "--foreground", "--store-timeout", "1s", uploaded.url, mountpoint)
    code, message = mounts.refused(*words, env=through)
    assert code == Exit.UNREACHABLE
    assert "ConnectionRefused" in message
    # Refused by the store itself.
    proxy.accept()
    for status in (401, 403):
        rule = proxy.add(Rule(Status(status), times=None, reads_only=False))
        assert mounts.refused(*words, env=through)[0] == Exit.NOT_PERMITTED
        proxy.remove(rule)
    assert mountinfo.topmost(str(mountpoint)) is None
