"""The race's arithmetic: what the table of goals says of given runs."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.race_cells import CELLS, Cell, Loading, Run, Served
from bench.race_figures import CHUNK_BYTES, Goal, Race, goals, link_use, markdown, wrong

CELL = {cell.name: cell for cell in CELLS}
# F = 100 MB: one second on the link of 800 Mbit/s.
AWAITED = {("plain", "region"): 100_000_000, ("large", "region"): 100_000_000}


def run(
    cell: str,
    contestant: str,
    first_s: float,
    *,
    lead_s: float = 0.0,
    loaded_s: float = 10.0,
    served: Served | None = None,
    link: float | None = None,
    curl_cpu_s: float | None = None,
    answer_right: bool = True,
    memory_right: bool | None = None,
) -> Run:
    return Run(
        cell=cell,
        contestant=contestant,
        round=0,
        lead_s=lead_s,
        first_s=first_s,
        loaded_s=loaded_s,
        wire_bytes=0,
        link_use=link,
        answer_right=answer_right,
        memory_right=memory_right,
        loading=Loading(took_s=1.0, waiters=3, stopped_s=0.5, awaited_bytes=7_000_000),
        served=served,
        download_cpu_s=curl_cpu_s,
        download_bytes=None if curl_cpu_s is None else 2_000_000_000,
    )


def race(*runs: Run, cells: Iterable[Cell] = CELLS) -> Race:
    return Race(tuple(cells), runs, AWAITED)


def goal(found: Race, beginning: str) -> Goal:
    return next(goal for goal in goals(found) if goal.title.startswith(beginning))


def values(found: Race, beginning: str) -> tuple[float | None, ...]:
    return goal(found, beginning).values


def test_a_first_ever_restore_counts_from_the_mount_in_units_of_what_gvisor_waits_for() -> None:
    found = race(run("region", "local", 1.0), run("region", "streamd-first", 2.0, lead_s=0.5))
    assert values(found, "(first request − T0) ÷ (F/B), first restore ever") == pytest.approx((1.5,))


def test_a_learned_restore_counts_from_runsc() -> None:
    found = race(run("region", "local", 1.0), run("region", "streamd-learned", 1.3, lead_s=1.0))
    assert values(found, "(first request − T0) ÷ (F/B), order learned") == pytest.approx((0.3,))


def test_a_mount_that_takes_longer_than_its_head_start_makes_the_learned_restore_later() -> None:
    found = race(run("region", "local", 1.0), run("region", "streamd-learned", 1.3, lead_s=1.5))
    assert values(found, "(first request − T0) ÷ (F/B), order learned") == pytest.approx((0.8,))


def test_a_larger_image_is_compared_with_the_smaller_one_by_the_same_contestant() -> None:
    found = race(
        run("region", "streamd-first", 1.5, lead_s=0.5),
        run("large", "streamd-first", 1.7, lead_s=0.5),
        run("region", "streamd-learned", 1.0, lead_s=1.0),
        run("large", "streamd-learned", 1.05, lead_s=1.0),
    )
    assert values(found, "first request, 4 ×") == pytest.approx((1.1, 1.05))


def test_the_reader_of_gvisor_is_met_on_the_large_image() -> None:
    found = race(
        run("large", "gvisor-gcs", 40.0),
        run("large", "streamd-first", 3.5, lead_s=0.5),
        run("large", "streamd-learned", 1.2, lead_s=1.0),
    )
    assert values(found, "first request ÷ gVisor") == pytest.approx((0.1, 0.03))


def test_all_loaded_counts_the_mount_too() -> None:
    found = race(
        run("region", "gvisor-gcs", 9.0, loaded_s=10.0),
        run("region", "streamd-first", 3.0, lead_s=0.5, loaded_s=9.5),
        run("compressible", "gvisor-gcs", 9.0, loaded_s=10.0),
        run("compressible", "streamd-first", 3.0, lead_s=0.5, loaded_s=5.5),
    )
    assert values(found, "all loaded") == pytest.approx((1.0, 0.6))


def test_gaps_are_measured_in_the_time_of_a_chunk_and_cpu_in_that_of_curl() -> None:
    chunk_s = CHUNK_BYTES / 100_000_000
    served = Served(bytes=1_000_000_000, cpu_s=2.4, release_gap_p50_s=0.0, release_gap_p99_s=4 * chunk_s)
    found = race(run("region", "streamd-first", 3.0, served=served), run("region", "copy", 1.0, curl_cpu_s=1.6))
    assert values(found, "p99") == pytest.approx((4.0,))
    assert values(found, "server CPU") == pytest.approx((3.0,))


def test_a_mount_that_measures_no_gaps_leaves_its_row_open() -> None:
    served = Served(bytes=1, cpu_s=1.0, release_gap_p50_s=None, release_gap_p99_s=None)
    assert goal(race(run("region", "streamd-first", 3.0, served=served)), "p99").verdict() == "not measured"


def test_a_race_in_one_cell_leaves_the_other_rows_open() -> None:
    found = race(run("region", "local", 1.0), cells=[CELL["region"]])
    assert {goal.verdict() for goal in goals(found)} == {"not measured"}


def test_figures_are_medians_over_the_rounds() -> None:
    found = race(*(run("region", "local", seconds) for seconds in (1.0, 9.0, 2.0)), run("region", "streamd-warm", 2.0))
    assert values(found, "warm") == pytest.approx((1.0,))


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ((0.9, 0.5), "aim"),
        ((1.0, 0.55), "aim"),
        ((1.05, 0.5), "must"),
        ((1.0, 0.71), "MISSED"),
        ((1.0, None), "not measured"),
    ],
)
def test_a_row_keeps_a_limit_when_all_its_figures_do(measured: tuple[float | None, ...], verdict: str) -> None:
    assert Goal("", measured, (1.1, 0.7), (1.0, 0.55)).verdict() == verdict


@pytest.mark.parametrize(("measured", "verdict"), [(0.96, "aim"), (0.9, "must"), (0.8, "MISSED")])
def test_the_use_of_the_link_has_lower_limits(measured: float, verdict: str) -> None:
    found = race(run("region", "streamd-first", 3.0, link=measured))
    assert goal(found, "link used").verdict() == verdict


@given(share=st.floats(0.05, 1.0), wait_s=st.floats(0.0, 5.0))
def test_the_use_of_a_link_begins_with_its_first_mib(share: float, wait_s: float) -> None:
    """Whatever the wait for it, a link that then brings `share` of what it could was used to that share."""
    bytes_per_s = 100e6
    samples = [(0.0, 500)]
    samples += [(wait_s + n / 50, 500 + int(n / 50 * bytes_per_s * share)) for n in range(201)]
    wire_bytes = samples[-1][1] - 500
    used = link_use(samples, wire_bytes=wire_bytes, until_s=samples[-1][0], bytes_per_s=bytes_per_s)
    assert used == pytest.approx(share, rel=1e-3)


def test_a_link_that_hardly_carried_anything_has_no_use() -> None:
    assert link_use([(0.0, 0), (1.0, 300_000)], wire_bytes=300_000, until_s=2.0, bytes_per_s=1e8) is None


def test_wrong_memory_is_found_in_answers_and_in_hashes() -> None:
    good = run("region", "local", 1.0, memory_right=True)
    bad = [run("region", "copy", 1.0, answer_right=False), run("region", "rclone", 1.0, memory_right=False)]
    assert wrong(race(good, *bad)) == bad


def test_the_page_shows_every_goal_and_every_contestant_that_ran() -> None:
    found = race(run("region", "local", 1.0), run("region", "rclone", 8.25), cells=[CELL["region"]])
    page = markdown(found)
    assert page.count("not measured") == len(goals(found))
    assert "| rclone mount, full cache | 1 | 0.00 | 8.25 | 7.25 | 10.00 | – | 3, 0.50 s, 7 MB |" in page
    assert "gcsfuse" not in page
