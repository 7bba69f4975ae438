"""A small service that speaks the worker protocol over real HTTP, and does as a test wishes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

TOKEN = "the-right-token"


class FakeService:
    """Trials to lease, and what workers said. Change its attributes to have it misbehave."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.trials: list[dict[str, Any]] = []
        self.registrations: list[dict[str, Any]] = []
        self.live_worker: str | None = None
        self.heartbeats: list[dict[str, Any]] = []
        self.outcomes: list[dict[str, Any]] = []
        self.unregistered: list[str] = []
        self.stop: list[int] = []
        self.asks: list[dict[str, Any]] = []
        """Requests for leases."""
        self.quarantined: list[dict[str, str]] = []
        """Nodes under quarantine when a worker registers."""
        self.quarantine: list[dict[str, str]] = []
        self.release: list[str] = []
        self.away = False
        """Answers 503 to everything."""
        self.refuse_outcomes = False
        self.refuses: Callable[[dict[str, Any]], bool] = lambda _body: self.refuse_outcomes
        """Whether it refuses what is said of an outcome."""
        self.breaks_over: set[int] = set()
        """Trials whose outcomes it answers with 500."""
        self.stalls = False
        """Leaves heartbeats without an answer."""
        self.answered_heartbeats = 0
        self.garbles = False
        """Sends bytes that are not of the encoding that it names."""
        self.superseded: dict[str, str] = {}
        """Names by the sessions that another has taken over."""
        self.url = ""

    def add_trial(self, trial_id: int, request: dict[str, Any], attempt: int = 1) -> None:
        lease = {"trial_id": trial_id, "attempt": attempt, "number": trial_id, "campaign": "c"}
        lease |= {"request": request, "lease_expires_at": "2026-01-01T00:00:00Z"}
        with self.changed:
            self.trials.append(lease)
            self.changed.notify_all()

    def forget_worker(self) -> None:
        with self.changed:
            self.live_worker = None
            self.changed.notify_all()

    def states(self) -> dict[str, str]:
        """The nodes' states by the latest heartbeat."""
        nodes = [node for body in self.heartbeats[-1:] for node in body["status"]["nodes"]]
        return {node["name"]: node["state"] for node in nodes}

    def told_health(self) -> dict[str, dict[str, Any]]:
        """The newest health reports by node; a worker tells each once."""
        statuses = [body["status"] for body in self.heartbeats if body.get("status")]
        told = [node for status in statuses for node in status["nodes"]]
        return {node["name"]: node["health"] for node in told if node["health"] is not None}

    def _has_news(self) -> bool:
        return bool(self.trials or self.away or self.live_worker is None or self.superseded)

    def gone(self, worker_id: str) -> tuple[int, Any]:
        if worker_id in self.superseded:
            name = self.superseded[worker_id]
            return 409, problem(f"another worker has registered as {name}")
        return 404, problem(f"there is no worker {worker_id}")

    def intercept(self, answer_first: Callable[[list[str], Any], tuple[int, Any] | None]) -> None:
        """Has something answer before this service does, where it wants to."""
        answer = self.answer
        self.answer = lambda method, path, body: (
            answer_first(path, body) or answer(method, path, body)
        )

    def answer(self, method: str, path: list[str], body: Any) -> tuple[int, Any]:
        with self.changed:
            self.changed.notify_all()
            if self.away:
                return 503, problem("down for a moment")
            match method, path:
                case "POST", ["v1", "workers"]:
                    if self.live_worker is not None:
                        self.superseded[self.live_worker] = body["name"]
                    self.registrations.append(body)
                    self.live_worker = f"session-{len(self.registrations)}"
                    created: dict[str, Any] = {"worker_id": self.live_worker, "lease_s": 15.0}
                    created["quarantined"] = self.quarantined
                    return 201, {**created, "heartbeat_interval_s": 0.05}
                case "POST", ["v1", "trials", trial_id, "outcome"]:
                    if self.refuses(body):
                        return 422, problem("a number is not finite")
                    if int(trial_id) in self.breaks_over:
                        return 500, problem("Internal Server Error")
                    self.outcomes.append({**body, "trial_id": int(trial_id)})
                    return 200, {"accepted": True, "state": "COMPLETED"}
                case _, ["v1", "workers", worker_id, *_] if worker_id != self.live_worker:
                    return self.gone(worker_id)
                case "POST", ["v1", "workers", _, "leases"]:
                    self.asks.append(body)
                    self.changed.wait_for(self._has_news, body["wait_s"])
                    if self.live_worker != path[2]:
                        return self.gone(path[2])
                    leases, self.trials = self.trials[:1], self.trials[1:]
                    return 200, {"leases": leases}
                case "POST", ["v1", "workers", _, "heartbeats"]:
                    self.heartbeats.append(body)
                    self.changed.wait_for(lambda: not self.stalls, 30)
                    self.answered_heartbeats += 1
                    wishes = {"release": self.release, "quarantine": self.quarantine}
                    return 200, {"stop": self.stop, **wishes}
                case "DELETE", ["v1", "workers", worker_id]:
                    self.unregistered.append(worker_id)
                    self.live_worker = None
                    return 204, None
        raise AssertionError(f"unexpected request {method} {path}")


def problem(detail: str) -> dict[str, Any]:
    return {"type": "about:blank", "title": "Problem", "detail": detail}


Served = TypeVar("Served", bound=FakeService)


@contextmanager
def serve(service: Served) -> Iterator[Served]:
    """Serves on loopback while the context lasts."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # header and body are written apart

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                status, answer = 401, problem("the token is unknown")
            elif self.path == "/v1/whoami":
                status, answer = 200, {"name": "test", "role": "worker", "expires_at": None}
            else:
                path = self.path.strip("/").split("/")
                status, answer = service.answer(self.command, path, body)
            content = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            if service.garbles:
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = answer

    with serving(Handler) as service.url:
        yield service


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A worker that was killed in a request is no news."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address on loopback at which such handlers answer while the context lasts."""
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
