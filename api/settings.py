"""What the service is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from results_db.leases import HEARTBEAT_INTERVAL_S, LEASE_S
from results_db.retention import Retention


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a service runs."""

    token: str = field(repr=False)
    """The token of the data directory: an admin's."""
    worker_token: str | None = field(default=None, repr=False)
    """The data directory's token for workers; None: there is none."""
    requests_per_s: float = 100.0
    """Requests a second of a viewer's or a submitter's token, in the long run; those of admins and workers
    may ask ten times as often."""
    wrong_tokens: int = 10
    """Wrong tokens that an address may send before it has to wait."""
    local_hosts_only: bool = False
    """Whether the service listens on loopback: a request for a host of another name is a browser's that
    was led here."""
    is_behind_proxy: bool = False
    """Whether a proxy stands before it, which may call the service by another name than browsers do."""
    lease_s: float = LEASE_S
    """Seconds that a lease holds after a heartbeat."""
    heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S
    """Seconds between heartbeats that workers are asked for."""
    sweep_interval_s: float = 1.0
    """Seconds between searches for leases that have run out."""
    lease_poll_s: float = 0.1
    """Seconds between looks at the database while a worker waits for work."""
    outcome_gather_s: float = 0.08
    """Seconds for which outcomes are collected, where several come at a time, before they are written together."""
    event_poll_s: float = 0.1
    """Seconds between looks at the log of events while somebody watches."""
    event_idle_poll_s: float = 1.0
    """Seconds between looks otherwise, which number events for the watchers of other processes."""
    event_ping_s: float = 15.0
    """Seconds without an event after which a watcher is sent a comment, so that proxies keep it."""
    event_send_s: float = 10.0
    """Seconds that a watcher may take to accept what it is sent."""
    event_stream_s: float = 3600.0
    """Seconds after which a watcher must come again, and show its token."""
    max_watchers: int = 1000
    """Watchers of live events that a process serves at once."""
    max_waiting_events: int = 5000
    """Events that may wait for one watcher before it is dropped."""
    retention: Retention = field(default_factory=Retention)
    """For how long logs, iterations, events, the audit and keys of requests are kept."""
    max_body_bytes: int = 4 << 20
    """Largest request body."""
    max_document_bytes: int = 256 << 10
    """Largest campaign document; people write them."""
    data_dir: Path | None = None
    """Where constants may be kept that were measured on this machine; None: nowhere."""
    stopping: Event = field(default_factory=Event)
    """Set when the service is told to end, so that waiting requests are answered at once."""
