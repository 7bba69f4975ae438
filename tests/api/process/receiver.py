"""A receiver of webhooks on loopback that can be slow, away, or answer anything."""

from __future__ import annotations

import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Keeps what it accepts; `answers` are its next answers, and then 200."""

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.accepted: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.headers: dict[str, str] = {}
        """Of its answers, with which it may ask for a pause."""
        self.never_ends = False
        self.held = threading.Event()
        """While it is cleared, requests wait."""
        self.held.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, body in self.accepted]

    def close(self) -> None:
        self.held.set()
        self.never_ends = False
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked = ({name.lower(): value for name, value in self.headers.items()}, body)
                receiver.requests.append(asked)
                receiver.held.wait(60)
                status = receiver.answers.pop(0) if receiver.answers else 200
                # Before it answers: a sender may look as soon as it has the answer.
                if status == 200:
                    receiver.accepted.append(asked)
                self.send_response(status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                if 300 <= status < 400:
                    self.send_header("Location", receiver.url)
                self.end_headers()
                while receiver.never_ends:
                    try:
                        self.wfile.write(b"x" * 4096)
                    except OSError:
                        return
                    time.sleep(0.01)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
