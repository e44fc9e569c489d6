"""Bad input, from the image directory to the manifest in the store: refused clearly, before anything is mounted."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.images import checkpoint_img, make_image, pages_meta_img
from bench.mounts import Mounts
from streamd.errors import Exit
from streamd.fuse import mountinfo
from streamd.snapshot import envelope
from streamd.snapshot.manifest import FORMAT_VERSION, MAGIC

if TYPE_CHECKING:
    from tests.fuse.conftest import Saved

MIB = 1 << 20

# What `push` is given


def _remove(name: str) -> Callable[[Path], object]:
    return lambda image: (image / name).unlink()


def _empty(name: str) -> Callable[[Path], object]:
    return lambda image: os.truncate(image / name, 0)


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda image: (image / name).write_bytes(content)


def _replace_by_fifo(image: Path) -> None:
    (image / "pages.img").unlink()
    os.mkfifo(image / "pages.img")


IMAGES: dict[str, tuple[Callable[[Path], object], Exit, str]] = {
    "not an image directory": (_remove("checkpoint.img"), Exit.REFUSED, "not an image directory"),
    "checkpoint.img of something else": (_write("checkpoint.img", b"x" * 5000), Exit.REFUSED, "not an image directory"),
    "without pages.img": (_remove("pages.img"), Exit.REFUSED, "pages.img"),
    "empty checkpoint.img": (_empty("checkpoint.img"), Exit.REFUSED, "empty"),
    "empty pages_meta.img": (_empty("pages_meta.img"), Exit.REFUSED, "empty"),
    "empty pages.img": (_empty("pages.img"), Exit.REFUSED, "empty"),
    "truncated pages.img": (lambda image: os.truncate(image / "pages.img", MIB), Exit.DAMAGED, "pages_meta.img"),
    "pages_meta that disagrees": (_write("pages_meta.img", pages_meta_img(3 * MIB)), Exit.DAMAGED, "pages_meta.img"),
    "truncated pages_meta.img": (lambda image: os.truncate(image / "pages_meta.img", 40), Exit.DAMAGED, "pages_meta"),
    "compressed by gVisor": (
        _write("checkpoint.img", checkpoint_img(compression="flate-best-speed")),
        Exit.REFUSED,
        "--compression=none",
    ),
    "pages.img a FIFO": (_replace_by_fifo, Exit.REFUSED, "not a regular file"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_a_bad_image_is_refused_before_anything_is_stored(mounts: Mounts, tmp_path: Path, name: str) -> None:
    spoil, exit_code, text = IMAGES[name]
    make_image(tmp_path / "image", 2 * MIB)
    spoil(tmp_path / "image")
    code, message = mounts.refused("push", tmp_path / "image", f"file://{tmp_path}/store")
    assert (code, text in message) == (exit_code, True), message
    assert not list((tmp_path / "store").rglob("*"))


# What `mount` finds in the store

_SIZES = struct.Struct("<III")
_PAYLOAD_AT = len(MAGIC) + 4


def _flip(at: float) -> Callable[[bytes], bytes]:
    """Flip one bit at that share of the manifest, without sealing it again."""

    def damage(manifest: bytes) -> bytes:
        changed = bytearray(manifest)
        changed[int(len(changed) * at)] ^= 0x20
        return bytes(changed)

    return damage


def _reseal(edit: Callable[[dict[str, Any]], object], version: int = FORMAT_VERSION) -> Callable[[bytes], bytes]:
    """Change the head and make all sizes and the SHA-256 right again, as a forger would."""

    def craft(manifest: bytes) -> bytes:
        payload = memoryview(manifest)[_PAYLOAD_AT : -envelope.DIGEST_BYTES]
        head_bytes, body_bytes, raw_bytes = _SIZES.unpack_from(payload)
        head = json.loads(bytes(payload[_SIZES.size : _SIZES.size + head_bytes]))
        edit(head)
        text = json.dumps(head).encode()
        body = payload[_SIZES.size + head_bytes :]
        return envelope.seal(MAGIC, version, (_SIZES.pack(len(text), body_bytes, raw_bytes), text, body))

    return craft


def _name(name: str) -> Callable[[bytes], bytes]:
    """Let pages.img have another name."""
    return _reseal(lambda head: head["files"][2].update(name=name))


def _huge_file(head: dict[str, Any]) -> None:
    head["files"][2]["size"] = 1 << 62


MANIFESTS: dict[str, tuple[Callable[[bytes], bytes], Exit, str]] = {
    "one flipped bit in the manifest's head": (_flip(0.1), Exit.DAMAGED, "SHA-256"),
    "one flipped bit in the chunk table": (_flip(0.9), Exit.DAMAGED, "SHA-256"),
    "manifest cut": (lambda manifest: manifest[:-1], Exit.DAMAGED, "SHA-256"),
    "manifest empty": (lambda manifest: b"", Exit.DAMAGED, "too short"),
    "unknown manifest version": (_reseal(lambda head: None, FORMAT_VERSION + 1), Exit.REFUSED, "format version"),
    "unknown required feature": (_reseal(lambda head: head.update(requires=["warp"])), Exit.REFUSED, "warp"),
    "file name with ..": (_name("../../etc/shadow"), Exit.DAMAGED, "files"),
    "file name with /": (_name("/etc/shadow"), Exit.DAMAGED, "files"),
    "file name with NUL": (_name("pages.img\0"), Exit.DAMAGED, "name"),
    "file name of 300 bytes": (_name("x" * 300), Exit.DAMAGED, "name"),
    "file name of gVisor's own choice of a bucket": (_name("gcs_opts.json"), Exit.DAMAGED, "files"),
    "a file of 4 EiB": (_reseal(_huge_file), Exit.DAMAGED, "files[2].size"),
    "another snapshot's id": (_reseal(lambda head: head.update(id="other")), Exit.DAMAGED, "other"),
    "an id with ..": (_reseal(lambda head: head.update(id="../x")), Exit.DAMAGED, "id"),
    "a push id with ..": (_reseal(lambda head: head.update(push_id="../x")), Exit.DAMAGED, "push"),
}


@pytest.fixture(scope="module")
def spoiled(
    saved: "Saved", copy_of: Callable[["Saved", Path], "Saved"], tmp_path_factory: pytest.TempPathFactory
) -> "Saved":
    """A store whose manifest the rows replace, one after another."""
    return copy_of(saved, tmp_path_factory.mktemp("spoiled"))


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_bad_manifest_is_refused_by_name_and_nothing_is_mounted(
    mounts: Mounts, saved: "Saved", spoiled: "Saved", name: str
) -> None:
    assert saved.directory is not None
    assert spoiled.directory is not None
    craft, exit_code, text = MANIFESTS[name]
    manifest = (saved.directory / "small" / "manifest").read_bytes()
    (spoiled.directory / "small" / "manifest").write_bytes(craft(manifest))
    mountpoint = mounts.mountpoint()
    code, message = mounts.refused("mount", "--foreground", "--no-cache", spoiled.url, mountpoint)
    assert (code, text in message) == (exit_code, True), message
    assert mountinfo.topmost(str(mountpoint)) is None


def test_a_manifest_that_was_crafted_without_a_change_is_served(
    mounts: Mounts, saved: "Saved", spoiled: "Saved"
) -> None:
    """So that the rows above are refused for what they say they are."""
    assert saved.directory is not None
    assert spoiled.directory is not None
    manifest = (saved.directory / "small" / "manifest").read_bytes()
    (spoiled.directory / "small" / "manifest").write_bytes(_reseal(lambda head: None)(manifest))
    with mounts.start(spoiled.url, options=["--no-cache"]) as mount:
        assert spoiled.is_whole(mount.reader(spoiled.pages).outcome())


@pytest.mark.parametrize(
    ("missing", "exit_code"), [("pack", Exit.DAMAGED), ("manifest", Exit.NOT_FOUND), ("store", Exit.UNREACHABLE)]
)
def test_what_is_missing_in_the_store_is_said_at_the_mount(
    mounts: Mounts, copied: "Saved", missing: str, exit_code: Exit
) -> None:
    assert copied.directory is not None
    match missing:
        case "pack":
            copied.packs()[1].unlink()
        case "manifest":
            (copied.directory / "small" / "manifest").unlink()
        case _:
            copied.directory.rename(f"{copied.directory}-away")
    options = ["--foreground", "--no-cache", "--store-timeout", "200ms"]
    code, message = mounts.refused("mount", *options, copied.url, mounts.mountpoint())
    assert code == exit_code, message
