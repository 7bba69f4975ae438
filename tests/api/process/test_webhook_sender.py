"""Webhooks against real receivers: slow, away, gone, redirecting, or never at an end."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import CliRunner
from fastapi.testclient import TestClient
from standardwebhooks import Webhook, WebhookVerificationError

from layout_tuner.api.app import create_app
from layout_tuner.api.http.webhook_hosts import read_hosts
from layout_tuner.api.settings import Settings
from layout_tuner.cli.main import main
from layout_tuner.results_db.store import Store
from tests.api.process.receiver import Receiver
from tests.kit.api import CAMPAIGN, HEADERS, TOKEN, Api, answered, bearer, client_of
from tests.kit.postgres import upgraded
from tests.kit.waiting import wait_until

PACE_S = 0.02


class Served:
    """A service in this process that may send to receivers on loopback."""

    def __init__(self, http: TestClient, store: Store) -> None:
        self.http, self.store = http, store

    def add(self, receiver: Receiver, **given: Any) -> Any:
        asked = {"address": receiver.url, "events": ["campaign.ended"]} | given
        return answered(self.http.post("/v1/webhooks", json=asked), 201).json()

    def test(self, webhook: Any) -> Any:
        """Sends a test message; returns the webhook before the receiver answers."""
        return answered(self.http.post(f"/v1/webhooks/{webhook['id']}/test"), 202).json()

    def read(self, webhook: Any) -> Any:
        found = self.http.get("/v1/webhooks").json()["webhooks"]
        return next(each for each in found if each["id"] == webhook["id"])

    def tested(self, webhook: Any) -> Any:
        """Sends a test message; returns the webhook when a receiver has answered or failed."""
        self.test(webhook)
        wait_until("an attempt has ended", lambda: self.read(webhook)["tried_at"])
        return self.read(webhook)

    def deliver(self, webhook: Any) -> None:
        """Waits until the webhook's last attempt was a delivery."""

        def is_delivered() -> bool:
            found = self.read(webhook)
            return bool(found["tried_at"] and not found["problem"])

        wait_until("the message is delivered", is_delivered)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with closing(Receiver()) as receiver:
        yield receiver


@pytest.fixture
def other() -> Iterator[Receiver]:
    with closing(Receiver()) as receiver:
        yield receiver


@pytest.fixture
def served(tmp_path: Path, receiver: Receiver, other: Receiver) -> Iterator[Served]:
    hosts = read_hosts(f"http://127.0.0.1:{each.port}" for each in (receiver, other))
    settings = Settings(token=TOKEN, webhook_hosts=hosts, webhook_pace_s=PACE_S)
    with (
        closing(Store.open(upgraded(tmp_path))) as store,
        TestClient(create_app(settings, store), headers=HEADERS) as http,
    ):
        yield Served(http, store)


def test_an_ended_campaign_is_sent_and_signed(served: Served, receiver: Receiver) -> None:
    secret = served.add(receiver)["secret"]
    served.http.post("/v1/campaigns", json=CAMPAIGN)
    served.http.post("/v1/campaigns/first/cancel")
    wait_until("it is there", lambda: receiver.accepted)
    ((headers, body),) = receiver.accepted
    read = Webhook(secret).verify(body, headers)
    assert read["type"] == "campaign.ended"
    assert read["data"]["url"] == f"http://testserver/campaigns/{read['data']['campaign_id']}"
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(body.replace(b"first", b"other"), headers)


def test_the_documented_receiver_reads_it(served: Served, receiver: Receiver) -> None:
    page = Path("docs/reference/webhooks.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    secret = served.add(receiver)["secret"]
    served.test({"id": 1})
    wait_until("it is there", lambda: receiver.accepted)
    ((headers, body),) = receiver.accepted
    seen: set[str] = set()
    assert names["read_message"](secret, headers, body, seen)["type"] == "webhook.test"
    assert names["read_message"](secret, headers, body, seen) is None
    with pytest.raises(ValueError, match="not a message"):
        names["read_message"](secret, headers, body + b" ", set())


def test_a_retry_has_its_id_and_its_body(served: Served, receiver: Receiver) -> None:
    receiver.answers = [500, 503]
    hook = served.add(receiver)
    served.test(hook)
    served.deliver(hook)
    assert len(receiver.requests) == 3
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 1
    assert len({body for _, body in receiver.requests}) == 1


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (500, "the receiver answered 500"),
        (302, "the receiver answered 302, which is not followed"),
    ],
)
def test_a_refusal_is_shown(served: Served, receiver: Receiver, status: int, problem: str) -> None:
    receiver.answers = [status] * 99
    hook = served.add(receiver)
    assert served.tested(hook)["problem"] == problem
    wait_until("it is tried again", lambda: len(receiver.requests) > 1)
    assert receiver.accepted == []


def test_a_receiver_is_left_alone_as_it_asks(served: Served, receiver: Receiver) -> None:
    receiver.answers, receiver.headers = [429], {"Retry-After": "2"}
    hook, other = served.add(receiver), served.add(receiver)
    assert served.tested(hook)["problem"] == "the receiver answered 429"
    for _ in range(9):  # a pause of its own would have ended meanwhile
        served.tested(other)
    assert len(receiver.requests) == 10


def test_gone_turns_the_webhook_off(served: Served, receiver: Receiver) -> None:
    receiver.answers = [410]
    hook = served.add(receiver)
    assert served.tested(hook)["off_because"] == "the receiver answered 410"
    assert served.test(hook)["off_because"] == ""
    served.deliver(hook)
    assert len(receiver.accepted) == 1


def test_an_answer_without_end_is_not_read(served: Served, receiver: Receiver) -> None:
    receiver.never_ends = True
    hook = served.add(receiver)
    served.test(hook)
    served.deliver(hook)


def test_a_slow_receiver_delays_no_other(
    served: Served, receiver: Receiver, other: Receiver
) -> None:
    receiver.held.clear()
    slow, fast = served.add(receiver), served.add(other)
    served.test(slow)
    wait_until("it is asked", lambda: receiver.requests)
    for _ in range(3):
        assert served.tested(fast)["problem"] == ""
    served.test(slow)
    assert served.read(slow)["tried_at"] is None
    assert len(receiver.requests) == 1
    receiver.held.set()
    served.deliver(slow)


def test_a_silent_receiver_is_left_in_time(
    served: Served, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.api.process.webhook_sender.TIMEOUT_S", 0.2)
    receiver.held.clear()
    assert served.tested(served.add(receiver))["problem"] == "no answer within 0 s"


def test_a_receiver_that_is_away_gets_it_later(served: Served, receiver: Receiver) -> None:
    port = receiver.port
    receiver.close()
    hook = served.add(receiver)
    assert served.tested(hook)["problem"] == "All connection attempts failed"
    with closing(Receiver(port)) as again:
        served.deliver(hook)
        assert len(again.accepted) == 1


def test_environments_proxies_are_not_asked(
    tmp_path: Path, receiver: Receiver, other: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{other.port}")
    hosts = read_hosts([f"http://127.0.0.1:{receiver.port}"])
    settings = Settings(token=TOKEN, webhook_hosts=hosts, webhook_pace_s=PACE_S)
    with (
        closing(Store.open(upgraded(tmp_path))) as store,
        TestClient(create_app(settings, store), headers=HEADERS) as http,
    ):
        served = Served(http, store)
        assert served.tested(served.add(receiver))["problem"] == ""
    assert other.requests == []


def test_the_checked_address_is_the_one_connected_to(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that would next lead elsewhere is looked up once; a private address is refused."""
    looked_up = []
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        if host in ("hooks.test", "a.wild.test"):
            looked_up.append(host)
            host = "127.0.0.1" if looked_up.count(host) == 1 else "127.0.0.2"
        return real(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    given = [f"http://hooks.test:{receiver.port}", f"http://*.wild.test:{receiver.port}"]
    settings = Settings(token=TOKEN, webhook_hosts=read_hosts(given), webhook_pace_s=PACE_S)
    with (
        closing(Store.open(upgraded(tmp_path))) as store,
        TestClient(create_app(settings, store), headers=HEADERS) as http,
    ):
        served = Served(http, store)
        named = served.add(receiver, address=given[0])
        assert served.tested(named)["problem"] == ""
        assert looked_up == ["hooks.test"]
        ((headers, _),) = receiver.accepted
        assert headers["host"] == f"hooks.test:{receiver.port}"
        wild = served.add(receiver, address=f"http://a.wild.test:{receiver.port}")
        assert served.tested(wild)["problem"] == (
            "127.0.0.1 is private, and `serve --webhook-hosts` does not name exactly this host"
        )
    assert len(receiver.requests) == 1


def test_a_host_that_cannot_be_looked_up_is_shown(tmp_path: Path, receiver: Receiver) -> None:
    settings = Settings(token=TOKEN, webhook_hosts=read_hosts(["*.test"]), webhook_pace_s=PACE_S)
    with (
        closing(Store.open(upgraded(tmp_path))) as store,
        TestClient(create_app(settings, store), headers=HEADERS) as http,
    ):
        served = Served(http, store)
        hook = served.add(receiver, address=f"https://{'a' * 70}.test/")
        assert "label" in served.tested(hook)["problem"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"address": "http://10.0.0.1/x"},
            "http://10.0.0.1:80 is not a host that an administrator ",
        ),
        (
            {"address": "https://hooks.example.org/x"},
            "https://hooks.example.org:443 is not a host ",
        ),
        ({"address": "ftp://127.0.0.1/x"}, "address 'ftp://127.0.0.1/x' is not such as https://"),
        ({"address": "https://[::1/x"}, "address 'https://[::1/x' is not such as https://"),
        ({"address": "https://a:b@127.0.0.1/"}, "address 'https://a:b@127.0.0.1/' is not such as "),
        ({"events": ["trial.ended"]}, "body.events.0: Input should be 'campaign.ended', "),
        ({"events": []}, "body.events: List should have at least 1 item"),
        ({"format": "teams"}, "body.format: Input should be 'standard', 'slack' or 'mattermost'"),
    ],
)
def test_a_wrong_webhook_is_one_sentence(
    served: Served, receiver: Receiver, given: Any, line: str
) -> None:
    answer = served.http.post(
        "/v1/webhooks", json={"address": receiver.url, "events": ["worker.lost"]} | given
    )
    detail = answered(answer, 422).json()["detail"]
    assert detail.startswith(line)
    assert "\n" not in detail
    assert served.http.get("/v1/webhooks").json() == {"webhooks": []}


def test_owners_change_only_webhooks_of_their_own(served: Served, receiver: Receiver) -> None:
    hook = served.add(receiver)
    ann = bearer(served.store.access.create_token("ann", "submitter")[1])
    path = f"/v1/webhooks/{hook['id']}"
    assert served.http.get("/v1/webhooks", headers=ann).json() == {"webhooks": []}
    for method, url in (("DELETE", path), ("POST", f"{path}/test")):
        answer = served.http.request(method, url, headers=ann)
        assert "there is no webhook" in answered(answer, 404).json()["detail"]
    assert served.http.delete(path).status_code == 204
    assert served.http.get("/v1/webhooks").json() == {"webhooks": []}


def test_the_command_adds_tests_and_removes(
    served: Served, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "layout_tuner.cli.service.service_connection.connect",
        lambda *_, **__: client_of(Api(served.http)),
    )

    def run(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, ["webhook", *words], env={"COLUMNS": "220"})
        assert result.exit_code == code, result.output
        return result.output

    assert run("add", receiver.url, "--event", "campaign.ended").startswith("whsec_")
    assert run("test", "1") == "delivered\n"
    row = run("list").splitlines()[-1].split()
    assert row == ["1", "local", "standard", receiver.url, "campaign.ended", "on", "0"]
    receiver.answers = [500] * 999
    assert "the receiver answered 500" in run("test", "1", code=1)
    assert "the receiver answered 500" in run("list")
    run("remove", "1")
    assert "there is no webhook 1" in run("remove", "1", code=1)


@pytest.mark.parametrize(("named", "problem"), [("hooks.test", ""), ("other.test", "mismatch")])
def test_tls_checks_the_name_and_not_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, problem: str
) -> None:
    authority, real = trustme.CA(), socket.getaddrinfo
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: real("127.0.0.1", *rest, **more)
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("hooks.test").configure_cert(tls)
    with (
        closing(Receiver(tls=tls)) as receiver,
        closing(Store.open(upgraded(tmp_path))) as store,
    ):
        hosts = read_hosts([f"{named}:{receiver.port}"])
        settings = Settings(token=TOKEN, webhook_hosts=hosts, webhook_pace_s=PACE_S)
        with TestClient(create_app(settings, store), headers=HEADERS) as http:
            served = Served(http, store)
            address = f"https://{named}:{receiver.port}/"
            hook = served.tested(served.add(receiver, address=address))
        assert problem in hook["problem"]
        assert bool(hook["problem"]) is bool(problem)
        assert len(receiver.accepted) == (0 if problem else 1)
