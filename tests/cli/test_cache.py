"""`streamd cache` as its users see it: what is kept, pinned, cleared."""

import shutil
from typing import TYPE_CHECKING

import pytest

from streamd.errors import Exit

if TYPE_CHECKING:
    from tests.cli.conftest import Streamd

KEY = "0123456789abcdef" * 4


@pytest.fixture
def kept(streamd: "Streamd") -> str:
    """Put an image that no mount uses into the cache; give its name."""
    from streamd.serve.node_cache import CACHE_FORMAT

    path = streamd.base / "cache" / "images" / KEY
    (streamd.base / "cache").mkdir(mode=0o700)
    path.mkdir(mode=0o700, parents=True)
    (path / "head").write_text(f'{{"format": {CACHE_FORMAT}}}')
    (path / "lock").touch()
    return KEY


def test_a_pinned_image_is_shown_and_stays_until_it_is_unpinned(streamd: "Streamd", kept: str) -> None:
    assert streamd.ok("cache", "pin", kept) == {"key": kept, "is_pinned": True}
    [image] = streamd.ok("cache", "ls")["images"]
    assert (image["key"], image["is_pinned"]) == (kept, True)
    assert "yes" in streamd.run("cache", "ls").stdout
    error = streamd.refused("cache", "clear", "--image", kept)
    assert error["exit_code"] == Exit.REFUSED
    assert f"streamd cache unpin {kept}" in error["message"]
    cleared = streamd.ok("cache", "clear")
    assert (cleared["removed"], cleared["in_use"]) == ([], [])
    assert [image["key"] for image in cleared["pinned"]] == [kept]
    assert f"{kept} stays: it is pinned" in streamd.run("cache", "clear").stdout

    assert streamd.ok("cache", "unpin", kept) == {"key": kept, "is_pinned": False}
    assert [image["key"] for image in streamd.ok("cache", "clear")["removed"]] == [kept]


@pytest.mark.parametrize("key", [KEY[::-1], "../images", ""])
@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_what_is_not_there_is_not_found(streamd: "Streamd", kept: str, command: str, key: str) -> None:
    assert streamd.refused("cache", command, key)["exit_code"] == Exit.NOT_FOUND


def test_an_image_that_no_mount_could_be_made_of_is_reported_and_removed_by_a_check(
    streamd: "Streamd", kept: str
) -> None:
    assert streamd.refused("cache", "verify")["exit_code"] == Exit.DAMAGED
    assert streamd.ok("cache", "ls")["images"] == []


def test_a_name_may_be_shortened_to_what_is_one_images(streamd: "Streamd", kept: str) -> None:
    other = streamd.base / "cache" / "images" / f"{KEY[:-1]}0"
    shutil.copytree(streamd.base / "cache" / "images" / kept, other)
    assert streamd.refused("cache", "pin", kept[:5])["exit_code"] == Exit.REFUSED
    shutil.rmtree(other)
    assert streamd.ok("cache", "pin", kept[:5])["key"] == kept
    assert streamd.ok("cache", "unpin", kept[:5])["key"] == kept
    assert [image["key"] for image in streamd.ok("cache", "clear", "--image", kept[:5])["removed"]] == [kept]
