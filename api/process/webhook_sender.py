"""Sends the messages of webhooks: one at a time to each, and to different ones at once."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from datetime import UTC, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import httpx
from standardwebhooks import Webhook
from starlette.concurrency import run_in_threadpool

from layout_tuner.api.background_loops import attempt, wait_for
from layout_tuner.api.http.webhook_hosts import refuse_address, refuse_private
from layout_tuner.api.settings import Settings
from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.results_db.access.webhooks import LATELY, Answer, OutgoingMessage
from layout_tuner.results_db.models.service_tables import WORKER_ALIVE_S
from layout_tuner.results_db.store import Store

TIMEOUT_S: Final = 10.0
"""Seconds for a message, with the lookup of its host."""
LOOK_EVERY: Final = timedelta(seconds=5)
"""Between looks for lost workers and new winners."""

_log: Final = logging.getLogger(__name__)


class WebhookSender:
    """Sends messages until cancelled."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._pace_s = store, settings.webhook_pace_s
        self._hosts = settings.webhook_hosts
        # No connection is kept: a pool knows them by IP address, and not by the certificate's host.
        limits, tls = httpx.Limits(max_keepalive_connections=0), ssl.create_default_context()
        self._client = httpx.AsyncClient(verify=tls, limits=limits, trust_env=False, timeout=None)  # noqa: S113 - `_answer` has one
        self._busy: set[int] = set()
        """Ids of webhooks to which a message is on its way."""
        self._ended = asyncio.Event()
        self._outage = OutageLog(_log, "sending messages of webhooks")
        self._looked_at = self._up_since = store.now()
        self._lost_until = self._up_since - LATELY
        self._ends: dict[int, int] = {}

    async def run(self) -> None:
        async def send_due() -> None:
            await run_in_threadpool(self._look)
            for message in await run_in_threadpool(self._store.webhooks.claim, set(self._busy)):
                self._busy.add(message.webhook_id)
                tasks.create_task(self._send(message))

        async with self._client, asyncio.TaskGroup() as tasks:
            while True:
                self._ended.clear()
                await attempt(send_due, self._outage, "no message of a webhook was sent")
                await wait_for(self._ended, self._pace_s)

    def _look(self) -> None:
        """Looks for the events that no transaction makes: lost workers, and new winners."""
        now, hooks = self._store.now(), self._store.webhooks
        if abs(now - self._looked_at) < LOOK_EVERY:
            return
        if abs(now - self._looked_at) > 2 * LOOK_EVERY:  # suspended: heartbeats could not arrive
            self._up_since = now
        self._looked_at = now
        if now - self._up_since > timedelta(seconds=WORKER_ALIVE_S):
            self._lost_until = hooks.note_lost_workers(self._lost_until)
        ends = hooks.last_ends()
        changed = [each for each, end in ends.items() if end != self._ends.get(each)]
        if won := self._store.leaderboard.winners(changed):
            hooks.note_winners(
                {id_: (each.layout_key, each.trial_number, each.value) for id_, each in won.items()}
            )
        self._ends = ends

    async def _send(self, message: OutgoingMessage) -> None:
        answer = await self._answer(message)
        note, pause_s = self._store.webhooks.settle, 5 * self._pace_s
        settle = partial(run_in_threadpool, note, message.id, answer, pause_s=pause_s)
        # If this fails, the message is sent again once its claim has run out.
        await attempt(settle, self._outage, "an answer to a webhook was not noted")
        self._busy.remove(message.webhook_id)
        self._ended.set()

    async def _answer(self, message: OutgoingMessage) -> Answer:
        """Sends a message once, without reading the body of the answer."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._post(message)
        except TimeoutError:
            return Answer(f"no answer within {TIMEOUT_S:.0f} s")
        except Exception as error:  # of the network, TLS, the name or the address
            return Answer(str(error) or type(error).__name__)

    async def _post(self, message: OutgoingMessage) -> Answer:
        """Connects to the IP address that is checked: the host is looked up once.

        The signature is that of Standard Webhooks 1.0.
        """
        url, now = httpx.URL(message.address), self._store.now().astimezone(UTC)
        host = url.raw_host.decode()
        may_be_private = refuse_address(message.address, self._hosts)
        look_up = asyncio.get_running_loop().getaddrinfo
        found = await look_up(host, url.port or url.scheme, type=socket.SOCK_STREAM)
        ips = [str(each[4][0]) for each in found]
        for ip in ips if not may_be_private else ():
            refuse_private(ip)
        sign, sent_id = Webhook(message.secret).sign, message.message_id
        headers = {
            "host": url.netloc.decode(),
            "content-type": "application/json",
            "webhook-id": sent_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": sign(sent_id, now, message.body),
        }
        named: dict[str, Any] = {"headers": headers, "extensions": {"sni_hostname": host}}
        to = url.copy_with(host=ips[0])
        async with self._client.stream("POST", to, content=message.body, **named) as answer:
            if answer.is_success:
                return Answer()
            status, after = answer.status_code, answer.headers.get("retry-after", "")
            said = f"the receiver answered {status}"
            return Answer(
                f"{said}, which is not followed" if answer.is_redirect else said,
                is_gone=status == HTTPStatus.GONE,
                wait_s=float(after[:9]) if after.isdecimal() else 0.0,
            )
