"""Whether the service is there, whether it can work, and its metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from layout_tuner.api.process.metrics import READ_EVERY_S
from layout_tuner.api.routes import health
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.migrations import migrate
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import Api
from tests.results_db.next_version import NEXT, THIS, become_next_version


@pytest.fixture
def api(http: TestClient) -> Api:
    return Api(http)


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


def why_not_ready(http: TestClient) -> list[str]:
    answer = http.get("/v1/ready", headers={"Authorization": ""})
    reasons: list[str] = answer.json()["reasons"]
    assert answer.json()["is_ready"] is (answer.status_code == 200) is (reasons == [])
    assert answer.status_code in (200, 503)
    return reasons


def test_a_service_is_not_ready_with_a_full_disk_another_schema_or_while_it_ends(
    api: Api, served_url: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = api.http
    assert why_not_ready(http) == []
    assert http.get("/v1/health", headers={"Authorization": ""}).json()["status"] == "ok"

    http.app.state.settings = replace(settings, data_dir=tmp_path)  # type: ignore[attr-defined]
    assert why_not_ready(http) == []
    monkeypatch.setattr(health, "LEAST_FREE_BYTES", 1 << 62)
    (reason,) = why_not_ready(http)
    assert reason.startswith("the data directory's disk is nearly full: ")
    monkeypatch.undo()

    become_next_version(monkeypatch)
    assert why_not_ready(http) == [
        f"the database cannot be worked on: its schema is {THIS}, and this version's is {NEXT}"
    ]
    migrate.upgrade(served_url)
    assert why_not_ready(http) == []
    settings.stopping.set()
    assert why_not_ready(http) == ["the process ends"]


def test_without_its_database_a_service_is_healthy_but_not_ready_and_its_metrics_say_so(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise DatabaseUnavailableError("the database db.example of user service cannot be used")

    monkeypatch.setattr(api.store.driver, "lease", refuse)
    for name in ("why_not_usable", "service_stats"):
        monkeypatch.setattr(api.store.statistics, name, refuse)
    assert api.get("/health", status=503)["database"] is False
    # Whoever asks here has no token: hosts and users are none of his business.
    assert why_not_ready(api.http) == ["the database does not answer"]
    found = metrics(api.http)
    assert found["layout_tuner_database_up",] == 0
    assert not [key for key in found if key[0] == "layout_tuner_campaigns"]
    assert ("process_resident_memory_bytes",) in found


@pytest.fixture
def found(api: Api) -> dict[tuple[str, ...], float]:
    """The metrics of a service with one campaign, one worker, an ended and a waiting trial."""
    api.submit()
    api.complete(api.register(), "first", Layout())
    api.store.trials.add(1, Layout(tp=2))
    return metrics(api.http)


def test_metrics_count_campaigns_trials_and_workers(found: dict[tuple[str, ...], float]) -> None:
    counts = {
        ("layout_tuner_database_up",): 1,
        ("layout_tuner_campaigns", "RUNNING"): 1,
        ("layout_tuner_campaigns", "FAILED"): 0,
        ("layout_tuner_open_trials", "PENDING"): 1,
        ("layout_tuner_workers", "local-cpu"): 1,
        ("layout_tuner_event_watchers",): 0,
    }
    assert {sample: found[sample] for sample in counts} == counts


def test_metrics_measure_time_memory_and_storage(found: dict[tuple[str, ...], float]) -> None:
    assert found["layout_tuner_node_seconds", "start"] > 0
    assert found["layout_tuner_database_bytes",] > 4096
    assert found["process_resident_memory_bytes",] > 1e6


def test_metrics_leave_out_when_counters_began(found: dict[tuple[str, ...], float]) -> None:
    assert not [name for name, *_ in found if name.endswith("_created")]


def test_metrics_count_requests_by_operation_and_answer(api: Api) -> None:
    for path in ("/v1/campaigns", "/v1/campaigns/none", "/v1/campaigns/other", "/some/where/5"):
        api.http.get(path)
    api.http.get("/v1/campaigns", headers={"Authorization": "Bearer wrong"})
    found = metrics(api.http)
    name = "layout_tuner_http_requests_total"
    assert found[name, "list_campaigns", "200"] == 1
    assert found[name, "list_campaigns", "401"] == 1
    assert found[name, "read_campaign", "404"] == 2
    assert found[name, "none", "404"] == 1
    assert found["layout_tuner_http_request_seconds_count", "read_campaign"] == 2
    assert found["layout_tuner_http_requests_in_flight",] == 1, "this one"
    labels = {word for key in found for word in key[1:]}
    assert not labels & {"other", "/some/where/5"}, "what anybody may ask for is no label"


def test_the_database_is_not_asked_for_metrics_more_often_than_every_few_seconds(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    look, now = api.store.statistics.service_stats, 1000.0

    def counted() -> Any:
        asked.append(now)
        return look()

    monkeypatch.setattr(api.store.statistics, "service_stats", counted)
    monkeypatch.setattr("layout_tuner.api.process.metrics.monotonic", lambda: now)
    for later, times in ((0.0, 5), (0.99, 1), (0.02, 1)):
        now += later * READ_EVERY_S
        for _ in range(times):
            metrics(api.http)
    assert asked == [1000.0, now]
