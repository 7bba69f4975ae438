"""Webhooks against real receivers: slow, away, gone, redirecting, or never at an end."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
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
        asked = {"address": receiver.url} | given
        return answered(self.http.post("/v1/webhooks", json=asked), 201).json()

    def test(self, webhook: Any) -> str:
        answer = self.http.post(f"/v1/webhooks/{webhook['id']}/test")
        return str(answered(answer, 202).json()["message_id"])

    def message(self, message_id: str) -> Any:
        hooks = self.http.get("/v1/webhooks").json()["webhooks"]
        found = [each for hook in hooks for each in hook["messages"]]
        return next(each for each in found if each["message_id"] == message_id)

    def until(self, message_id: str, is_so: Callable[[Any], bool]) -> Any:
        wait_until("the message is so", lambda: is_so(self.message(message_id)))
        return self.message(message_id)


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


def delivered(message: Any) -> bool:
    return bool(message["state"] == "delivered")


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


def test_both_secrets_sign_after_a_rotation(served: Served, receiver: Receiver) -> None:
    first = served.add(receiver)
    changed = served.http.patch(f"/v1/webhooks/{first['id']}", json={"new_secret": True}).json()
    served.test(first)
    wait_until("it is there", lambda: receiver.accepted)
    ((headers, body),) = receiver.accepted
    assert len(headers["webhook-signature"].split()) == 2
    for secret in (first["secret"], changed["secret"]):
        Webhook(secret).verify(body, headers)


def test_a_retry_has_its_id_and_a_new_time(served: Served, receiver: Receiver) -> None:
    receiver.answers = [500, 503]
    message = served.until(served.test(served.add(receiver)), delivered)
    assert message["attempts"] == 3
    assert message["problem"] == ""
    assert {headers["webhook-id"] for headers, _ in receiver.requests} == {message["message_id"]}
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
    message = served.until(served.test(served.add(receiver)), lambda each: each["attempts"] > 1)
    assert message["state"] == "waiting"
    assert message["problem"] == problem
    assert receiver.accepted == []


def test_gone_turns_the_webhook_off(served: Served, receiver: Receiver) -> None:
    receiver.answers = [410]
    hook = served.add(receiver)
    served.test(hook)

    def off_because() -> str:
        return str(served.http.get("/v1/webhooks").json()["webhooks"][0]["off_because"])

    wait_until("it is off", lambda: off_because() == "the receiver answered 410")
    served.http.patch(f"/v1/webhooks/{hook['id']}", json={"on": True})
    wait_until("it is there", lambda: receiver.accepted)


def test_an_answer_without_end_is_not_read(served: Served, receiver: Receiver) -> None:
    receiver.never_ends = True
    served.until(served.test(served.add(receiver)), delivered)


def test_a_slow_receiver_delays_no_other(
    served: Served, receiver: Receiver, other: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.held.clear()
    slow, fast = served.add(receiver), served.add(other)
    waiting = served.test(slow)
    wait_until("it is asked", lambda: receiver.requests)
    for _ in range(3):
        served.until(served.test(fast), delivered)
    served.test(slow)
    assert served.message(waiting)["state"] == "waiting"
    assert len(receiver.requests) == 1
    receiver.held.set()
    served.until(waiting, delivered)


def test_a_silent_receiver_is_left_in_time(
    served: Served, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.api.process.webhook_sender.TIMEOUT_S", 0.2)
    receiver.held.clear()
    sent = served.test(served.add(receiver))
    message = served.until(sent, lambda each: each["problem"])
    assert message["problem"] == "no answer within 0 s"


def test_a_receiver_that_is_away_gets_it_later(served: Served, receiver: Receiver) -> None:
    port = receiver.port
    receiver.close()
    sent = served.test(served.add(receiver))
    served.until(sent, lambda each: each["attempts"] > 1 and each["problem"])
    with closing(Receiver(port)) as again:
        served.until(sent, delivered)
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
        served.until(served.test(served.add(receiver)), delivered)
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
        named = http.post("/v1/webhooks", json={"address": given[0]}).json()
        served.until(served.test(named), delivered)
        assert looked_up == ["hooks.test"]
        ((headers, _),) = receiver.accepted
        assert headers["host"] == f"hooks.test:{receiver.port}"
        wild = http.post("/v1/webhooks", json={"address": f"http://a.wild.test:{receiver.port}"})
        sent = served.test(wild.json())
        message = served.until(sent, lambda each: each["problem"])
    assert message["problem"] == (
        "127.0.0.1 is private, and `serve --webhook-hosts` does not name exactly this host"
    )
    assert len(receiver.requests) == 1


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
        ({"address": "ftp://127.0.0.1/x"}, "address 'ftp://127.0.0.1/x' is not one of https://"),
        ({"address": "https://[::1/x"}, "address 'https://[::1/x' is not one of https://"),
        ({"address": "https://a:b@127.0.0.1/"}, "the address has a user or a password in it; "),
        ({"events": ["trial.ended"]}, "events 'trial.ended' is not one of campaign.ended, "),
        ({"events": []}, "events '' is not one of campaign.ended, "),
        ({"format": "teams"}, "format 'teams' is not one of standard, slack, mattermost"),
    ],
)
def test_a_wrong_webhook_is_one_sentence(
    served: Served, receiver: Receiver, given: Any, line: str
) -> None:
    answer = served.http.post("/v1/webhooks", json={"address": receiver.url} | given)
    detail = answered(answer, 422).json()["detail"]
    assert detail.startswith(line)
    assert "\n" not in detail
    assert served.http.get("/v1/webhooks").json() == {"webhooks": []}


def test_owners_change_only_webhooks_of_their_own(served: Served, receiver: Receiver) -> None:
    hook = served.add(receiver)
    ann = bearer(served.store.access.create_token("ann", "submitter")[1])
    path = f"/v1/webhooks/{hook['id']}"
    assert served.http.get("/v1/webhooks", headers=ann).json() == {"webhooks": []}
    for method, url in (("PATCH", path), ("DELETE", path), ("POST", f"{path}/test")):
        sent = {"json": {}} if method == "PATCH" else {}
        answer = served.http.request(method, url, headers=ann, **sent)
        assert "there is no webhook" in answered(answer, 404).json()["detail"]
    assert served.http.delete(path).status_code == 204
    assert served.http.get("/v1/webhooks").json() == {"webhooks": []}


def test_the_page_adds_and_changes_webhooks(served: Served, receiver: Receiver) -> None:
    fields = {
        "address": receiver.url,
        "format": "slack",
        "campaigns": "",
        "events": ["worker.lost"],
    }
    page = answered(served.http.post("/webhooks", data=fields), 200)
    assert page.headers["cache-control"] == "no-store"
    (hook,) = served.http.get("/v1/webhooks").json()["webhooks"]
    assert (hook["format"], hook["campaigns"], hook["events"]) == ("slack", "*", ["worker.lost"])
    secret = page.text.partition("whsec_")[2].partition("<")[0]
    assert len(secret) == 44
    assert "whsec_" not in served.http.get("/webhooks").text
    page = served.http.post("/webhooks/1/new-secret")
    assert "whsec_" in page.text
    assert secret not in page.text
    served.http.post("/webhooks/1/test")
    wait_until("it is there", lambda: receiver.accepted)
    assert receiver.bodies == [
        {"text": "A test of webhook 1, by local\n<http://testserver/|Open it>"}
    ]
    assert "its owner turned it off" in served.http.post("/webhooks/1/off").text
    assert "its owner turned it off" not in served.http.post("/webhooks/1/on").text
    served.http.post("/webhooks/1/remove")
    assert served.http.get("/v1/webhooks").json() == {"webhooks": []}
    page = served.http.post("/webhooks", data={**fields, "address": "https://10.0.0.1/<b>"})
    assert "https://10.0.0.1:443 is not a host that an administrator allows" in page.text
    assert "<b>" not in page.text


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
    assert row[:6] == ["1", "local", "standard", receiver.url, "campaign.ended", "*"]
    assert row[-2:] == ["webhook.test", "delivered"]
    receiver.answers = [500] * 999
    assert "the receiver answered 500" in run("test", "1", code=1)
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
            hook = http.post("/v1/webhooks", json={"address": address}).json()
            sent = served.test(hook)
            message = served.until(
                sent,
                lambda each: (each["attempts"] and each["state"] == "delivered") or each["problem"],
            )
            assert problem in message["problem"]
            assert len(receiver.accepted) == (0 if problem else 1)
