"""The settings of the service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from layout_tuner.api.http.sign_in_options import NO_SIGN_IN_OPTIONS, SignInOptions
from layout_tuner.results_db.records import Visibility
from layout_tuner.results_db.retention import Retention


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a service, fixed at its start."""

    token: str = field(repr=False)
    """The admin token of the data directory."""
    worker_token: str | None = field(default=None, repr=False)
    """The worker token of the data directory; None: there is none."""
    requests_per_s: float = 100.0
    """Long-term rate limit of a viewer's or a submitter's token; admins and workers have ten times
    as much."""
    wrong_codes: int = 10
    """Wrong sign-in codes that an address may send before it must wait."""
    short_token_s: float = 3600.0
    """Seconds that the token of a command line lives which signed in by a device code."""
    device_days: float = 30.0
    """Days for which such a command line stays signed in."""
    device_poll_s: float = 5.0
    """Seconds between two questions of one that waits to be allowed."""
    local_hosts_only: bool = False
    """Whether the service listens on loopback. A request for another host name is then refused: it
    comes from a browser under DNS rebinding."""
    is_behind_proxy: bool = False
    """Whether a proxy is in front, which may use another host name than browsers do."""
    url_prefix: str = ""
    """The path below which a proxy shows the service, such as /tuner; empty: at the root."""
    sweep_interval_s: float = 1.0
    """Seconds between searches for expired leases."""
    lease_poll_s: float = 0.1
    """Seconds between looks for a change of the database while a worker waits for a trial; on
    PostgreSQL, between queries."""
    event_poll_s: float = 0.1
    """Seconds between looks for a change of the database while there are watchers; on PostgreSQL,
    between queries of the event log."""
    event_idle_poll_s: float = 1.0
    """Seconds between queries without watchers, on PostgreSQL: they number events for other
    processes."""
    live_event_s: float = 1.0
    """Seconds between live events of a campaign: progress within probes, cost; and of nodes."""
    event_ping_s: float = 15.0
    """Seconds without an event before a comment is sent, so that proxies keep the connection."""
    event_send_s: float = 10.0
    """Seconds that a watcher may take to accept data."""
    event_stream_s: float = 3600.0
    """Seconds after which a stream ends; its watcher opens a new one with its token."""
    max_watchers: int = 1000
    """Most watchers of live events of a process."""
    max_waiting_events: int = 5000
    """Most events that wait for one watcher before it is disconnected."""
    retention: Retention = field(default_factory=Retention)
    """How long logs, iterations, events, the audit log and idempotency keys are kept."""
    default_visibility: Visibility = "everyone"
    """Who sees a campaign that is submitted without saying so."""
    webhook_hosts: frozenset[str] = frozenset()
    """The origins to which webhooks may go; none: nothing is sent."""
    webhook_pace_s: float = 1.0
    """Seconds between looks for messages; a first retry waits for five times as long."""
    sign_in: SignInOptions = NO_SIGN_IN_OPTIONS
    data_dir: Path | None = None
    """Directory of constants that were measured on this machine; None: there is none."""
    stopping: Event = field(default_factory=Event)
    """Set when the service is to end, so that waiting requests are answered at once."""
