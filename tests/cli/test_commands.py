"""The commands on a directory store, from push to gc, as their users run them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from streamd.commands.invocation import opened_store
from streamd.commands.output import print_facts
from streamd.errors import StoreError, StoreErrorKind

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd


def test_what_was_pushed_is_listed_inspected_verified_and_pulled(
    streamd: "Streamd", image: Path, tmp_path: Path
) -> None:
    store = f"file://{streamd.base}/store"
    pushed = streamd.ok("push", image, store, "--id", "web-1", "--metadata", "app=web", "--metadata", "note=a=b")
    url = pushed["url"]
    size = sum(file.stat().st_size for file in image.iterdir())
    assert url == f"{store}/web-1"
    assert pushed["image_bytes"] == size
    assert 0 < pushed["stored_bytes"] < size / 2

    [listed] = streamd.ok("ls", store)["snapshots"]
    assert (listed["id"], listed["state"], listed["image_bytes"]) == ("web-1", "ok", size)
    assert listed["stored_bytes"] == pushed["stored_bytes"]

    inspected = streamd.ok("inspect", url)
    assert {file["name"]: file["bytes"] for file in inspected["files"]} == {
        file.name: file.stat().st_size for file in image.iterdir()
    }
    assert inspected["metadata"] == {"app": "web", "note": "a=b"}
    assert inspected["gvisor"]["runsc_version"] == "test-1"
    assert inspected["gvisor"]["containers"] == ["web"]
    assert inspected["gvisor"]["memory_files"] == [
        {"private": False, "ranges": 1, "bytes_by_kind": {"anonymous": 600 * 4096}}
    ]
    assert sum(inspected["chunks"].values()) == sum(file["chunks"] for file in inspected["files"])
    assert inspected["zero_bytes"] == 2 * inspected["chunk_bytes"]  # 200 zero pages hold two whole chunks
    assert "SECRET" not in str(inspected)

    assert streamd.ok("verify", url)["chunks"] == sum(inspected["chunks"].values())

    copy = tmp_path / "copy"
    streamd.ok("pull", url, copy)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == {
        file.name: file.read_bytes() for file in image.iterdir()
    }


def test_people_get_text(streamd: "Streamd", snapshot: str) -> None:
    store = snapshot.rpartition("/")[0]
    listed = streamd.run("ls", store)
    assert re.search(r"^web-1 +ok +20\d\d-\S+ \S+ +2\.3 MiB +\d+\.\d %$", listed.stdout, re.MULTILINE)
    inspected = streamd.run("inspect", snapshot)
    assert re.search(r"^runsc +test-1$", inspected.stdout, re.MULTILINE)
    assert re.search(r"^pages\.img +2457600 +\d+ +10$", inspected.stdout, re.MULTILINE)
    assert streamd.run("verify", snapshot).stdout.endswith("all as they should be\n")


def test_what_a_snapshot_holds_can_not_write_on_the_terminal(streamd: "Streamd", image: Path) -> None:
    store = f"file://{streamd.base}/store"
    url = streamd.ok("push", image, store, "--metadata", "bad\x1b[2J\nkey=bad\x1b[2J\nvalue")["url"]
    shown = streamd.run("inspect", url).stdout
    assert "\x1b" not in shown
    assert re.search(r"^metadata bad\\x1b\[2J\\nkey  bad\\x1b\[2J\\nvalue$", shown, re.MULTILINE)


def test_facts_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("cache", None), ("ok", True), ("bad", False), ("pid", 1)])
    assert capsys.readouterr().out == "cache  –\nok     yes\nbad    no\npid    1\n"


def test_what_a_store_answers_can_not_write_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FailsOnce:
        def close(self) -> None:
            pass

    def retrying(store: object, *, deadline_s: float, on_retry: Callable[[StoreError, float], None]) -> object:
        on_retry(StoreError(StoreErrorKind.TRANSIENT, "", "503 \x1b[2J"), 1.0)
        return store

    monkeypatch.setattr("streamd.store.opening.open_store", lambda _, *, is_used: FailsOnce())
    monkeypatch.setattr("streamd.store.retry.retrying", retrying)
    with opened_store("file:///x", timeout_s=1.0):
        pass
    assert "(503 \\x1b[2J); trying again" in capsys.readouterr().err


def test_rm_now_says_whose_restores_it_ended(streamd: "Streamd", snapshot: str) -> None:
    lease = streamd.base / "store" / "web-1" / "lease" / "node-7"
    lease.parent.mkdir()
    lease.write_bytes(b"")
    result = streamd.run("rm", snapshot, "--now")
    assert result.returncode == 0
    assert "it was being read, and those restores fail, by: node-7" in result.stderr


def test_push_prints_its_ids_first_and_takes_them_again(streamd: "Streamd", image: Path) -> None:
    store = f"file://{streamd.base}/store"
    first = streamd.run("push", image, store)
    ids = re.match(r"snapshot (\S+), push (\S+)\n", first.stderr)
    assert ids
    again = streamd.ok("push", image, store, "--id", ids[1], "--push-id", ids[2])
    assert again["was_there"]
    assert (again["snapshot_id"], again["push_id"]) == ids.groups()


def test_a_store_address_keeps_its_query_behind_the_snapshots_id(streamd: "Streamd", image: Path) -> None:
    pushed = streamd.ok("push", image, f"file://{streamd.base}/store?latency=1ms&rate=1GB/s", "--id", "web-1")
    assert pushed["url"] == f"file://{streamd.base}/store/web-1?latency=1ms&rate=1GB/s"
    assert streamd.ok("inspect", pushed["url"])["id"] == "web-1"


def test_push_records_the_runsc_that_it_is_given(streamd: "Streamd", image: Path, tmp_path: Path) -> None:
    runsc = tmp_path / "runsc"
    runsc.write_text('#!/bin/sh\n[ "$1" = cpu-features ] && printf sse,avx2,fpu\n')
    runsc.chmod(0o755)
    url = streamd.ok("push", image, f"file://{streamd.base}/store", "--runsc", runsc)["url"]
    gvisor = streamd.ok("inspect", url)["gvisor"]
    assert gvisor["cpu_features"] == ["avx2", "fpu", "sse"]
    assert len(gvisor["runsc_sha256"]) == 64


def test_a_removed_snapshot_is_gone_for_everyone_and_gc_takes_its_data(streamd: "Streamd", snapshot: str) -> None:
    store = snapshot.rpartition("/")[0]
    streamd.ok("rm", snapshot, "--now")
    assert streamd.refused("inspect", snapshot)["exit_code"] in (3, 7)
    assert [entry["state"] for entry in streamd.ok("ls", store)["snapshots"]] in ([], ["removing"])
    assert "objects_deleted" in streamd.ok("gc", store, "--grace", "0s")
    assert not list((streamd.base / "store").rglob("packs/**/0*"))


def test_help_of_every_command_has_an_example_and_imports_no_client(streamd: "Streamd") -> None:
    top = streamd.run("--help")
    names = re.findall(r"^  ([a-z]+)  +[A-Z]", top.stdout.partition("Commands:")[2], re.MULTILINE)
    saving = {"push", "pull", "ls", "inspect", "verify", "rm", "gc"}
    serving = {"mount", "umount", "status", "fail", "cache", "trace", "report"}
    assert saving | serving | {"daemon", "image", "top", "events", "drain"} == set(names)
    for name in names:
        shown = streamd.run(name, "--help")
        assert shown.returncode == 0
        assert f"streamd {name} " in shown.stdout.partition("Example:")[2]


def test_help_quotes_what_a_shell_would_take_apart_and_says_what_takes_time(streamd: "Streamd") -> None:
    def help_of(*command: str) -> str:
        return " ".join(streamd.run(*command, "--help").stdout.split())

    texts = {name: help_of(*name.split()) for name in ("", "mount", "umount", "fail", "push")}
    for text in texts.values():
        assert "&" not in re.sub(r"'[^']*'", "", text)
    assert "'file:///dir?latency=15ms&rate=100MB/s'" in texts[""]
    for name in ("umount", "fail"):
        assert "runsc needs a second or two to report" in texts[name]
    assert "the first waits for open files, up to 10 s, the second fails their reads" in texts["mount"]
