"""Rates as tc(8) writes them; the link itself is measured by whoever races on it."""

import pytest

from bench.shaped_link import parse_rate


@pytest.mark.parametrize(
    ("text", "bit_per_s"),
    [("800mbit", 800_000_000), ("2gbit", 2_000_000_000), ("1.5Gbit", 1_500_000_000), (" 64kbit ", 64_000), ("8bit", 8)],
)
def test_a_rate_is_given_as_tc_writes_it(text: str, bit_per_s: int) -> None:
    assert parse_rate(text) == bit_per_s


@pytest.mark.parametrize("text", ["", "800", "mbit", "800mbps", "-1mbit", "1e3bit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        parse_rate(text)
