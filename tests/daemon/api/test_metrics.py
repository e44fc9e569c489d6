"""What Prometheus reads: every metric is there, has the right type and value, and follows the naming rules."""

import pytest
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from streamd.daemon.api import metrics
from streamd.daemon.api.models import FaultWaits, ImageStateName, Lease, Progress, ReleaseGaps, StoreAway
from tests.daemon.api.fake_node import URL, InProcess

ONE = f"{1:032x}"
LABELS = {"image": ONE, "snapshot_url": URL, "tenant": 'a"b\\c'}
NAMES = {value[0]: value[1] for name, value in vars(metrics).items() if name.isupper() and isinstance(value, tuple)}
NAMES = {name: text for name, text in NAMES.items() if name.startswith("streamd_")}


async def _scraped(api: InProcess) -> dict[str, Metric]:
    answer = await api.ask("GET", "/metrics")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return {family.name: family for family in text_string_to_metric_families(answer.body.decode())}


def _value(families: dict[str, Metric], name: str, **labels: str) -> float:
    samples = [sample for sample in families[name].samples if sample.labels == labels]
    assert len(samples) == 1, families[name].samples
    return samples[0].value


async def test_an_images_sums_are_told_with_what_names_it(api: InProcess) -> None:
    await api.image(tenant=LABELS["tenant"])
    api.node.known[ONE] = replace(
        api.node.known[ONE],
        state=ImageStateName.SERVING,
        progress=Progress(resident_bytes=3, total_bytes=10),
        fault_waits=FaultWaits(count=4, p50_ms=1.5, p99_ms=250.0),
        release_gaps=ReleaseGaps(p50_ms=2.5, p99_ms=10.0),
        restarts=2,
        stalls=1,
        failed_reads=9,
        store_away=StoreAway(since_s=1.0, reason="r"),
        fetch_max_bytes_per_s=500,
        bytes_by_tier={"store": 5, "disk": 7},
        leases=[Lease(id="l", owner="o", purpose="p", since_s=1.0, pid=1)],
    )
    families = await _scraped(api)
    expected = {
        "streamd_image_resident_bytes": 3,
        "streamd_image_total_bytes": 10,
        "streamd_image_fetch_limit_bytes_per_second": 500,
        "streamd_image_leases": 1,
        "streamd_image_openers": 0,
        "streamd_image_worker_restarts": 2,
        "streamd_image_stalls": 1,
        "streamd_image_failed_reads": 9,
        "streamd_image_store_away": 1,
        "streamd_image_fault_waits": 4,
        "streamd_image_fault_wait_p50_seconds": 0.0015,
        "streamd_image_fault_wait_p99_seconds": 0.25,
        "streamd_image_release_gap_p50_seconds": 0.0025,
        "streamd_image_release_gap_p99_seconds": 0.01,
    }
    assert {name: _value(families, name, **LABELS) for name in expected} == expected
    assert _value(families, "streamd_image_read_bytes", **LABELS, tier="disk") == 7
    assert _value(families, "streamd_images", state="serving") == 1
    assert _value(families, "streamd_images", state="failed") == 0


async def test_the_node_and_the_api_are_told(api: InProcess) -> None:
    await api.ask("GET", "/v1/health")
    await api.ask("GET", "/v1/images/" + "f" * 32)
    await api.ask("GET", "/nothing/of/this/name")
    await api.ask("BREW", "/v1/images")
    api.node.warnings = ["one", "two"]
    api.node.fetch_max_bytes_per_s = 1000
    families = await _scraped(api)
    assert _value(families, "streamd_healthy") == 0
    assert _value(families, "streamd_health_warnings") == 2
    assert _value(families, "streamd_draining") == 0
    assert _value(families, "streamd_fetch_limit_bytes_per_second") == 1000
    requests = {tuple(sample.labels.values()): sample.value for sample in families["streamd_api_requests"].samples}
    assert requests == {
        ("GET", "/v1/health", "200"): 1,
        ("GET", "/v1/images/{id}", "404"): 1,
        ("GET", "none", "404"): 1,
        ("other", "/v1/images", "405"): 1,
    }


async def test_every_metric_is_written_described_and_named_by_the_rules(api: InProcess) -> None:
    await api.image()
    families = await _scraped(api)
    assert {name: family.documentation for name, family in families.items()} == NAMES
    for name, family in families.items():
        assert family.type in ("gauge", "counter")
        assert not name.endswith("_total"), "the client adds it"


@pytest.mark.parametrize("tenant", ["x" * 128, '"} 1\nevil 1'])
async def test_what_a_client_names_is_one_label(api: InProcess, tenant: str) -> None:
    await api.image(tenant="good")
    api.node.known[ONE] = replace(api.node.known[ONE], tenant=tenant)
    families = await _scraped(api)
    assert set(families) == set(NAMES)
    assert families["streamd_image_total_bytes"].samples[0].labels["tenant"] == tenant
