"""`streamd verify`: check a snapshot in its store."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from streamd.commands.invocation import json_option, opened_store, store_timeout_option
from streamd.commands.output import print_json, progress_bar
from streamd.config import size_text
from streamd.errors import Damaged

if TYPE_CHECKING:
    from streamd.save.verify import VerifyResult

_SHOWN = 5


class _Bad(Damaged):
    """What verification found; its attributes are the whole result."""

    def __init__(self, result: "VerifyResult") -> None:
        chunks = [f"{chunk.file} at byte {chunk.offset}" for chunk in result.damaged[:_SHOWN]]
        more = result.damaged_count - len(chunks)
        lines = [*chunks, *([f"and {more} more chunks"] if more > 0 else []), *result.pack_problems[:_SHOWN]]
        super().__init__(
            f"snapshot {result.snapshot_id} is damaged: {result.damaged_count} of {result.chunks} chunks, "
            f"{len(result.pack_problems)} packs: {'; '.join(lines)}"
        )
        self.snapshot_id = result.snapshot_id
        self.damaged = [asdict(chunk) for chunk in result.damaged]
        self.pack_problems = result.pack_problems


@click.command("verify")
@click.argument("snapshot_url", metavar="SNAPSHOT_URL")
@store_timeout_option
@json_option
def command(snapshot_url: str, store_timeout_s: float, as_json: bool) -> None:
    """Read a snapshot whole from its store and check every chunk; exit code 4 when one is damaged.

    \b
    Example:
      streamd verify gs://bucket/snapshots/web-1
    """
    from streamd.save.verify import verify
    from streamd.store.opening import split_snapshot_url

    store_url, snapshot_id = split_snapshot_url(snapshot_url)
    with opened_store(store_url, timeout_s=store_timeout_s) as store, progress_bar("verify") as report:
        result = verify(
            store, snapshot_id, progress=lambda progress: report(progress.done_bytes, progress.total_bytes, "")
        )
    if not result.ok:
        raise _Bad(result)
    if as_json:
        print_json(asdict(result))
    else:
        read = f"{result.packs} packs, {size_text(result.stored_bytes)}"
        click.echo(f"{snapshot_id}: {result.chunks} chunks in {read}, all as they should be")
