"""Retention durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kube.durations import parse_duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90min", 5400),
        ("12h", 43200),
        ("30d", 30 * 86400),
        ("6mo", 180 * 86400),
        ("1y", 365 * 86400),
        ("1y2mo3d4h5min", (365 + 60 + 3) * 86400 + 4 * 3600 + 300),
        ("007d", 7 * 86400),
    ],
)
def test_units_add_up(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0d", "0y0min", "1", "d", "1w", "1m", "1s", "1.5h", "-1d", "1h1d", "1d1d", "1 d", "1D", "1d\n", "²d"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|no time"):
        parse_duration_s(text)


@given(st.text(max_size=12))
def test_no_text_does_harm(text: str) -> None:
    try:
        seconds = parse_duration_s(text)
    except ValueError:
        return
    assert seconds > 0
