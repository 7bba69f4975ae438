"""Sends the messages of webhooks: one at a time to each, and to different ones at once."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import socket
import ssl
import time
from typing import Final

import httpx
from starlette.concurrency import run_in_threadpool

from layout_tuner.api.background_loops import attempt, wait_for
from layout_tuner.api.http.webhook_hosts import refuse_address, refuse_private
from layout_tuner.api.settings import Settings
from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.results_db.access.webhooks import OutgoingMessage
from layout_tuner.results_db.errors import WebhookInvalidError
from layout_tuner.results_db.models.service_tables import WORKER_ALIVE_S
from layout_tuner.results_db.store import Store

TIMEOUT_S: Final = 10.0
"""Seconds for a message, with the lookup of its host."""
LOOK_EVERY_S: Final = 5.0
"""Seconds between looks for lost workers and new winners."""

_ANSWERED: Final = "the receiver answered {}"
_log: Final = logging.getLogger(__name__)


class CheckedTransport(httpx.AsyncHTTPTransport):
    """Connects to the IP address that was checked: the host of a message is looked up once.

    It keeps no connections: the pool would know them by IP address, and not by the host that their
    certificates were checked for.
    """

    def __init__(self, hosts: frozenset[str]) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        super().__init__(verify=ssl.create_default_context(), limits=limits, trust_env=False)
        self._hosts = hosts

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url, host = request.url, request.url.raw_host.decode()
        may_be_private = refuse_address(str(url), self._hosts)
        look_up = asyncio.get_running_loop().getaddrinfo
        found = await look_up(host, url.port or url.scheme, type=socket.SOCK_STREAM)
        ips = [str(each[4][0]) for each in found]
        for ip in ips if not may_be_private else ():
            refuse_private(ip)
        request.url = url.copy_with(host=ips[0])
        request.extensions = {**request.extensions, "sni_hostname": host}
        return await super().handle_async_request(request)


class WebhookSender:
    """Sends messages until cancelled."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._pace_s = store, settings.webhook_pace_s
        transport = CheckedTransport(settings.webhook_hosts)
        self._client = httpx.AsyncClient(transport=transport, trust_env=False, timeout=TIMEOUT_S)
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._outage = OutageLog(_log, "sending messages of webhooks")
        self._looked_at = self._up_since = time.monotonic()
        self._ends: dict[int, int] = {}

    async def run(self) -> None:
        try:
            while True:
                self._ended.clear()
                await attempt(self._send_due, self._outage, "no message of a webhook was sent")
                await wait_for(self._ended, self._pace_s)
        finally:
            for task in self._sending.values():
                task.cancel()
            await self._client.aclose()

    async def _send_due(self) -> None:
        await run_in_threadpool(self._look)
        for message in await run_in_threadpool(self._store.webhooks.claim, set(self._sending)):
            task = asyncio.create_task(self._send(message))
            self._sending[message.webhook_id] = task

    def _look(self) -> None:
        """Looks for the events that no transaction makes: lost workers, and new winners."""
        now, since_s = time.monotonic(), time.monotonic() - self._looked_at
        if since_s < LOOK_EVERY_S:
            return
        if since_s > 2 * LOOK_EVERY_S:  # suspended: heartbeats could not arrive
            self._up_since = now
        self._looked_at = now
        asked, ends = self._store.webhooks.watched()
        if "worker.lost" in asked and now - self._up_since > WORKER_ALIVE_S:
            self._store.webhooks.note_lost_workers()
        changed = [each for each, end in ends.items() if end != self._ends.get(each)]
        for campaign_id, won in self._store.leaderboard.winners(changed).items():
            self._store.webhooks.note_winner(
                campaign_id, won.layout_key, won.trial_number, won.value
            )
        self._ends = ends

    async def _send(self, message: OutgoingMessage) -> None:
        async def send_and_note() -> None:
            problem = await self._problem_of(message)
            note = self._store.webhooks.settle
            is_gone, pause_s = problem == _ANSWERED.format(410), 5 * self._pace_s
            await run_in_threadpool(note, message.id, problem, pause_s=pause_s, is_gone=is_gone)

        try:
            # If this fails, the message is sent again once its claim has run out.
            await attempt(send_and_note, self._outage, "an answer to a webhook was not noted")
        finally:
            del self._sending[message.webhook_id]
            self._ended.set()

    async def _problem_of(self, message: OutgoingMessage) -> str:
        """Sends a message once, without reading the body of the answer; returns why it failed."""
        headers = signed(message, int(self._store.now().timestamp()))
        post, address = self._client.stream, message.address
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                post("POST", address, content=message.body, headers=headers) as answer,
            ):
                if answer.is_redirect:
                    return f"{_ANSWERED.format(answer.status_code)}, which is not followed"
                return "" if answer.is_success else _ANSWERED.format(answer.status_code)
        except TimeoutError:
            return f"no answer within {TIMEOUT_S:.0f} s"
        except (httpx.HTTPError, httpx.InvalidURL, WebhookInvalidError, OSError) as error:
            return str(error) or type(error).__name__


def signed(message: OutgoingMessage, sent_at: int) -> dict[str, str]:
    """The headers of an attempt at `sent_at`, in seconds since 1970.

    Signatures are those of Standard Webhooks 1.0: HMAC-SHA256 of id, time and body.
    """
    content = f"{message.message_id}.{sent_at}.".encode() + message.body
    keys = [base64.b64decode(each.removeprefix("whsec_")) for each in message.secrets]
    macs = [base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode() for key in keys]
    return {
        "content-type": "application/json",
        "webhook-id": message.message_id,
        "webhook-timestamp": str(sent_at),
        "webhook-signature": " ".join(f"v1,{mac}" for mac in macs),
    }
