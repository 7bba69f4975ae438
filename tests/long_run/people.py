"""Forty owners of the long run: their groups, campaigns and webhooks, and what they look at.

Each has a client of both services, and goes on with the other one while one is away.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks.bench_owners import SHARED
from benchmarks.bench_shares import ENDLESS
from layout_tuner.api.schemas.access import QuotaPut, TokenCreate, WebhookCreate
from layout_tuner.client.clients import Client
from layout_tuner.client.errors import ServiceError
from tests.api.process.receiver import Receiver
from tests.long_run.processes import Processes

OWNERS: Final = 40
CAMPAIGNS: Final = 10
"""Of each owner. The last one has no end; the others have a higher priority."""
GROUP_SIZE: Final = 4
WEIGHTS: Final = (1.0, 1.0, 2.0, 2.0)
"""Of the owners of a group."""
VISIBILITIES: Final = ("everyone", "group", "private")
WATCHERS: Final = 8
"""Owners that watch all live events."""
WATCHES_S: Final = 60.0
"""Seconds of one stream of events; the next one is at the owner's first service again."""
LOOKS_EVERY_S: Final = 5.0
"""Seconds between two requests of an owner."""
ENDLESS_TRIALS: Final = 5000
AWAY_S: Final = 180.0
"""How long both services may be away."""

MEASURED: Final[Mapping[str, Any]] = {
    "model": "tiny",
    "cluster": "local-cpu",
    "space": {"global_batch_size": 8, "tp": 1, "pp": 1, "dp": [1, 2]},
    "budget": {"node_hours": 10.0},
}
"""A measured campaign beyond the quota of every owner: it is refused."""

T = TypeVar("T")


class BothServices:
    """A client of two services that asks the second one while the first is away."""

    def __init__(self, urls: Sequence[str], token: str, opened: ExitStack, first: int = 0) -> None:
        clients = [opened.enter_context(Client(url, token, patience_s=5.0)) for url in urls]
        self._clients = [*clients[first:], *clients[:first]]

    def ask(self, call: Callable[[Client], T]) -> T:
        """The answer of one of the services.

        Raises:
            ServiceError: it is refused; or neither answers for a long time.
        """
        give_up_at = time.monotonic() + AWAY_S
        for client in cycle(self._clients):
            try:
                return call(client)
            except ServiceError as error:
                if not error.is_temporary or time.monotonic() > give_up_at:
                    raise
            time.sleep(0.2)
        raise AssertionError("a cycle has no end")


class KeptMessages(list[tuple[dict[str, str], bytes]]):
    """Messages that a receiver accepted; each is a line of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a")

    def append(self, message: tuple[dict[str, str], bytes]) -> None:
        headers, body = message
        data = json.loads(body)["data"]
        line = {"id": headers["webhook-id"], "campaign": data["campaign"]}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def name_of(owner: int) -> str:
    return f"owner-{owner:02d}"


def campaign_of(owner: int, place: int) -> str:
    return f"{name_of(owner)}-{place}"


class People:
    """The owners; `state` has their tokens and the ids of their campaigns, and is kept."""

    def __init__(self, processes: Processes, state: dict[str, Any], trials: int) -> None:
        self.faults = processes.faults
        self._processes = processes
        self._state = state
        self._trials = trials
        self._opened = ExitStack()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._receiver = Receiver(processes.receiver_port)
        self._receiver.accepted = KeptMessages(processes.folder / "messages.jsonl")
        self.admin = self._both(processes.data.token_file.read_text().strip())

    def _both(self, token: str, first: int = 0) -> BothServices:
        return BothServices(self._processes.urls, token, self._opened, first)

    def settle(self, keep: Callable[[], None]) -> None:
        """Makes owners, groups, quotas, webhooks and campaigns, as far as they are not there."""
        tokens = self._state.setdefault("tokens", {})
        ids = self._state.setdefault("campaigns", {})
        for owner in range(OWNERS):
            name, weight = name_of(owner), WEIGHTS[owner % GROUP_SIZE]
            if name not in tokens:
                # The answer with an earlier one may have been lost.
                asked = TokenCreate(
                    name=f"{name}.{uuid.uuid4().hex[:8]}", owner=name, role="submitter"
                )
                tokens[name] = self.admin.ask(lambda to, a=asked: to.create_token(a)).token
                keep()
            self.admin.ask(lambda to, n=name, w=weight: to.put_owner(n, w))
        for first in range(0, OWNERS, GROUP_SIZE):
            members = [name_of(owner) for owner in range(first, first + GROUP_SIZE)]
            self.admin.ask(lambda to, f=first, m=members: to.put_group(f"group-{f}", members=m))
            quota = QuotaPut(node_hours=1e6)
            self.admin.ask(
                lambda to, f=first, q=quota: to.put_quota("group", f"group-{f}", "week", q)
            )
        self.admin.ask(lambda to: to.put_quota("owner", "*", "day", QuotaPut(node_hours=1.0)))
        for place in range(CAMPAIGNS):
            for owner in range(OWNERS):
                if (name := campaign_of(owner, place)) not in ids:
                    ids[name] = self._submit(owner, place)
            keep()

    def _submit(self, owner: int, place: int) -> int:
        both, name = self._both(self._token(owner)), campaign_of(owner, place)
        if place == 0:
            self._add_webhook(both, owner)
        is_endless = place == CAMPAIGNS - 1
        trials = ENDLESS_TRIALS if is_endless else self._trials
        document = {
            **(ENDLESS if is_endless else SHARED),
            "name": name,
            "budget": {"trials": trials},
            "simulated": {"seed": 1 + owner},
        }
        visibility: Any = VISIBILITIES[(owner + place) % len(VISIBILITIES)]
        group = f"group-{owner - owner % GROUP_SIZE}"
        sharing: Any = {"visibility": visibility, "group": group, "priority": -place}
        return both.ask(lambda to: to.create_campaign(document, if_exists="return", **sharing)).id

    def _add_webhook(self, both: BothServices, owner: int) -> None:
        if not both.ask(lambda to: to.webhooks()).webhooks:
            hook = WebhookCreate(address=self._receiver.url, events=["campaign.ended"])
            both.ask(lambda to: to.add_webhook(hook))

    def _token(self, owner: int) -> str:
        return str(self._state["tokens"][name_of(owner)])

    def begin(self) -> None:
        """Begins to look at pages, a thread an owner, and at live events."""
        for owner in range(OWNERS):
            looking = threading.Thread(target=self._look, args=(owner,), daemon=True)
            self._threads.append(looking)
            looking.start()
        for owner in range(WATCHERS):
            threading.Thread(target=self._watch, args=(owner,), daemon=True).start()

    def _look(self, owner: int) -> None:
        both, number = self._both(self._token(owner), owner % 2), owner
        while not self._ended.wait(LOOKS_EVERY_S):
            number += 1
            looks = self._looks(owner, number)
            what, look = looks[number % len(looks)]
            try:
                both.ask(look)
            except ServiceError as error:
                self.faults.append(f"{name_of(owner)}: {what}: {error}")

    def _looks(self, owner: int, number: int) -> list[tuple[str, Callable[[Client], Any]]]:
        ids = self._state["campaigns"]
        own = campaign_of(owner, number % CAMPAIGNS)
        endless = campaign_of(owner, CAMPAIGNS - 1)
        stranger = (owner + GROUP_SIZE) % OWNERS

        def seen(visibility: str) -> str:
            place = (VISIBILITIES.index(visibility) - stranger) % len(VISIBILITIES)
            return str(ids[campaign_of(stranger, place)])

        public, hidden = seen("everyone"), seen("private")
        return [
            ("its campaign", lambda to: to.campaign(own)),
            ("its leaderboard", lambda to: to.leaderboard(endless)),
            ("another's leaderboard", lambda to: to.leaderboard(public)),
            ("a hidden campaign", lambda to: _refused(404, lambda: to.campaign(hidden))),
            ("its trials", lambda to: to.trial_page(own)),
            ("its usage", lambda to: to.usage(by="campaign", simulated=True)),
            ("its shares", lambda to: to.shares()),
            ("a page of campaigns", lambda to: to.campaign_page()),
            ("beyond its quota", lambda to: _refused(409, lambda: _submit_measured(to, number))),
            ("its table as CSV", lambda to: to.leaderboard_csv(own)),
        ]

    def _watch(self, owner: int) -> None:
        both, last = self._both(self._token(owner), owner % 2), 0

        def follow(to: Client) -> None:
            nonlocal last
            until = time.monotonic() + WATCHES_S
            for event in to.events(after=last or None):
                if event.seq is not None and event.seq <= last:
                    self.faults.append(f"event {event.seq} came after event {last}")
                last = event.seq or last
                if self._ended.is_set() or time.monotonic() > until:
                    return

        while not self._ended.is_set():
            try:
                both.ask(follow)
            except ServiceError as error:
                if not self._ended.is_set():
                    self.faults.append(f"{name_of(owner)}: live events: {error}")

    def node_hours(self) -> dict[str, float]:
        """What each owner has used."""
        use = self.admin.ask(lambda to: to.usage(by="owner", simulated=True, since="2000-01-01"))
        return {str(row.name): row.node_hours for row in use.rows}

    def cancel_endless(self) -> None:
        for owner in range(OWNERS):
            endless = self._state["campaigns"][campaign_of(owner, CAMPAIGNS - 1)]
            self.admin.ask(lambda to, e=endless: to.cancel_campaign(str(e)))

    def end_looking(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(AWAY_S)

    def close(self) -> None:
        self._ended.set()
        self._receiver.close()


def _submit_measured(to: Client, number: int) -> None:
    to.create_campaign({**MEASURED, "name": f"beyond-{number}"})


def _refused(status: int, call: Callable[[], Any]) -> None:
    """Asks for what is to be refused.

    Raises:
        ServiceError: it is not refused, or for another reason.
    """
    try:
        call()
    except ServiceError as error:
        if error.status != status:
            raise
    else:
        raise ServiceError(f"it was not refused ({status})")
