"""A pinned snapshot that the next worker gets from the last one."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.images import make_image
from streamd.daemon.keepsake import decode_pinned, encode_pinned
from streamd.errors import Damaged
from streamd.save.push import push
from streamd.store.catalog import Pinned, open_snapshot
from streamd.store.directory import DirectoryStore


@pytest.fixture
def pinned(tmp_path: Path) -> Pinned:
    make_image(tmp_path / "image", 1 << 20)
    store = DirectoryStore(str(tmp_path / "store"))
    push(tmp_path / "image", store, snapshot_id="a", push_id="p")
    return open_snapshot(store, "a")


def facts(pinned: Pinned) -> tuple[object, ...]:
    return (pinned.data, pinned.digest, pinned.manifest_info, pinned.packs, pinned.trace, pinned.manifest.snapshot_id)


def test_it_is_the_same_snapshot_at_the_same_versions(pinned: Pinned) -> None:
    assert facts(decode_pinned(encode_pinned(pinned))) == facts(pinned)
    learned = replace(pinned, trace=replace(pinned.packs[0], key="a/trace", crc32c=7))
    assert facts(decode_pinned(encode_pinned(learned))) == facts(learned)


def test_what_is_cut_or_changed_is_damaged(pinned: Pinned) -> None:
    whole = encode_pinned(pinned)
    for cut in (0, 3, 50, len(whole) - 1):
        with pytest.raises(Damaged):
            decode_pinned(whole[:cut])
    for at in (4, 40, len(whole) - 40):
        with pytest.raises(Damaged):
            decode_pinned(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
    fewer = replace(pinned, packs=())
    with pytest.raises(Damaged, match="packs"):
        decode_pinned(encode_pinned(fewer))
