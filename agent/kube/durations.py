"""Durations as `retentionConfig` writes them: `90min`, `12h`, `30d`, `6mo`, `1y`, or several units in a row. Pure.

The API's page names the units `y mo d h min` and no grammar; ours: whole numbers, each unit at most once, larger ones
first. A month is 30 days and a year 365, so that a duration means the same whenever it starts.
"""

import re

_UNITS_S = {"y": 365 * 86400, "mo": 30 * 86400, "d": 86400, "h": 3600, "min": 60}
_DURATION = re.compile("".join(rf"(?:(\d{{1,6}}){unit})?" for unit in _UNITS_S), re.ASCII)


def parse_duration_s(text: str) -> int:
    """Give the seconds of a duration. Raises: `ValueError` with a sentence that says what is allowed."""
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError(
            f"{text[:40]!r} is not a duration: give whole numbers with the units y, mo, d, h, min, larger ones first, "
            "such as 30d or 1d12h"
        )
    seconds = sum(int(number) * unit_s for number, unit_s in zip(match.groups("0"), _UNITS_S.values(), strict=True))
    if seconds == 0:
        raise ValueError(f"{text[:40]!r} is no time at all: a snapshot would be deleted as soon as it is made")
    return seconds
