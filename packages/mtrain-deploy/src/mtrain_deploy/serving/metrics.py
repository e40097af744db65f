"""Metrics about a server in the text format of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "mtrain_requests", "Requests that were answered, by path and status", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "mtrain_predict_seconds",
            "Seconds from the header of a request for predictions to its answer",
            buckets=_SECONDS,
            registry=registry,
        )
        self.forward = Histogram(
            "mtrain_forward_seconds", "Seconds in which a batch was computed", buckets=_SECONDS, registry=registry
        )
        self.batch = Histogram(
            "mtrain_batch_size",
            "Images in a batch that was computed",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self.images = Counter("mtrain_images", "Images that were predicted on", registry=registry)
        self.abandoned = Counter(
            "mtrain_abandoned_images", "Images that nobody waited for any more, not computed", registry=registry
        )
        self.failed = Counter("mtrain_failed_images", "Images of batches that could not be computed", registry=registry)
        self.in_work = Gauge(
            "mtrain_images_in_work", "Images that are decoded, wait or are computed", registry=registry
        )
        self.pixels = Gauge(
            "mtrain_pixels_in_work", "Pixels of large images in work, beyond the share of each", registry=registry
        )
        self.received = Gauge("mtrain_received_bytes", "Bytes of requests that are in memory", registry=registry)

    def count_batch(self, count: int, seconds: float) -> None:
        """Count a batch of ``count`` samples that was computed in ``seconds``."""
        self.forward.observe(seconds)
        self.batch.observe(count)

    def value(self, name: str) -> float:
        """Return a metric without labels, by the name in the text format."""
        return self._registry.get_sample_value(f"mtrain_{name}") or 0.0

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
