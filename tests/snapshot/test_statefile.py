"""checkpoint.img's head: real ones, and what is no such head."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.errors import Damaged
from streamd.snapshot.statefile import PREFIX_BYTES, StatefileHead, decode_head, head_bytes


def head(metadata: object, *, magic: bytes = b"gVisorSF", length: int | None = None) -> bytes:
    """Write a head as gVisor does."""
    text = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    return struct.pack(">8sQ", magic, len(text) if length is None else length) + text


def metadata(**changed: object) -> dict[str, object]:
    """Give what gVisor says of an image of one container."""
    specs = {"web": {"process": {"env": ["TOKEN=secret"]}}}
    return {
        "runsc_version": "release-1",
        "compression": "none",
        "network": "sandbox",
        "container_count": "1",
        "container_specs": json.dumps(specs),
    } | changed


@pytest.mark.parametrize(
    ("name", "names", "compression"),
    [
        ("readonly", ("__no_name_0",), "none"),
        ("writable", ("__no_name_0",), "none"),
        ("pod", ("first", "second"), "none"),
        ("flate", ("__no_name_0",), "flate-best-speed"),
    ],
)
def test_a_real_head_is_read(name: str, names: tuple[str, ...], compression: str, here: Path) -> None:
    data = (here / "fixtures" / f"{name}.checkpoint.head").read_bytes()
    assert head_bytes(data[:PREFIX_BYTES]) == len(data)
    found = decode_head(data + b"the object graph")
    assert found.timestamp.startswith("20")
    assert found == StatefileHead(
        runsc_version="VERSION_MISSING",
        compression=compression,
        network="none",
        container_count=len(names),
        container_names=names,
        timestamp=found.timestamp,
    )
    assert found.compressed == (compression != "none")


def test_no_environment_is_kept() -> None:
    assert "secret" not in repr(decode_head(head(metadata())))
    assert decode_head(head(metadata())).container_names == ("web",)


def test_missing_keys_have_the_values_that_gvisor_takes() -> None:
    least = {key: value for key, value in metadata().items() if key.startswith("container_")}
    found = decode_head(head(least))
    assert (found.runsc_version, found.compression, found.network) == ("", "none", "sandbox")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"gVisorSF\0\0\0", "too short"),
        (head(metadata(), magic=b"gVisorSG"), "magic"),
        (bytes(4096), "magic"),
        (head(metadata(), length=2**64 - 1), "metadata length"),
        (head(metadata(), length=(16 << 20) + 1), "metadata length"),
        (head(metadata())[:-1], "cut"),
        (head(b"[]"), "not an object"),
        (head(b"{"), "not JSON"),
        (head(b'{"a":"1","a":"2"}'), "twice"),
        (head(metadata(container_count=1)), "container_count"),
        (head(metadata(container_count="-1")), "container_count"),
        (head(metadata(container_count="\u0661")), "container_count"),
        (head(metadata(container_specs={})), "container_specs"),
        (head(metadata(container_specs="[]")), "container_specs"),
        (head(metadata(container_specs="\ud800")), "container_specs"),
        (head(metadata(container_specs=json.dumps({"a\x1b[0m": {}}))), "container_specs.*control characters"),
        (head(metadata(container_specs=json.dumps({"a" * 1025: {}}))), "container_specs.*1025 characters"),
        (head(metadata(container_specs=json.dumps(dict.fromkeys(map(str, range(2**16 + 1)))))), "65537 members"),
        (head({"container_count": "1"}), "container_specs: missing"),
        (head(metadata(runsc_version="a\x1b[0m")), "runsc_version"),
        (head(metadata(network=["none"])), "network"),
        (head(metadata(container_specs='{"a":' + "[" * 9999 + "]" * 9999 + "}")), "nested"),
    ],
)
def test_what_is_no_head_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(Damaged, match=says):
        decode_head(data)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused_calmly(data: bytes) -> None:
    for attempt in (data, b"gVisorSF" + data, head(data)):
        with pytest.raises(Damaged, match="checkpoint"):
            decode_head(attempt)
