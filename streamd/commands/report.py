"""`streamd report`: what a mount's record says, in text, numbers and pictures."""

from pathlib import Path

import click

from streamd.commands.invocation import Invocation, json_option
from streamd.commands.output import print_facts, print_json, print_table, printable, time_text


@click.command("report")
@click.argument("record", metavar="[RECORD | MOUNTPOINT]", default="last")
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write one self-contained page.")
@click.option("--svg", "svg_path", type=click.Path(path_type=Path), help="Write the picture alone.")
@click.option("--until", "until_s", type=click.FloatRange(min=0.001), metavar="SECONDS", help="End of the time axis.")
@json_option
@click.pass_obj
def command(
    invocation: Invocation,
    record: str,
    html_path: Path | None,
    svg_path: Path | None,
    until_s: float | None,
    as_json: bool,
) -> None:
    """Show what a mount's record says: who read what, how long it waited, what the store sent.

    RECORD is a file NAME.record that a mount wrote (in `records` of the log directory), MOUNTPOINT means the newest
    one of a mount there, and `last`, or nothing, the newest of all. A mount that serves writes every ten seconds, when
    pages.img was closed, and at its end.

    \b
    Example:
      streamd report /mnt/web-1
      streamd report --html restore.html
      streamd report first.record --svg first.svg --until 10
    """
    from streamd.daemon.records import SUFFIX, latest_record, read_record
    from streamd.fuse import mount_paths
    from streamd.report import summary

    directory = invocation.config().log_directory / "records"
    if record == "last":
        path = latest_record(directory)
    elif record.endswith(SUFFIX):  # by its name: to look at a mountpoint can hang
        path = Path(record)
    else:
        path = latest_record(directory, mount_paths.resolve(record))
    found = read_record(path)
    if html_path is not None:
        from streamd.report.page import page

        _write(html_path, page(found, until_s=until_s))
    if svg_path is not None:
        from streamd.report.pictures import overview

        _write(svg_path, overview(found, until_s=until_s))
    if as_json:
        print_json({"record": str(path)} | summary.summary(found))
        return
    head = found.head
    print_facts(
        [
            ("record", path),
            ("snapshot", head.snapshot_url),
            ("mounted", f"{time_text(head.started_s)} at {head.mountpoint}, for {found.lasted_us / 1e6:.1f} s"),
            *head.facts.items(),
        ]
    )
    for line in summary.headlines(found):
        click.echo(printable(line))
    for header, rows in (summary.reads_table(found), summary.gets_table(found)):
        if rows:
            click.echo()
            print_table(header, rows)
    if found.events:
        click.echo()
        print_table(["AT", "EVENT", ""], [[f"{e.at_us / 1e6:.3f} s", e.kind, e.detail] for e in found.events])


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(path), error.strerror) from error
