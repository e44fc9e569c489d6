"""Addresses of stores and of snapshots."""

from pathlib import Path

import pytest

from streamd.errors import Exit, Refused
from streamd.store.directory import DirectoryStore
from streamd.store.gcs import GoogleStore
from streamd.store.opening import BadURL, open_store, split_snapshot_url
from streamd.store.port import Condition
from streamd.store.shaped import ShapedStore


@pytest.mark.parametrize(
    ("url", "kind", "opened"),
    [
        ("file:///var/lib/x", DirectoryStore, "file:///var/lib/x"),
        ("file:///var/lib/x/", DirectoryStore, "file:///var/lib/x"),
        ("file://localhost/x", DirectoryStore, "file:///x"),
        ("file:///with%20space", DirectoryStore, "file:///with%20space"),
        ("file:///x?latency=15ms&rate=100MB/s", ShapedStore, "file:///x?latency=15ms&rate=100MB/s"),
        ("gs://bucket", GoogleStore, "gs://bucket"),
        ("gs://bucket/some/prefix/", GoogleStore, "gs://bucket/some/prefix"),
    ],
)
def test_an_address_opens_its_kind_of_store(url: str, kind: type, opened: str) -> None:
    store = open_store(url)
    assert type(store) is kind
    assert store.url == opened


def test_a_percent_encoded_directory_is_the_decoded_one(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/a%20b%25").put("k", b"", condition=Condition.ABSENT)
    assert (tmp_path / "a b%" / "k").exists()


BAD = {
    "": "begins with gs:// or file://",
    "/var/lib/x": "begins with gs:// or file://",
    "s3://bucket/x": "no store is reached by s3://",
    "file://x/y": "must be absolute",
    "file:x": "must be absolute",
    "file://": "must be absolute",
    "file:///x#y": "not the address of a directory",
    "file:///x%00y": "not the address of a directory",
    "file:///x?speed=1MB/s": "unknown setting 'speed'",
    "file:///x?rate": "rate",
    "file:///x?rate=": "rate= is not a number",
    "file:///x?rate=100": "rate=100 is not a number with one of the units",
    "file:///x?rate=0MB/s": "more than 0",
    "file:///x?rate=1MB/s&rate=2MB/s": "given twice",
    "file:///x?latency=15": "latency=15 is not a number",
    "file:///x?latency=-1ms": "latency=-1ms is not a number",
    "file:///x?latency=1e9s": "latency=1e9s is not a number",
    "gs://": "not the name of a bucket",
    "gs://Bucket/x": "not the name of a bucket",
    "gs://bucket:80/x": "not the name of a bucket",
    "gs://bucket/a//b": "can't be a prefix",
    "gs://bucket/../x": "can't be a prefix",
    "gs://bucket/x?rate=1MB/s": "no query",
}


@pytest.mark.parametrize("url", BAD)
def test_a_bad_address_is_a_usage_error_that_says_why(url: str) -> None:
    with pytest.raises(BadURL) as caught:
        open_store(url)
    assert BAD[url] in str(caught.value)
    assert caught.value.exit_code is Exit.USAGE


@pytest.mark.parametrize(
    ("latency", "rate", "latency_s", "bytes_per_s"),
    [("15ms", "100MB/s", 0.015, 1e8), ("0.5s", "2Gbit/s", 0.5, 2.5e8), ("100us", "1MiB/s", 1e-4, 2**20)],
)
def test_settings_have_units(latency: str, rate: str, latency_s: float, bytes_per_s: float) -> None:
    store = open_store(f"file:///x?latency={latency}&rate={rate}")
    assert isinstance(store, ShapedStore)
    assert store.latency_s == pytest.approx(latency_s)
    assert store.bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ("url", "store_url", "snapshot_id"),
    [
        ("gs://bucket/prefix/web-1", "gs://bucket/prefix", "web-1"),
        ("gs://bucket/web-1/", "gs://bucket", "web-1"),
        ("file:///dir/web-1", "file:///dir", "web-1"),
        ("file:///web-1", "file:///", "web-1"),
        ("file:///dir/web-1?latency=15ms&rate=1MB/s", "file:///dir?latency=15ms&rate=1MB/s", "web-1"),
    ],
)
def test_a_snapshots_address_is_its_stores_and_its_id(url: str, store_url: str, snapshot_id: str) -> None:
    assert split_snapshot_url(url) == (store_url, snapshot_id)
    open_store(store_url)


@pytest.mark.parametrize("url", ["", "web-1", "gs://bucket", "file://", "gs://bucket/"])
def test_an_address_without_an_id_is_a_usage_error(url: str) -> None:
    with pytest.raises(BadURL):
        split_snapshot_url(url)


@pytest.mark.parametrize("url", ["gs://bucket/x/Web", "file:///dir/..", "file:///dir/a%2Fb", "gs://b/_clock"])
def test_what_can_be_no_id_is_refused(url: str) -> None:
    with pytest.raises(Refused, match="must match"):
        split_snapshot_url(url)


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_the_emulators_variable_is_honoured_with_and_without_a_scheme(
    emulator: object, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"{scheme}127.0.0.1:{emulator.port}")  # type: ignore[attr-defined]
    store = open_store(f"gs://bucket/opening{len(scheme)}")
    info = store.put("k", b"abc", condition=Condition.ABSENT)
    assert list(store.list("")) == [info]
    assert b"".join(store.read("k", generation=info.generation, start=1, end=3)) == b"bc"
    store.close()


@pytest.mark.parametrize(
    "url", ["file:///a b/x", "file:///a\nb/x", "file:///\u3000/x", "gs://bucket/\u00fc/x", " file:///a/x"]
)
def test_an_address_is_visible_ascii_and_the_rest_is_percent_encoded(url: str) -> None:
    for ask in (open_store, split_snapshot_url):
        with pytest.raises(BadURL, match="percent-encode"):
            ask(url)
    assert open_store("file:///a%20b").url == "file:///a%20b"
