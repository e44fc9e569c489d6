"""`streamd trace`: the learned order of a snapshot."""

from typing import TYPE_CHECKING

import click

from streamd.commands.invocation import json_option, opened_store, store_timeout_option
from streamd.commands.output import print_facts, print_json, print_table, ratio_text
from streamd.config import size_text
from streamd.errors import NotFound

if TYPE_CHECKING:
    from streamd.snapshot.trace import Trace
    from streamd.store.catalog import Pinned

# What people get to see of it; `--json` has all.
_SHOWN_RANGES = 20


@click.group("trace")
def command() -> None:
    """Show or forget the learned order of a snapshot.

    Every restore from a mount notes which memory its threads stopped for, and in which order; the next mounts fetch
    that first, before runsc asks. What is learned is kept beside the snapshot in the store, merged over all restores of
    all nodes, the latest counting most. It holds offsets and no contents. `snapagent harvest` makes a first restore for
    it, before users come.

    \b
    Example:
      streamd trace show gs://bucket/snapshots/web-1
    """


@command.command("show")
@click.argument("snapshot_url", metavar="SNAPSHOT_URL")
@store_timeout_option
@json_option
def _show(snapshot_url: str, store_timeout_s: float, as_json: bool) -> None:
    """Show what restores of a snapshot waited for, in the order in which a mount fetches it.

    AFTER is how much a restore had waited for before it came to a range, WAITED FOR BY the share of restores that did.
    Exit code 3 when nothing is learned yet, 4 when it is damaged (mounts then do without; the next restore mends it).

    \b
    Example:
      streamd trace show gs://bucket/snapshots/web-1 --json | jq '.ranges[0]'
    """
    from streamd.snapshot.trace import hot_ranges
    from streamd.store.catalog import open_snapshot
    from streamd.store.opening import split_snapshot_url
    from streamd.store.traces import read_trace

    store_url, snapshot_id = split_snapshot_url(snapshot_url)
    with opened_store(store_url, timeout_s=store_timeout_s) as store:
        pinned = open_snapshot(store, snapshot_id)
        if pinned.trace is None:
            raise NotFound(
                f"nothing is learned yet of {snapshot_url}: restore from a mount of it (`snapagent harvest`)"
            )
        trace = read_trace(store, pinned, pinned.trace)
    hot_bytes = sum(end - start for start, end in hot_ranges(trace))
    if as_json:
        print_json(_described(pinned, trace) | {"fetched_first_bytes": hot_bytes})
        return
    pages_bytes = pinned.manifest.files[-1].size
    share = ratio_text(trace.bytes_total, pages_bytes)
    print_facts(
        [
            ("snapshot", snapshot_id),
            ("restores", trace.samples),
            ("waited for", f"{size_text(trace.bytes_total)} in {len(trace.ranges)} ranges, {share} of the memory"),
            ("fetched first", size_text(hot_bytes)),
        ]
    )
    click.echo()
    print_table(
        ["AFTER", "OFFSET", "SIZE", "WAITED FOR BY"],
        [
            [size_text(row.position), f"{row.start:#x}", size_text(row.end - row.start), ratio_text(row.weight, 1)]
            for row in trace.ranges[:_SHOWN_RANGES]
        ],
    )
    if len(trace.ranges) > _SHOWN_RANGES:
        click.echo(f"… and {len(trace.ranges) - _SHOWN_RANGES} more (--json lists all)")


def _described(pinned: "Pinned", trace: "Trace") -> dict[str, object]:
    """Describe a trace in what JSON can hold; offsets are those of pages.img."""
    return {
        "id": pinned.manifest.snapshot_id,
        "digest": trace.digest.hex(),
        "samples": trace.samples,
        "waited_bytes": trace.bytes_total,
        "pages_bytes": pinned.manifest.files[-1].size,
        "ranges": [
            {"start": row.start, "end": row.end, "weight": round(row.weight, 4), "position": row.position}
            for row in trace.ranges
        ],
    }


@command.command("drop")
@click.argument("snapshot_url", metavar="SNAPSHOT_URL")
@store_timeout_option
@json_option
def _drop(snapshot_url: str, store_timeout_s: float, as_json: bool) -> None:
    """Forget what was learned, as after a change of the workload that should show at once.

    Not needed otherwise: a few restores of the new workload outweigh the old one. Mounts that serve now add to what
    comes next. It is no error when nothing was learned.

    \b
    Example:
      streamd trace drop gs://bucket/snapshots/web-1
    """
    from streamd.store.opening import split_snapshot_url
    from streamd.store.traces import drop_trace

    store_url, snapshot_id = split_snapshot_url(snapshot_url)
    with opened_store(store_url, timeout_s=store_timeout_s) as store:
        dropped = drop_trace(store, snapshot_id)
    if as_json:
        print_json({"id": snapshot_id, "dropped": dropped})
    else:
        click.echo(f"{snapshot_id}: " + ("what was learned is forgotten" if dropped else "nothing was learned"))
