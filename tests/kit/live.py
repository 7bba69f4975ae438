"""A service on a socket in this process, and watchers of its live events."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import httpx
from httpx_sse import EventSource, ServerSentEvent

from layout_tuner.api.app import create_app
from layout_tuner.api.http.bind_address import LOCAL_PROXIES
from layout_tuner.api.http.connection_limits import ConnectionLimits
from layout_tuner.api.http.server import LimitedServer
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.store import Store
from tests.kit.api import HEADERS
from tests.kit.waiting import wait_until

PATIENCE_S = 30.0
DEFAULT_LIMITS = ConnectionLimits()


@dataclass(frozen=True, slots=True)
class Live:
    """A service that runs in a thread of this process."""

    url: str
    server: LimitedServer

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        parsed = httpx.URL(self.url)
        return parsed.host, parsed.port


@contextmanager
def live_server(
    settings: Settings,
    store: Store,
    *,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Live]:
    """Serves in a thread, with the server that `layout-tuner serve` has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(settings, store)
        proxies = LOCAL_PROXIES if settings.is_behind_proxy else ()
        served = app.state.owner_sign_in.behind(proxies, app)
        server = LimitedServer(served, limits, settings.stopping, tls=tls)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until("the service serves", lambda: server.started)
            scheme = "http" if tls is None else "https"
            yield Live(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", server)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@contextmanager
def live_service(settings: Settings, store: Store) -> Iterator[str]:
    """Serves in a thread; yields the address of /v1."""
    with live_server(settings, store) as live:
        yield f"{live.url}/v1"


class Watcher:
    """Reads a stream in a thread of its own."""

    def __init__(
        self,
        url: str,
        *,
        last_event_id: int | str | None = None,
        headers: Mapping[str, str] = MappingProxyType(HEADERS),
    ) -> None:
        headers = dict(headers)
        if last_event_id is not None:
            headers["Last-Event-ID"] = str(last_event_id)
        self._request = {"method": "GET", "url": url, "headers": headers}
        self._events: queue.Queue[ServerSentEvent | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._client = httpx.Client(timeout=PATIENCE_S)
        self.last_id = ""
        self.ended_at_s = math.inf

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Closes the connection from the client's side."""
        stream = getattr(self, "_socket", None)
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._client.close()

    def next(self) -> tuple[str, Any]:
        """The kind and the data of the next event."""
        event = self._events.get(timeout=PATIENCE_S)
        assert event is not None, "the stream has ended"
        self.last_id = event.id
        return event.event, json.loads(event.data)

    def opened(self) -> dict[str, Any]:
        """What the stream says when it opens."""
        kind, data = self.next()
        assert kind == "stream.opened"
        return data

    def kinds(self, count: int) -> list[str]:
        """The kinds of the next events."""
        return [self.next()[0] for _ in range(count)]

    def has_ended(self) -> bool:
        """Waits for the end of the stream; False where another event comes before."""
        return self._events.get(timeout=PATIENCE_S) is None

    def _read(self) -> None:
        try:
            with self._client.stream(**self._request) as answer:  # type: ignore[arg-type]
                self._socket = answer.extensions["network_stream"].get_extra_info("socket")
                for event in EventSource(answer).iter_sse():
                    # A comment comes as an event without data once there was an id.
                    if event.data:
                        self._events.put(event)
        except httpx.TransportError:
            pass  # the end, in whatever way, is what the test looks at
        finally:
            self.ended_at_s = time.monotonic()
            self._events.put(None)
