"""What the service is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from results_db.leases import HEARTBEAT_INTERVAL_S, LEASE_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a service runs."""

    token: str
    """The bearer token that every request but those for health and documentation must carry."""
    lease_s: float = LEASE_S
    """Seconds that a lease holds after a heartbeat."""
    heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S
    """Seconds between heartbeats that workers are asked for."""
    sweep_interval_s: float = 1.0
    """Seconds between searches for leases that have run out."""
    lease_poll_s: float = 0.1
    """Seconds between looks at the database while a worker waits for work."""
    max_body_bytes: int = 4 << 20
    """Largest request body."""
    max_document_bytes: int = 256 << 10
    """Largest campaign document; people write them."""
    data_dir: Path | None = None
    """Where constants may be kept that were measured on this machine; None: nowhere."""
    stopping: Event = field(default_factory=Event)
    """Set when the service is told to end, so that waiting requests are answered at once."""
