from hypothesis import given
from hypothesis import strategies as st

from streamd.serve.stats import Durations, ReleaseGaps

durations = st.lists(st.floats(1e-5, 250.0), min_size=1, max_size=50)


@given(durations, st.floats(0.01, 1.0))
def test_a_quantile_is_right_to_a_tenth(noted: list[float], share: float) -> None:
    histogram = Durations()
    for duration_s in noted:
        histogram.note(duration_s)
    rank = max(0, int(-(-share * len(noted) // 1)) - 1)
    right_s = sorted(noted)[rank]
    below_s = sorted(noted)[max(0, rank - 1)]  # at the edge of a rank, arithmetic may choose either
    assert below_s * 0.999 <= histogram.quantile_s(share) <= right_s * 1.101


@given(durations, st.floats(1e-5, 250.0))
def test_those_of_so_much_or_more_are_counted_give_or_take_a_step(noted: list[float], bound_s: float) -> None:
    histogram = Durations()
    for duration_s in noted:
        histogram.note(duration_s)
    most = sum(duration_s >= bound_s / 1.101 for duration_s in noted)
    least = sum(duration_s >= bound_s for duration_s in noted)
    assert least <= histogram.at_least(bound_s) <= most


def test_the_extremes_have_a_place() -> None:
    histogram = Durations()
    for duration_s in (0.0, 1e9):
        histogram.note(duration_s)
    assert histogram.at_least(0.0) == 2
    assert histogram.quantile_s(0.5) < 2e-5
    assert histogram.quantile_s(1.0) > 250
    assert Durations().quantile_s(0.5) == 0


def test_a_pause_is_no_gap() -> None:
    gaps = ReleaseGaps()
    for at_s in (1.0, 1.5):
        gaps.released(at_s)
    gaps.pause()
    gaps.released(100.0)
    assert gaps.at_least(0.0) == 1
