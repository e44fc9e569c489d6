"""Sealed memfds."""

import fcntl
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.daemon.memfds import MEMFD_MAX_BYTES, BadMemfd, bytes_of, memfd_of


@given(st.binary(max_size=5000))
def test_bytes_come_back(data: bytes) -> None:
    fd = memfd_of(data)
    try:
        assert bytes_of(fd) == data
        os.lseek(fd, 3, os.SEEK_SET)
        assert bytes_of(fd) == data
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_nobody_can_change_them() -> None:
    fd = memfd_of(b"as it is")
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        for change in (
            lambda: os.pwrite(again, b"x", 0),
            lambda: os.ftruncate(again, 0),
            lambda: os.ftruncate(again, 100),
            lambda: fcntl.fcntl(again, fcntl.F_ADD_SEALS, 0),
        ):
            with pytest.raises(PermissionError):
                change()
        assert bytes_of(fd) == b"as it is"
    finally:
        os.close(again)
        os.close(fd)


def test_size_is_bounded_both_ways() -> None:
    with pytest.raises(ValueError, match="too many"):
        memfd_of(bytes(MEMFD_MAX_BYTES + 1))
    fd = memfd_of(bytes(MEMFD_MAX_BYTES))
    os.close(fd)
    large = os.memfd_create("large", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(large, MEMFD_MAX_BYTES + 1)
        fcntl.fcntl(large, fcntl.F_ADD_SEALS, 15)
        with pytest.raises(BadMemfd, match="65537 bytes"):
            bytes_of(large)
    finally:
        os.close(large)


def test_what_is_not_sealed_is_not_ours() -> None:
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    reading, writing = os.pipe()
    try:
        for fd in (unsealed, reading, 1_000_000):
            with pytest.raises(BadMemfd):
                bytes_of(fd)
    finally:
        for fd in (unsealed, reading, writing):
            os.close(fd)


def test_writing_fails_closes_the_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="null"):
        memfd_of(b"x", "a\0b")
    assert os.listdir("/proc/self/fd") == before
