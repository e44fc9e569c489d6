"""What the benchmarks of daemons make of their figures."""

from dataclasses import replace

from bench.mount_users import pause_s
from bench.node import Round, figures, markdown

_MIB = 1 << 20
_ROUND = Round(
    took_s=5.0,
    bytes_per_s=90e6,
    share=1.2,
    link_use=0.97,
    fault_p50_ms=20.0,
    fault_p99_ms=50.0,
    daemon_bytes=40 * _MIB,
    spawner_bytes=30 * _MIB,
    worker_bytes=50 * _MIB,
    worker_unshared_bytes=20 * _MIB,
)


def test_a_pause_is_the_longest_gap_around_a_kill() -> None:
    gaps = [(1.0, 0.03), (9.9, 0.4), (10.35, 0.02), (10.5, 3.0)]
    assert pause_s(gaps, 10.0) == 0.4
    assert pause_s(gaps, 9.88) == 0.4  # a reply was under way
    assert pause_s(gaps, 10.36) == 0.02  # the next one's is not its
    assert pause_s(gaps, 13.0) == 3.0
    assert pause_s(gaps, 5.0) == 0.0


def test_figures_are_medians_and_the_worst_of_what_has_a_limit() -> None:
    rounds = [_ROUND, replace(_ROUND, share=1.4, fault_p99_ms=70.0), replace(_ROUND, share=9.0, worker_bytes=60 * _MIB)]
    found = figures({4: rounds})
    assert (found["4"]["share"], found["4"]["fault_p99_ms"], found["4"]["worker_bytes"]) == (1.4, 70.0, 60 * _MIB)
    table = markdown(found, {"p50_us": 18000.0, "p99_us": 30000.0})
    assert "| none | – | – | – | 18.0 / 30.0 | – |" in table
    assert "| 4 | 90.0 | 97% | 1.40 | 20.0 / 70.0 | 40 / 30 / 60 (20) |" in table
