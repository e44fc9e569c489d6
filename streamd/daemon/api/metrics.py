"""What Prometheus is told: names, meanings, labels; drawn from the node's state when it asks.

Nothing is counted twice or kept for this: images come with their own sums, and `ApiCounts` is the API's own book.
Labels are few: `image` is one of a node's images and goes with it; `route` is a path's template, never a path.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamd.daemon.api.models import HealthStatus, ImageState, ImageStateName
from streamd.daemon.api.port import Node

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Of the node.
HEALTHY = ("streamd_healthy", "1 when the node can do all that it should.")
WARNINGS = ("streamd_health_warnings", "Warnings in /v1/health.")
DRAINING = ("streamd_draining", "1 when no new images are taken.")
IMAGES = ("streamd_images", "Images by state.")
FETCH_LIMIT = ("streamd_fetch_limit_bytes_per_second", "What all images together may take from the store; 0: no limit.")
EVENTS = ("streamd_events", "Events published.")
# Of an image, while the node knows it; labels image, snapshot_url, tenant. Counters are sums over its life.
IMAGE_LABELS = ("image", "snapshot_url", "tenant")
RESIDENT = ("streamd_image_resident_bytes", "Bytes of the image on this node, verified.")
TOTAL = ("streamd_image_total_bytes", "Bytes of the image.")
FETCH_SHARE = ("streamd_image_fetch_limit_bytes_per_second", "What the image may take from the store; 0: no limit.")
LEASES = ("streamd_image_leases", "Leases held.")
OPENERS = ("streamd_image_openers", "Files that are open.")
RESTARTS = ("streamd_image_worker_restarts", "How often the worker was replaced.")
STALLS = ("streamd_image_stalls", "Reads that waited for longer than policy.event_after_s.")
FAILED_READS = ("streamd_image_failed_reads", "Reads that were answered with an I/O error.")
STORE_AWAY = ("streamd_image_store_away", "1 while nothing comes of what the store is asked for.")
FAULTS = ("streamd_image_fault_waits", "Reads of stopped threads that had to wait.")
FAULT_P50 = ("streamd_image_fault_wait_p50_seconds", "Median of these waits.")
FAULT_P99 = ("streamd_image_fault_wait_p99_seconds", "99th percentile of these waits.")
GAP_P50 = ("streamd_image_release_gap_p50_seconds", "Median time between two chunks that came, while fetching.")
GAP_P99 = ("streamd_image_release_gap_p99_seconds", "99th percentile of these times.")
TIER_BYTES = (
    "streamd_image_read_bytes",
    "Bytes from the store (tier origin), and given to readers by why they were read (read_fault, read_stream, …).",
)
# Of the API.
REQUESTS = ("streamd_api_requests", "Requests answered, by method, route and status.")
CONNECTIONS = ("streamd_api_connections", "Connections now.")
STREAMS = ("streamd_api_streams", "Of them, leases and followers of events.")
REFUSED = ("streamd_api_refused_connections", "Connections refused, by reason: peer, limit.")
DROPPED = ("streamd_api_dropped_readers", "Clients cut off because they did not take what they asked for.")


@dataclass(slots=True)
class ApiCounts:
    """What the API counts of itself; state of the Trio thread."""

    connections: int = 0
    streams: int = 0
    dropped_readers: int = 0
    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


def render(node: Node, counts: ApiCounts) -> bytes:
    """Write everything in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(node, counts))
    return generate_latest(registry)


class _Once(Collector):
    """One scrape."""

    def __init__(self, node: Node, counts: ApiCounts) -> None:
        self._node = node
        self._counts = counts

    def describe(self) -> list[Metric]:
        """Say nothing: the registry would collect once more to find out, only to see whether names clash."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Give every metric, from the state of now."""
        yield from self._of_node()
        # One that has ended, and was asked for again, would be there twice.
        yield from _of_images([image for image in self._node.images() if image.state is not ImageStateName.GONE])
        yield from self._of_api()

    def _of_node(self) -> Iterator[Metric]:
        health = self._node.health()
        yield GaugeMetricFamily(*HEALTHY, value=float(health.status is HealthStatus.OK))
        yield GaugeMetricFamily(*WARNINGS, value=float(len(health.warnings)))
        yield GaugeMetricFamily(*FETCH_LIMIT, value=health.fetch_max_bytes_per_s)
        yield GaugeMetricFamily(*DRAINING, value=float(self._node.is_draining))
        by_state = Counter(image.state for image in self._node.images())
        images = GaugeMetricFamily(*IMAGES, labels=["state"])
        for state in ImageStateName:
            images.add_metric([state], by_state[state])
        yield images
        yield CounterMetricFamily(*EVENTS, value=self._node.events.published)

    def _of_api(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(*REQUESTS, labels=["method", "route", "status"])
        for labels, count in sorted(self._counts.requests.items()):
            requests.add_metric(labels, count)
        yield requests
        yield GaugeMetricFamily(*CONNECTIONS, value=self._counts.connections)
        yield GaugeMetricFamily(*STREAMS, value=self._counts.streams)
        refused = CounterMetricFamily(*REFUSED, labels=["reason"])
        for reason in ("peer", "limit"):
            refused.add_metric([reason], self._counts.refused[reason])
        yield refused
        yield CounterMetricFamily(*DROPPED, value=self._counts.dropped_readers)


def _of_images(images: Sequence[ImageState]) -> Iterator[Metric]:
    gauges: tuple[tuple[tuple[str, str], Callable[[ImageState], float]], ...] = (
        (RESIDENT, lambda image: image.progress.resident_bytes),
        (TOTAL, lambda image: image.progress.total_bytes),
        (FETCH_SHARE, lambda image: image.fetch_max_bytes_per_s),
        (LEASES, lambda image: len(image.leases)),
        (OPENERS, lambda image: len(image.openers)),
        (STORE_AWAY, lambda image: image.store_away is not None),
        (FAULT_P50, lambda image: image.fault_waits.p50_ms / 1000),
        (FAULT_P99, lambda image: image.fault_waits.p99_ms / 1000),
        (GAP_P50, lambda image: image.release_gaps.p50_ms / 1000),
        (GAP_P99, lambda image: image.release_gaps.p99_ms / 1000),
    )
    counters: tuple[tuple[tuple[str, str], Callable[[ImageState], float]], ...] = (
        (RESTARTS, lambda image: image.restarts),
        (STALLS, lambda image: image.stalls),
        (FAILED_READS, lambda image: image.failed_reads),
        (FAULTS, lambda image: image.fault_waits.count),
    )
    for kind, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for names, value in metrics:
            family = kind(*names, labels=IMAGE_LABELS)
            for image in images:
                family.add_metric(_labels(image), value(image))
            yield family
    tiers = CounterMetricFamily(*TIER_BYTES, labels=[*IMAGE_LABELS, "tier"])
    for image in images:
        for tier, read_bytes in sorted(image.bytes_by_tier.items()):
            tiers.add_metric([*_labels(image), tier], read_bytes)
    yield tiers


def _labels(image: ImageState) -> list[str]:
    return [image.id, image.snapshot_url, image.tenant]
