"""Whose token a bucket is asked with: what the configuration names most closely, and else the node's own."""

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from agent.config import ConfigError, parse
from agent.node.daemon import assembled
from agent.node.events import What
from agent.node.images import StreamdImages
from agent.node.store_access import NamespaceUploader, NotADirectory, StoreAccess
from bench.emulator import Emulator
from bench.fault_proxy import Delay, FaultProxy, Rule, Status
from streamd.errors import StoreError, StoreErrorKind, StreamdError, Unreachable
from streamd.store.port import Condition
from tests.agentd.conftest import Node, until

NAMED = [
    {"namespace": "shop", "bucket": "bbb", "token_file": "/t/shop-b"},
    {"namespace": "shop", "token_file": "/t/shop"},
    {"bucket": "bbb", "token_file": "/t/b"},
    {"bucket": "ccc", "token_command": ["/usr/libexec/token", "c"]},
]
# (store, namespace) → what streamd is told.
CASES: dict[tuple[str, str], object] = {
    ("gs://bbb/x", "shop"): {"token_file": "/t/shop-b"},
    ("gs://ccc/x", "shop"): {"token_file": "/t/shop"},
    ("gs://bbb/x", "blog"): {"token_file": "/t/b"},
    ("gs://bbb", ""): {"token_file": "/t/b"},
    ("gs://ccc/x/y", "blog"): {"command": ["/usr/libexec/token", "c"]},
    ("gs://ddd/x", "blog"): None,
    ("gs://ddd/x", ""): None,
    ("file:///b/x", "shop"): None,
}


@pytest.mark.parametrize(("store_url", "namespace"), CASES)
def test_the_namespace_counts_for_more_than_the_bucket(store_url: str, namespace: str) -> None:
    access = StoreAccess(parse({"credentials": NAMED}, source="x").credentials)
    assert access.credentials(store_url, namespace) == CASES[store_url, namespace]


def test_what_is_named_for_all_is_for_all() -> None:
    access = StoreAccess(parse({"credentials": [{"token_file": "/t/all"}]}, source="x").credentials)
    assert access.credentials("gs://ddd/x", "blog") == {"token_file": "/t/all"}


BAD: dict[str, list[dict[str, object]]] = {
    "nothing": [{"bucket": "bbb"}],
    "both": [{"token_file": "/t", "token_command": ["/c"]}],
    "a relative file": [{"token_file": "t"}],
    "a relative command": [{"token_command": ["print-token"]}],
    "no list": [{"token_command": "/c"}],
    "an empty list": [{"token_command": []}],
    "a token": [{"token": "ya29.secret"}],
    "no namespace": [{"namespace": "../x", "token_file": "/t"}],
    "no bucket": [{"bucket": "B/x", "token_file": "/t"}],
    "twice": [{"namespace": "shop", "token_file": "/a"}, {"namespace": "shop", "token_file": "/b"}],
}


@pytest.mark.parametrize("case", BAD)
def test_what_names_no_credentials_is_refused(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"credentials": BAD[case]}, source="x")
    assert all(problem.startswith("credentials[") for problem in caught.value.problems)
    # A member that isn't known leaves none that is.
    assert len(caught.value.problems) == (2 if case == "a token" else 1)
    assert "secret" not in str(caught.value)


def test_a_store_is_asked_with_the_token_that_the_file_has_now(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("first")
    with Emulator() as emulator, FaultProxy(emulator.port) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", proxy.address)
        proxy.add(Rule(Delay(0.0), times=None, reads_only=False, token="second"))
        proxy.add(Rule(Status(401), times=None, reads_only=False))
        named: list[object] = [{"namespace": "shop", "token_file": str(file)}]
        access = StoreAccess(parse({"credentials": named}, source="x").credentials)

        def write(namespace: str) -> None:
            with closing(access.opened("gs://bucket/x", namespace)) as store:
                store.put("k", b"", condition=Condition.ANY)

        with pytest.raises(StoreError) as caught:
            write("shop")
        assert caught.value.store_kind is StoreErrorKind.CREDENTIALS
        file.write_text("second")
        write("shop")
        with pytest.raises(StoreError):
            write("blog")


# What is in the store's place, whether snapshots are known to be in it → what is said; None: it is opened.
DIRECTORIES: dict[tuple[str, bool], tuple[type[StreamdError], str] | None] = {
    ("nothing", False): (Unreachable, "there is no directory"),
    ("nothing", True): (Unreachable, "mount its file system, or make it"),
    ("a file", False): (NotADirectory, "is no directory"),
    ("a file", True): (NotADirectory, "but a file"),
    ("an empty directory", False): None,
    ("an empty directory", True): (Unreachable, "is its file system mounted?"),
    ("a store", False): None,
    ("a store", True): None,
}


@pytest.mark.parametrize(("there", "is_known"), DIRECTORIES)
async def test_a_directory_is_taken_for_a_store_only_if_it_may_be_the_one_that_was_meant(
    tmp_path: Path, there: str, is_known: bool
) -> None:
    path = tmp_path / "a store"
    match there:
        case "a file":
            path.touch()
        case "an empty directory":
            path.mkdir()
        case "a store":
            path.mkdir()
            (path / "_clock").touch()
    access = StoreAccess()
    access.has_snapshots = lambda _: is_known
    url = f"file://{tmp_path}/a%20store"
    expected = DIRECTORIES[there, is_known]
    for ask in (StreamdImages(tmp_path, access).probe, partial(StreamdImages(tmp_path, access).collect, every_s=60.0)):
        if expected is None:
            await ask(url)
        else:
            with pytest.raises(expected[0], match=expected[1]):
                await ask(url)
    assert path.is_dir() == (there in ("an empty directory", "a store"))


def test_before_all_snapshots_are_known_an_empty_directory_may_be_another_than_it_was(node: Node) -> None:
    images = assembled(node.config)._images
    assert isinstance(images, StreamdImages)
    with pytest.raises(Unreachable, match="is its file system mounted"):
        images.access.opened(node.store_url)


async def test_a_push_makes_no_directory_and_is_tried_again(node: Node) -> None:
    node.uploader = NamespaceUploader(StoreAccess(), deadline_s=2.0)
    store = node.directory / "store"
    store.rmdir()
    node.write_policy("manual")
    async with node.running() as agent:
        await agent.decisions.create(node.create("web"))
        await agent.decisions.start(node.start("web"))
        node.write_trigger("now", "web")
        event = await node.event(What.SNAPSHOT_DELAYED)
        assert (event.reason, "there is no directory" in event.message) == ("StoreUnavailable", True)
        assert not store.exists()
        store.mkdir()
        await agent.recovery.look()
        await node.event(What.SNAPSHOT_READY)
        await until(lambda: agent.known.index.has_store(node.store_url), "the store's place in the index")
