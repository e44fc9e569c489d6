"""A record as one HTML page that refers to nothing outside: picture, tables, events. Pure."""

import html
from collections.abc import Sequence

from streamd.report import summary
from streamd.report.pictures import overview
from streamd.serve.record import Record

# Nothing may be loaded and no script may run, whatever a record's texts hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;max-width:960px;margin:24px auto;padding:0 12px}
svg{width:100%;height:auto}table{border-collapse:collapse;margin:16px 0;font-variant-numeric:tabular-nums}
th,td{padding:3px 14px 3px 0;text-align:left;border-bottom:1px solid #8884}th{font-weight:600;font-size:12px}
"""


def page(record: Record, *, until_s: float | None = None) -> str:
    """Write the page; `until_s` ends the picture's time axis."""
    head = record.head
    title = html.escape(f"Restore of {head.snapshot}")
    facts = [["snapshot", head.snapshot_url], ["mounted at", head.mountpoint], *map(list, head.facts.items())]
    events = [[f"{event.at_us / 1e6:.3f} s", event.kind, event.detail] for event in record.events]
    body = [
        overview(record, until_s=until_s),
        *(f"<p>{html.escape(line)}</p>" for line in summary.headlines(record)),
        _table(*summary.reads_table(record)),
        _table(*summary.gets_table(record)),
        _table(["WHEN", "EVENT", ""], events) if events else "",
        _table(["FACT", ""], facts),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cells(row: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row) + "</tr>"

    return "<table>" + cells(header, "th") + "".join(cells(row, "td") for row in rows) + "</table>"
