"""The scenario of `make demo-containerd`, small: a real containerd, everything real."""

from bench.containerd_demo import run


def test_a_pod_of_containerd_is_saved_and_restored_and_one_with_another_argument_starts_cold_by_name() -> None:
    demo = run(heap_mib=64)
    assert demo.snapshot_url.startswith("gs://bucket/snapshots/")
    assert demo.same_memory
    assert "--verbose" in demo.cold_reason
    told = [event["what"] for event in demo.events]
    assert told.count("restored") == 1
    assert told.count("cold start") == 2
