"""Several services on one PostgreSQL: one campaign, one token, and no lease taken back wrongly."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.service.postgres_server import PostgresServer
from layout_tuner.api.live.open_streams import NOT_VALID
from layout_tuner.api.process.background_jobs import Sweeper
from layout_tuner.protocol.connection.running_service import find_service
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.api.live.test_event_streams import PROMISED_S
from tests.kit.api import CAMPAIGN, INTRODUCTION, bearer, ends, refused_line
from tests.kit.live import Watcher
from tests.kit.persons import Person
from tests.kit.services import ServeProcess, run_command, run_here
from tests.kit.store import TurnableClock, lease_one, make_campaign, make_worker
from tests.kit.waiting import wait_until


@pytest.fixture
def services(postgres_url: str, tmp_path: Path) -> Iterator[list[ServeProcess]]:
    """Two, which were started at once on one data directory."""
    with ExitStack() as stack:
        started = [ServeProcess(tmp_path / "data", "--database", postgres_url) for _ in range(2)]
        for service in started:
            stack.callback(service.end, signal.SIGKILL)
        yield started


@pytest.mark.slow
def test_two_services_share_campaigns_and_workers(
    services: list[ServeProcess], tmp_path: Path
) -> None:
    first, second = services
    created = first.post("/campaigns", CAMPAIGN)
    assert second.get("/campaigns/first")["id"] == created["id"]
    session = second.post("/workers", INTRODUCTION)["worker_id"]
    first.post(f"/workers/{session}/heartbeats", {"trials": []})
    # A data directory's own database is not shared.
    own = run_here("serve", "--port", "0", "--data-dir", str(tmp_path / "data"))
    ends(own, 1, "on the data directory", "already, at http://")
    # The command line finds either, and the other once one is killed.
    data = DataDir(tmp_path / "data")
    for service in services:
        found = find_service(data.path, pid=service.service["pid"])
        assert found.url == service.url
    first.end(signal.SIGKILL)
    listed = run_command("campaign", "list", "--json", "--data-dir", str(data.path))
    assert [campaign["name"] for campaign in json.loads(listed.stdout)["campaigns"]] == ["first"]
    assert second.end() == 0
    assert find_service(data.path) is None


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "driver", "up"])
def test_a_database_that_refuses_is_one_clear_line_without_the_password(
    postgres_server: PostgresServer, tmp_path: Path, command: str
) -> None:
    url = postgres_server.url("postgres", user="nobody:open-sesame")
    port = () if command == "driver" else ("--port", "0")
    where = ("--data-dir", str(tmp_path / "data"))
    line = refused_line(run_here(command, *where, *port, LAYOUT_TUNER_DATABASE_URL=url))
    assert line.startswith("Error: the database postgresql://nobody@")
    assert 'role "nobody" does not exist' in line
    logs = (tmp_path / "data" / "logs").glob("*.log")
    assert "sesame" not in line + "".join(log.read_text() for log in logs)


class Machines:
    """Two machines whose services sweep one database."""

    def __init__(self, url: str) -> None:
        self.clock = TurnableClock()
        self.stores = [Store(url, clock=self.clock) for _ in range(2)]
        self.sweepers = [Sweeper(store, interval_s=1.0, clock=self.clock) for store in self.stores]
        store = self.stores[0]
        self.trial = store.trials.add(make_campaign(store), Layout()).id

    def lease(self) -> None:
        lease_one(self.stores[0], make_worker(self.stores[0]).id)

    def sweep(self, *which: int, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.forward(1)
            for number in which:
                self.sweepers[number].sweep()

    @property
    def state(self) -> str:
        return self.stores[1].trials.get(self.trial).state


@pytest.fixture
def machines(postgres_url: str) -> Iterator[Machines]:
    machines = Machines(postgres_url)
    with ExitStack() as stack:
        for store in machines.stores:
            stack.enter_context(closing(store))
        yield machines


def test_a_service_extends_leases_only_while_no_other_was_there(machines: Machines) -> None:
    machines.sweep(0, seconds=1)
    machines.lease()
    machines.sweep(0, seconds=10)
    machines.sweep(0, 1, seconds=4)  # the second has just started
    assert machines.state == "RUNNING"
    machines.sweep(1, seconds=2)
    assert machines.state == "PENDING"

    machines.lease()
    machines.sweep(0, seconds=14)  # the second sleeps
    assert machines.state == "RUNNING"
    machines.sweep(1, seconds=2)
    assert machines.state == "PENDING"

    machines.lease()
    machines.clock.forward(3600)  # neither is there
    machines.sweep(1, seconds=1)
    machines.sweep(0, seconds=10)
    assert machines.state == "RUNNING"
    machines.sweep(0, 1, seconds=6)
    assert machines.state == "FAILED", "its third attempt was lost too"


def sign_in(service: ServeProcess, code: str) -> tuple[httpx.Response, Person]:
    person = Person(service.url)
    return person.sign_in_with_code(code), person


@pytest.mark.slow
def test_a_session_holds_and_ends_in_every_service(services: list[ServeProcess]) -> None:
    """Browsers reach the services by one address, as behind a proxy: cookies have its port."""
    first, second = services
    made = first.post("/tokens", {"name": "ana", "role": "viewer"})
    code = first.http.post("/sign-in-codes", headers=bearer(made["token"])).json()["code"]
    begun, person = sign_in(second, code)
    assert begun.status_code == 200
    spent, thief = sign_in(first, code)
    assert spent.status_code == 401
    host = httpx.URL(person.url).netloc.decode()

    def status_at(service: ServeProcess) -> int:
        cookie = "; ".join(f"{name}={value}" for name, value in person.cookies.items())
        headers = {"Host": host, "Cookie": cookie, "Sec-Fetch-Site": "same-origin"}
        url = f"{service.url}/v1/whoami"
        return httpx.get(url, headers=headers, trust_env=False).status_code

    assert [status_at(service) for service in services] == [200, 200]
    first.http.delete(f"/tokens/{made['id']}").raise_for_status()
    assert status_at(first) == 401
    wait_until("the other service knows", lambda: status_at(second) == 401, 5)
    for each in (person, thief):
        each.http.close()
    other, person = sign_in(first, second.post("/sign-in-codes")["code"])
    assert other.status_code == 200
    host = httpx.URL(person.url).netloc.decode()
    assert [status_at(service) for service in services] == [200, 200]
    cookies = dict(person.cookies)
    assert person.send_form("/sign-out", {"csrf_token": person.form_token()}).status_code == 303
    for name, value in cookies.items():
        person.http.cookies.set(name, value)
    assert status_at(first) == 401
    wait_until("the other service knows", lambda: status_at(second) == 401, 5)
    person.http.close()


@pytest.mark.slow
def test_streams_end_in_every_service_with_their_token_session_or_time(
    services: list[ServeProcess],
) -> None:
    """Twenty streams of a token, one of a session, and one of a token that expires, in each."""
    with ExitStack() as stack:
        urls = [f"{service.url}/v1" for service in services]

        def token(name: str, **more: Any) -> Any:
            return services[0].post("/tokens", {"name": name, "role": "viewer", **more})

        def watch(headers: dict[str, str], url: str) -> Watcher:
            watcher = stack.enter_context(Watcher(f"{url}/events", headers=headers))
            watcher.opened()
            return watcher

        person = Person(urls[0].removesuffix("/v1"))
        stack.callback(person.http.close)
        person.sign_in_by_form(token("person")["token"])
        (cookie,) = person.http.cookies.values()
        revoked = token("revoked")
        staying = [watch(services[0].headers, url) for url in urls]
        ended_with = [watch(bearer(revoked["token"]), url) for url in urls for _ in range(20)]
        services[0].http.delete(f"/tokens/{revoked['id']}").raise_for_status()
        ends_by = {time.monotonic() + PROMISED_S: ended_with}
        own = {"Sec-Fetch-Site": "same-origin"}
        ports = [httpx.URL(url).port for url in urls]
        cookies = [{"Cookie": f"layout_tuner_{port}={cookie}"} for port in ports]
        signed_in = [watch(own | each, url) for each, url in zip(cookies, urls, strict=True)]
        person.send_form("/sign-out", {"csrf_token": person.form_token()})
        ends_by[time.monotonic() + PROMISED_S] = signed_in
        until = datetime.now(UTC) + timedelta(seconds=3)
        brief = token("brief", expires_at=until.isoformat())["token"]
        expiring = [watch(bearer(brief), url) for url in urls]
        left_s = (until - datetime.now(UTC)).total_seconds()
        ends_by[time.monotonic() + left_s + PROMISED_S] = expiring
        for deadline_s, watchers in ends_by.items():
            for watcher in watchers:
                assert watcher.next() == ("stream.closed", {"reason": NOT_VALID})
                assert watcher.has_ended()
                assert watcher.ended_at_s < deadline_s
        assert all(watcher.ended_at_s == float("inf") for watcher in staying)
