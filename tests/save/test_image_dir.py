"""Which directories are taken for images, and what is said of the others."""

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.images import checkpoint_img, make_image, pages_meta_img
from streamd.errors import Exit, Refused, StreamdError
from streamd.save.image_dir import check_image_dir, open_image_dir

PAGES_BYTES = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    make_image(path, PAGES_BYTES, private_bytes=8192)
    return path


def _truncate(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def _compressed(directory: Path) -> None:
    (directory / "checkpoint.img").write_bytes(checkpoint_img(compression="flate-best-speed"))
    (directory / "pages_meta.img").unlink()
    (directory / "pages.img").unlink()


def _replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return damage


def _link(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(checkpoint_img())
    path.symlink_to("elsewhere")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_bytes(b"")


def _empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


# What was done to a good directory: the exit code and a part of the message.
BAD: dict[str, tuple[Callable[[Path], object], Exit, str]] = {
    "no directory": (shutil.rmtree, Exit.NOT_FOUND, "does not exist"),
    "a file": (_file, Exit.REFUSED, "not a directory"),
    "an empty directory": (_empty, Exit.REFUSED, "has no checkpoint.img"),
    "no checkpoint.img": (lambda d: (d / "checkpoint.img").unlink(), Exit.REFUSED, "has no checkpoint.img"),
    "no pages_meta.img": (lambda d: (d / "pages_meta.img").unlink(), Exit.REFUSED, "has no pages_meta.img"),
    "no pages.img": (lambda d: (d / "pages.img").unlink(), Exit.REFUSED, "has no pages.img"),
    "an empty checkpoint.img": (lambda d: os.truncate(d / "checkpoint.img", 0), Exit.REFUSED, "is empty"),
    "an empty pages_meta.img": (lambda d: os.truncate(d / "pages_meta.img", 0), Exit.REFUSED, "is empty"),
    "an empty pages.img": (lambda d: os.truncate(d / "pages.img", 0), Exit.REFUSED, "is empty"),
    "a checkpoint.img that is no statefile": (
        lambda d: (d / "checkpoint.img").write_bytes(b"\x7fELF" * 100),
        Exit.REFUSED,
        "not an image directory",
    ),
    "a short checkpoint.img": (lambda d: os.truncate(d / "checkpoint.img", 12), Exit.DAMAGED, "checkpoint.img"),
    "a head that is cut": (lambda d: os.truncate(d / "checkpoint.img", 50), Exit.DAMAGED, "checkpoint.img"),
    "an image that gVisor compressed": (_compressed, Exit.REFUSED, "--compression=none"),
    "a truncated pages.img": (lambda d: _truncate(d / "pages.img", 4096), Exit.DAMAGED, "sum to 1048576 bytes"),
    "a pages.img that is too long": (
        lambda d: os.truncate(d / "pages.img", PAGES_BYTES + 4096),
        Exit.DAMAGED,
        "pages.img has 1052672",
    ),
    "a pages_meta.img of another image": (
        lambda d: (d / "pages_meta.img").write_bytes(pages_meta_img(2 * PAGES_BYTES)),
        Exit.DAMAGED,
        "sum to 2097152 bytes",
    ),
    "a pages_meta.img without the private file": (
        lambda d: (d / "pages_meta.img").write_bytes(pages_meta_img(PAGES_BYTES - 8192)),
        Exit.DAMAGED,
        "sum to",
    ),
    "a truncated pages_meta.img": (lambda d: _truncate(d / "pages_meta.img", 3), Exit.DAMAGED, "pages_meta.img"),
    "a checkpoint.img that no mount could hold": (
        lambda d: os.truncate(d / "checkpoint.img", (256 << 20) + 1),
        Exit.REFUSED,
        "268435457 bytes are too many",
    ),
    "a pages_meta.img that no mount could hold": (
        lambda d: os.truncate(d / "pages_meta.img", (64 << 20) + 1),
        Exit.REFUSED,
        "67108865 bytes are too many",
    ),
    "a container whose name can't be printed": (
        lambda d: (d / "checkpoint.img").write_bytes(checkpoint_img(container_names=("a\x1b[2J",))),
        Exit.DAMAGED,
        "control characters",
    ),
    "a symbolic link": (_replace("checkpoint.img", _link), Exit.REFUSED, "symbolic link"),
    "a FIFO": (_replace("pages.img", os.mkfifo), Exit.REFUSED, "not a regular file"),
    "a directory for a file": (_replace("pages.img", Path.mkdir), Exit.REFUSED, "not a regular file"),
    "a socket": (_replace("pages_meta.img", _socket), Exit.REFUSED, "not a regular file"),
    "a device": (
        _replace("pages.img", lambda p: os.mknod(p, 0o600 | stat.S_IFCHR, os.makedev(1, 3))),
        Exit.REFUSED,
        "not a regular file",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_directory_that_is_no_image_is_refused_and_told_why(case: str, directory: Path) -> None:
    damage, code, message = BAD[case]
    damage(directory)
    with pytest.raises(StreamdError, match=message) as caught:
        check_image_dir(directory)
    assert caught.value.exit_code is code
    assert str(directory) in str(caught.value) or ".img" in str(caught.value)


def test_of_a_good_directory_sizes_names_and_all_memory_files_are_told(directory: Path) -> None:
    (directory / "gcs_opts.json").write_text("{}")
    (directory / "notes.txt").write_text("ignored")
    image = check_image_dir(directory)
    assert image.sizes == {
        name: (directory / name).stat().st_size for name in ("checkpoint.img", "pages_meta.img", "pages.img")
    }
    assert image.gvisor.container_names == ("app",)
    assert [(file.private, file.committed_bytes) for file in image.gvisor.memory_files] == [
        (False, PAGES_BYTES - 8192),
        (True, 8192),
    ]


@pytest.mark.parametrize("target", ["image", "nowhere"])
def test_a_directory_whose_own_name_is_a_link_is_refused(directory: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(directory if target == "image" else target)
    with pytest.raises(Refused, match="is a symbolic link; name the directory itself"):
        check_image_dir(tmp_path / "link")


def test_no_descriptor_is_left_open_whatever_happens(directory: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    check_image_dir(directory)
    os.truncate(directory / "pages.img", 4096)
    with pytest.raises(StreamdError):
        check_image_dir(directory)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_change_of_a_file_that_is_open_is_noticed(directory: Path) -> None:
    with open_image_dir(directory) as image:
        image.check_unchanged()
        with (directory / "pages.img").open("r+b") as file:
            file.write(b"x")
        os.utime(directory / "pages.img", ns=(0, 0))  # whatever the clock's step
        with pytest.raises(StreamdError, match="changed while it was pushed"):
            image.check_unchanged()
