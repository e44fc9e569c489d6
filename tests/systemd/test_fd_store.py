"""The account of what the manager keeps, and what it can't; the real store is in test_real_systemd.py."""

import os
from collections.abc import Iterator, Sequence

import pytest

from streamd.daemon.fd_store import FD_STORE_MAX, NAME_MAX_CHARACTERS, FdStore, FdStoreError, FdStoreFull
from streamd.daemon.service_manager import NotifyChannel


class Manager(NotifyChannel):
    """A channel whose other end is a list."""

    def __init__(self) -> None:
        super().__init__("/somewhere")
        self.sent: list[tuple[str, int]] = []
        self.is_broken = False

    def send(self, message: str, fds: Sequence[int] = (), *, timeout_s: float = 0.0) -> bool:
        """Note the message, and how many descriptors came with it."""
        if self.is_broken:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.sent.append((message, len(fds)))
        return True


@pytest.fixture
def fd() -> Iterator[int]:
    """Open something."""
    opened = os.open("/dev/null", os.O_RDONLY)
    yield opened
    os.close(opened)


def test_storing_says_that_errors_of_the_descriptor_play_no_part(fd: int) -> None:
    manager = Manager()
    store = FdStore(manager)
    assert store.store("fuse-1", [fd, fd])
    assert manager.sent == [("FDSTORE=1\nFDNAME=fuse-1\nFDPOLL=0", 2)]
    assert store.count == 2


def test_removing_takes_all_of_a_name(fd: int) -> None:
    manager = Manager()
    store = FdStore(manager, [("a", 3), ("a", 4), ("b", 5)])
    store.remove("a")
    assert manager.sent == [("FDSTOREREMOVE=1\nFDNAME=a", 0)]
    assert store.count == 1


def test_what_came_back_is_given_by_name_once_and_counts() -> None:
    store = FdStore(Manager(), [("a", 3), ("b", 4), ("a", 5), ("", 6)])
    assert store.take() == {"a": [3, 5], "b": [4], "": [6]}
    assert store.count == 4
    with pytest.raises(AssertionError):
        store.take()


def test_a_message_has_no_more_descriptors_than_the_kernel_passes(fd: int) -> None:
    manager = Manager()
    store = FdStore(manager)
    store.store("many", [fd] * 600)
    assert [count for _message, count in manager.sent] == [253, 253, 94]
    assert store.count == 600


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "é", "a b", "x" * (NAME_MAX_CHARACTERS + 1), "a/b", "٣"])
def test_a_name_that_would_not_come_back_is_a_bug(name: str) -> None:
    store = FdStore(Manager())
    with pytest.raises(ValueError, match="no name"):
        store.store(name, [])
    with pytest.raises(ValueError, match="no name"):
        store.remove(name)


def test_a_store_that_is_full_is_known_beforehand(fd: int) -> None:
    manager = Manager()
    store = FdStore(manager, [("a", 3)], capacity=3)
    store.store("b", [fd])
    with pytest.raises(FdStoreFull, match="2 of 3"):
        store.store("c", [fd, fd])
    assert len(manager.sent) == 1
    store.remove("b")
    assert store.store("c", [fd, fd])


def test_a_store_of_unknown_size_is_taken_for_ours(fd: int) -> None:
    store = FdStore(Manager())
    store.store("x", [fd] * FD_STORE_MAX)
    with pytest.raises(FdStoreFull):
        store.store("x", [fd])


def test_names_never_outgrow_what_a_start_can_be_given(fd: int) -> None:
    """Also where a drop-in has made the store larger."""
    store = FdStore(Manager(), capacity=100_000)
    longest = "x" * NAME_MAX_CHARACTERS
    store.store(longest, [fd] * 2080)
    with pytest.raises(FdStoreFull, match="could not be started"):
        store.store(longest, [fd])
    assert store.store("y", [fd])


def test_without_a_manager_or_a_store_nothing_is_kept(fd: int) -> None:
    for store in (FdStore(NotifyChannel(None)), FdStore(Manager(), capacity=0)):
        assert not store.is_there
        assert not store.store("a", [fd])
        store.remove("a")
        assert store.count == 0


def test_what_could_not_be_stored_is_an_error_and_does_not_count(fd: int) -> None:
    manager = Manager()
    store = FdStore(manager)
    store.store("a", [fd])
    manager.is_broken = True
    with pytest.raises(FdStoreError, match="did not take b"):
        store.store("b", [fd])
    with pytest.raises(FdStoreError, match="did not take a"):
        store.remove("a")
    assert store.count == 1
