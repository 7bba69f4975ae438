"""Metrics for Prometheus: requests of this process, and statistics of the whole service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from time import monotonic, perf_counter
from typing import Final

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layout_tuner.api.http.route_map import RouteMap
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.service_stats import ServiceStats
from layout_tuner.results_db.store import Store
from layout_tuner.version import version

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# It would add to every series another one with the time of its creation.
disable_created_metrics()  # type: ignore[no-untyped-call]

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

READ_EVERY_S: Final = 5.0
"""Least seconds between two queries of the database."""

NO_OPERATION: Final = "none"
"""Label of requests without a route: clients choose their paths, so these are no labels."""


class Metrics:
    """The metrics of one application."""

    def __init__(self, store: Store, num_watchers: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "layout_tuner_http_requests",
            "Requests that were answered",
            ("operation", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "layout_tuner_http_request_seconds",
            "Seconds until a request was answered; streams and leases that wait are left out",
            ("operation",),
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "layout_tuner_http_requests_in_flight",
            "Requests that are being answered",
            registry=self._registry,
        )
        watchers = Gauge(
            "layout_tuner_event_watchers", "Watchers of live events", registry=self._registry
        )
        watchers.set_function(num_watchers)
        self._of_all = _ServiceCollector(store)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def text(self, store: Store) -> bytes:
        """The metrics, with the campaigns that a store finds."""
        service = self._of_all if store.eyes_of is None else _ServiceCollector(store)
        return generate_latest(service) + generate_latest(self._registry)


class MeasuredRequests:
    """Counts and times requests by operation; those that an outer layer answers are not counted."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, routes: RouteMap) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = self._routes.asked(scope)
        operation = NO_OPERATION if asked is None else asked.operation
        status, begun = 500, perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(operation, str(status)).inc()
            if operation not in _WAITING:
                self._metrics.seconds.labels(operation).observe(perf_counter() - begun)


_WAITING: Final = frozenset({"stream_events", "stream_campaign_events", "lease_trials"})
"""Operations that wait before they answer."""


class _ServiceCollector(Collector):
    """Statistics of the service, read from the database at most every `READ_EVERY_S`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read_at = -READ_EVERY_S
        self._stats: ServiceStats | None = None
        # A late outcome may lower a cost. Prometheus takes a counter that falls for one anew.
        self._of_owners: Counter[str] = Counter()

    def describe(self) -> Iterator[Metric]:
        """Empty, so that registering it does not query the database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics of the whole service; only `database_up` if the database does not answer."""
        yield InfoMetricFamily("layout_tuner", "This service", {"version": version()})
        stats = self._read()
        yield _one("layout_tuner_database_up", "Whether the database answers", float(bool(stats)))
        if stats is not None:
            yield from _families(stats, self._store, self._of_owners)

    def _read(self) -> ServiceStats | None:
        now = monotonic()
        if now - self._read_at >= READ_EVERY_S:
            self._read_at = now
            try:
                self._stats = self._store.statistics.service_stats()
                self._of_owners |= self._stats.owner_node_seconds
            except DatabaseUnavailableError:
                self._stats = None
        return self._stats


def _families(
    stats: ServiceStats, store: Store, of_owners: Mapping[str, float]
) -> Iterator[Metric]:
    for name, documentation, label, values in (
        ("layout_tuner_campaigns", "Campaigns", "state", stats.campaigns),
        ("layout_tuner_open_trials", "Trials that wait or run", "state", stats.open_trials),
        ("layout_tuner_workers", "Workers that are there", "cluster", stats.workers),
        (
            "layout_tuner_node_seconds",
            "What campaigns have cost, in node-seconds",
            "part",
            stats.node_seconds,
        ),
    ):
        family = GaugeMetricFamily(name, documentation, labels=(label,))
        for key, value in values.items():
            family.add_metric((key,), value)
        yield family
    counter = CounterMetricFamily(
        "layout_tuner_owner_node_seconds",
        "What each owner's measured campaigns have cost, with deleted ones",
        labels=("owner",),
    )
    for owner, node_seconds in of_owners.items():
        counter.add_metric((owner,), node_seconds)
    yield counter
    yield _one("layout_tuner_quarantined_nodes", "Nodes set aside", stats.quarantined_nodes)
    yield _one(
        "layout_tuner_unnumbered_events",
        "Events that watchers do not see yet",
        stats.unnumbered_events,
    )
    yield _one("layout_tuner_database_bytes", "Size of the database", stats.num_bytes)
    if stats.driver_seen_at is not None:
        silence_s = max((store.now() - stats.driver_seen_at).total_seconds(), 0.0)
        yield _one(
            "layout_tuner_driver_silence_seconds", "Since a driver was last at work", silence_s
        )


def _one(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value)
