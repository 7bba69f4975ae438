"""Whether the service is there, whether it can work, and its metrics."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from api.app import create_app
from api.process.metrics import READ_EVERY_S
from api.routes import health
from api.settings import Settings
from results_db.errors import DatabaseUnavailableError
from results_db.migrations import migrate
from search_spaces.spec.layout import Layout
from tests.kit.api import HEADERS, TOKEN, Api
from tests.kit.store import TimelyStore
from tests.results_db.next_version import NEXT, THIS, become_next_version


def metrics(http: TestClient) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels."""
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.fixture
def gone(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that does not answer."""

    def refuse(*_: Any) -> Any:
        raise DatabaseUnavailableError("the database db.example of user service cannot be used")

    store = http.app.state.store  # type: ignore[attr-defined]
    monkeypatch.setattr(store.driver, "seen_at", refuse)
    for name in ("why_not_usable", "service_stats"):
        monkeypatch.setattr(store.statistics, name, refuse)


def test_readiness_needs_no_token_and_ends_when_the_service_stops(
    http: TestClient, settings: Settings
) -> None:
    answer = http.get("/v1/ready", headers={"Authorization": ""})
    assert (answer.status_code, answer.json()) == (200, {"is_ready": True, "reasons": []})
    assert http.get("/v1/health", headers={"Authorization": ""}).json()["status"] == "ok"

    settings.stopping.set()
    answer = http.get("/v1/ready")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["the process ends"])


def test_without_its_database_a_service_is_healthy_but_not_ready_and_its_metrics_say_so(
    http: TestClient, gone: None
) -> None:
    assert http.get("/v1/health").json()["database"] is False
    answer = http.get("/v1/ready")
    # Whoever asks here has no token: hosts and users are none of his business.
    assert (answer.status_code, answer.json()) == (
        503,
        {"is_ready": False, "reasons": ["the database does not answer"]},
    )

    found = metrics(http)
    assert found["layout_tuner_database_up",] == 0
    assert not [key for key in found if key[0] == "layout_tuner_campaigns"]
    assert ("process_resident_memory_bytes",) in found


@pytest.fixture
def served(database_url: str) -> Iterator[tuple[str, TestClient]]:
    """A service, and the URL of its database, of either kind."""
    with (
        closing(TimelyStore(database_url)) as store,
        TestClient(create_app(Settings(token=TOKEN), store), headers=HEADERS) as client,
    ):
        yield database_url, client


def test_a_database_of_another_schema_is_not_ready(
    served: tuple[str, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, client = served
    assert client.get("/v1/ready").status_code == 200
    become_next_version(monkeypatch)
    (reason,) = client.get("/v1/ready").json()["reasons"]
    assert reason == (
        f"the database cannot be worked on: its schema is {THIS}, and this version's is {NEXT}"
    )
    migrate.upgrade(url)
    assert client.get("/v1/ready").status_code == 200


def test_a_nearly_full_disk_is_not_ready(
    settings: Settings, tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        closing(TimelyStore(sqlite_url)) as store,
        TestClient(create_app(replace(settings, data_dir=tmp_path), store)) as client,
    ):
        assert client.get("/v1/ready").status_code == 200
        monkeypatch.setattr(health, "LEAST_FREE_BYTES", 1 << 62)
        (reason,) = client.get("/v1/ready").json()["reasons"]
        assert reason.startswith("the data directory's disk is nearly full: ")


def test_metrics_count_campaigns_trials_and_workers(api: Api, http: TestClient) -> None:
    api.submit()
    worker = api.register()
    api.complete(worker, "first", Layout())
    api.store.trials.add(1, Layout(tp=2))
    found = metrics(http)
    assert found["layout_tuner_database_up",] == 1
    assert found["layout_tuner_campaigns", "RUNNING"] == 1
    assert found["layout_tuner_campaigns", "FAILED"] == 0
    assert found["layout_tuner_open_trials", "PENDING"] == 1
    assert found["layout_tuner_workers", "local-cpu"] == 1
    assert found["layout_tuner_node_seconds", "start"] > 0
    assert found["layout_tuner_database_bytes",] > 4096
    assert found["layout_tuner_event_watchers",] == 0
    assert found["process_resident_memory_bytes",] > 1e6


def test_metrics_count_requests_by_operation_and_answer(http: TestClient) -> None:
    http.get("/v1/campaigns")
    http.get("/v1/campaigns/none")
    http.get("/v1/campaigns/other")
    http.get("/v1/campaigns", headers={"Authorization": "Bearer wrong"})
    http.get("/somewhere/else/5")
    found = metrics(http)
    assert not [name for name, *_ in found if name.endswith("_created")]
    name = "layout_tuner_http_requests_total"
    assert found[name, "list_campaigns", "200"] == 1
    assert found[name, "list_campaigns", "401"] == 1
    assert found[name, "read_campaign", "404"] == 2
    assert found[name, "none", "404"] == 1
    assert found["layout_tuner_http_request_seconds_count", "read_campaign"] == 2
    assert found["layout_tuner_http_requests_in_flight",] == 1, "this one"
    labels = {word for key in found for word in key[1:]}
    assert not labels & {"other", "/somewhere/else/5"}, "what anybody may ask for is no label"


def test_the_database_is_not_asked_for_metrics_more_often_than_every_few_seconds(
    api: Api, http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    look: Callable[[], Any] = api.store.statistics.service_stats

    def counted() -> Any:
        asked.append(1)
        return look()

    now = 1000.0
    monkeypatch.setattr(api.store.statistics, "service_stats", counted)
    monkeypatch.setattr("api.process.metrics.monotonic", lambda: now)
    for _ in range(5):
        metrics(http)
    now += 0.99 * READ_EVERY_S
    metrics(http)
    assert len(asked) == 1
    now += 0.02 * READ_EVERY_S
    metrics(http)
    assert len(asked) == 2
