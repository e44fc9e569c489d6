"""A record in words and numbers: one object for machines, tables for people. Pure."""

from typing import TypeAlias

from streamd.report import figures
from streamd.serve.record import Record

Table: TypeAlias = tuple[list[str], list[list[object]]]


def summary(record: Record) -> dict[str, object]:
    """Give what a record says as one object; keys carry their units."""
    head, load = record.head, figures.loading(record)
    gaps = figures.percentiles(figures.release_gaps_us(record))
    return {
        "snapshot": head.snapshot,
        "digest": head.digest,
        "snapshot_url": head.snapshot_url,
        "mountpoint": head.mountpoint,
        "started_s": head.started_s,
        "lasted_s": record.lasted_us / 1e6,
        "image_bytes": sum(file.size for file in head.files),
        "stored_bytes": head.stored_bytes,
        "facts": dict(head.facts),
        "loading": load
        and {
            "began_s": load.began_us / 1e6,
            "ended_s": load.ended_us / 1e6,
            "is_over": load.is_over,
            "asked_bytes": load.asked_bytes,
            "origin_bytes": figures.origin_bytes_between(record, load.began_us, load.ended_us),
            "fault_wait_s": figures.fault_wait_us(record) / 1e6,
        },
        "reads": {
            reads.want.name.lower(): {
                "reads": reads.reads,
                "bytes": reads.read_bytes,
                "waited": reads.waited,
                "wait_s": reads.wait_sum_us / 1e6,
                "wait_p50_s": reads.wait.p50_us / 1e6,
                "wait_p99_s": reads.wait.p99_us / 1e6,
                "longest_s": reads.wait.max_us / 1e6,
                "tiers": {tier.name.lower(): count for tier, count in reads.tiers.items()},
            }
            for reads in figures.reads_by_class(record)
        },
        "gets": {
            gets.want.name.lower(): {
                "gets": gets.gets,
                "origin_bytes": gets.origin_bytes,
                "second_tries": gets.second_tries,
                "failed": gets.failed,
                "first_byte_p50_s": gets.first_byte.p50_us / 1e6,
                "first_byte_p99_s": gets.first_byte.p99_us / 1e6,
            }
            for gets in figures.gets_by_class(record)
        },
        "released_chunks": len(record.releases),
        "release_gap_p50_s": gaps.p50_us / 1e6,
        "release_gap_p99_s": gaps.p99_us / 1e6,
        "release_gap_max_s": gaps.max_us / 1e6,
        "store_failures": figures.failures(record),
        "events": [{"at_s": event.at_us / 1e6, "kind": event.kind, "detail": event.detail} for event in record.events],
        "dropped": {
            "reads": record.dropped.reads,
            "gets": record.dropped.gets,
            "releases": record.dropped.releases,
            "events": record.dropped.events,
        },
    }


def reads_table(record: Record) -> Table:
    """Lay out the reads of pages.img, a class a row."""
    rows: list[list[object]] = [
        [
            reads.want.name.lower(),
            reads.reads,
            mib_text(reads.read_bytes),
            reads.waited,
            duration_text(reads.wait.p50_us),
            duration_text(reads.wait.p99_us),
            duration_text(reads.wait.max_us),
            ", ".join(f"{tier.name.lower()} {count}" for tier, count in reads.tiers.items()),
        ]
        for reads in figures.reads_by_class(record)
    ]
    return ["READS", "COUNT", "SIZE", "WAITED", "P50", "P99", "LONGEST", "ANSWERED FROM"], rows


def gets_table(record: Record) -> Table:
    """Lay out the GETs, a class a row."""
    rows: list[list[object]] = [
        [
            gets.want.name.lower(),
            gets.gets,
            mib_text(gets.origin_bytes),
            duration_text(gets.first_byte.p50_us),
            duration_text(gets.first_byte.p99_us),
            gets.second_tries,
            gets.failed,
        ]
        for gets in figures.gets_by_class(record)
    ]
    return ["GETS", "COUNT", "RECEIVED", "FIRST BYTE P50", "P99", "SECOND TRIES", "FAILED"], rows


def headlines(record: Record) -> list[str]:
    """Say the main things, a sentence each."""
    lines = []
    load = figures.loading(record)
    if record.head.facts.get("mode") == "warm":
        lines.append(
            "a warm mount: its files are the node cache's own, whose reads bypass streamd and are not recorded"
        )
    elif load is None:
        lines.append("pages.img was not read")
    else:
        sent = figures.origin_bytes_between(record, load.began_us, load.ended_us)
        state = "loaded" if load.is_over else "still loading:"
        lines.append(
            f"{state} {mib_text(load.asked_bytes)} in {load.took_us / 1e6:.2f} s, from "
            f"{load.began_us / 1e6:.2f} s after the mount's beginning on; the store sent {mib_text(sent)} meanwhile"
        )
        waited_us = figures.fault_wait_us(record)
        lines.append(
            f"some fault's read waited during {waited_us / 1e6:.2f} s of that"
            if waited_us
            else "no fault's read waited"
        )
    gaps = figures.percentiles(figures.release_gaps_us(record))
    if gaps.max_us:
        lines.append(
            f"between two chunk releases: {duration_text(gaps.p50_us)} (median), {duration_text(gaps.p99_us)} (p99), "
            f"{duration_text(gaps.max_us)} (longest)"
        )
    lost = record.dropped
    if lost.reads or lost.gets or lost.releases or lost.events:
        lines.append(
            f"the record was full: {lost.reads} reads, {lost.gets} GETs, {lost.releases} releases and {lost.events} "
            "events are not in it"
        )
    return lines


def duration_text(duration_us: float) -> str:
    """Write a duration for people, three digits: `85 µs`, `12.3 ms`, `1.25 s`; a dash for none."""
    if not duration_us:
        return "-"
    value, unit = duration_us, "µs"
    for larger in ("ms", "s"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    digits = 0 if value >= 100 or unit == "µs" else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def mib_text(size: float) -> str:
    """Write bytes in MiB: all sizes of a restore are compared with each other."""
    return f"{size / (1 << 20):.1f} MiB"
