"""What a node and its images may take from the store: by counts of bytes, of real daemons."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.daemons import Daemon, ServedImage
from bench.event_tape import until
from bench.mount_users import FileHolder
from streamd.snapshot.names import PAGES

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

MIB = 1 << 20
LIMIT = 8_000_000


def share(image: ServedImage) -> int:
    """Give what its worker says that it may take."""
    return int(image.state()["fetch_max_bytes_per_s"])


def taken(*images: ServedImage) -> int:
    """Give what the store has sent for them."""
    return sum(image.state()["bytes_by_tier"].get("origin", 0) for image in images)


def test_two_images_that_load_share_the_nodes_link_and_take_no_more_together(saved: "Saved", calm: Calm) -> None:
    table = saved.manifest.table
    [pages] = [file for file in saved.manifest.files if file.name == PAGES]
    of_pages = table.frame_bytes[pages.first_chunk : pages.first_chunk + pages.chunk_count].sum()
    # Two buckets, of which the first was all of the limit's; and the small files, which a sandbox waits for.
    at_once = LIMIT // 4 + LIMIT // 8 + 2 * (saved.stored_bytes - int(of_pages))
    with Daemon(f"[daemon]\nfetch_max_bytes_per_s = {LIMIT}") as daemon:
        began_s = time.monotonic()
        first = daemon.image(saved.slow(400), tenant="one", prefetch="all")
        until(lambda: share(first) == LIMIT, "all of the link for one")
        second = daemon.request(saved.slow(400), tenant="two", prefetch="all")
        until(lambda: share(first) <= LIMIT / 2, "a half for the first")
        until(lambda: share(second) >= 0.45 * LIMIT, "a half for the second, or more")
        until(lambda: taken(first, second) >= 0.98 * 2 * saved.stored_bytes, "all of both")
        # However slow this machine is: then they took less.
        assert taken(first, second) - at_once <= LIMIT * (time.monotonic() - began_s)
        assert daemon.client.health()["fetch_max_bytes_per_s"] == LIMIT
        calm(daemon)


def test_a_fault_waits_for_no_limit_and_not_for_another_images_load(saved: "Saved", calm: Calm) -> None:
    with Daemon("[daemon]\nfetch_max_bytes_per_s = '64KiB'") as daemon:
        loading, faulting = (daemon.image(saved.slow(100), tenant=tenant, prefetch="all") for tenant in ("one", "two"))
        holder = faulting.holder()
        assert holder.open() == "done"
        place = saved.pages.stat().st_size - 2 * MIB  # at this rate the stream would be here in 10 minutes
        assert holder.read(place, MIB) == FileHolder.digest(saved.pages, place, MIB)
        assert faulting.until(lambda state: state["fault_waits"]["count"], "a fault")
        faulting.until_replaced(faulting.kill_worker())
        assert holder.read(place + MIB, MIB) == FileHolder.digest(saved.pages, place + MIB, MIB)
        until(lambda: 0 < share(faulting) <= 64 << 10, "the next worker's share")
        assert taken(loading) < saved.stored_bytes / 2
        calm(daemon)


def test_an_images_own_limit_needs_no_limit_of_the_node(saved: "Saved") -> None:
    with Daemon("[fetch]\nmax_bytes_per_s = '1MB'") as daemon:
        image = daemon.image(saved.url)
        image.until(lambda state: state["fetch_max_bytes_per_s"] == 1_000_000, "its limit")
        assert daemon.client.health()["fetch_max_bytes_per_s"] == 0
