import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api import errors as api_errors
from api.http.problems import STATUS_OF
from results_db import errors as db_errors
from results_db.campaigns.campaigns import Campaigns
from search_spaces import errors as space_errors
from tests.kit.api import CAMPAIGN, Api


def test_an_unknown_path_and_method_are_problems(http: TestClient) -> None:
    for path in ("/nothing", "/v1/nothing"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["status"]) == (404, 404)
        assert answer.headers["Content-Type"] == "application/problem+json"
    answer = http.delete("/v1/campaigns")
    assert answer.status_code == 405
    assert answer.json()["title"] == "method not allowed"
    assert answer.headers["Allow"] == "GET, POST"


@pytest.mark.parametrize(
    ("path", "most"),
    [("/v1/campaigns", 256 << 10), ("/v1/tokens", 16 << 10)],
)
def test_a_body_that_is_too_large_is_refused_unread(http: TestClient, path: str, most: int) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(most // 1000 + 1):
            yield b" " * 1000

    for content in (b" " * (most + 1), chunks()):
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413, answer.text
        assert f"{most} bytes" in answer.json()["detail"]
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_malformed_json_of_any_route_says_where(http: TestClient) -> None:
    answer = http.post(
        "/v1/workers",
        content='{"name": "w",\n  nope}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert "line 2, column 3" in answer.json()["detail"]


def test_a_fault_of_ours_shows_nothing_of_its_inside(
    http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Campaigns, **_: object) -> list[object]:
        raise RuntimeError("secret path /home/somebody")

    monkeypatch.setattr(Campaigns, "find", broken)
    answer = http.get("/v1/campaigns")
    assert answer.status_code == 500
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert "secret" not in answer.text


@pytest.mark.parametrize("served_url", ["sqlite"], indirect=True)  # a server is stopped elsewhere
def test_a_database_that_is_gone_is_a_503_and_health_says_so(api: Api, http: TestClient) -> None:
    api.submit()
    api.store._db.engine.dispose()
    database = Path(api.store._db.engine.url.database)
    away = database.rename(database.with_suffix(".away"))
    database.mkdir()
    answer = http.get("/v1/campaigns")
    assert answer.status_code == 503, answer.text
    health = http.get("/v1/health")
    assert (health.status_code, health.json()["database"]) == (503, False)
    database.rmdir()
    away.rename(database)
    assert http.post("/v1/campaigns", json=CAMPAIGN).status_code == 409


def test_a_field_that_is_no_text_is_refused_and_can_be_read(http: TestClient) -> None:
    for body in ('{"host": "\\ud800"}', '{"\\ud800": 1}'):
        answer = http.post(
            "/v1/workers", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 422
        assert answer.json()["detail"]


def test_every_error_of_ours_has_a_status() -> None:
    away_from_http = {
        "ResultsDbError",
        "ApiError",
        "AccessUndeclaredError",
        "ServiceStartError",
        "ServiceRunsAlreadyError",
        "TokenFileInvalidError",
        "ServiceUnstableError",
        "ServiceError",
        "DatabaseInvalidError",
        "DatabaseUrlInvalidError",
        "DriverLeaseLostError",
        "RowRefusedError",  # a fault of ours
        "SchemaNewerError",
        "SchemaOutdatedError",
        "DataDirInvalidError",
        "DataDirLockedError",
        # Those of the db commands.
        "BackupInvalidError",
        "BackupPathError",
        "DatabaseInUseError",
        "DatabaseNotEmptyError",
        "RetentionInvalidError",
        "EventsMissedError",  # of clients
        "ServiceUnansweredError",  # of clients
        "LayoutTunerError",  # the base of all
    }
    for module in (db_errors, api_errors, space_errors):
        for name, error in inspect.getmembers(module, inspect.isclass):
            if error.__module__ == module.__name__ and name not in away_from_http:
                assert any(base in STATUS_OF for base in error.__mro__), name
