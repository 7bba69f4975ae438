import inspect
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from api import errors as api_errors
from api.http.problems import STATUS_OF
from results_db import errors as db_errors
from results_db.campaigns.campaigns import Campaigns
from search_spaces import errors as space_errors
from search_spaces.units import memory


def test_an_unknown_path_and_method_are_problems(http: TestClient) -> None:
    for path in ("/nothing", "/v1/nothing"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["status"]) == (404, 404)
        assert answer.headers["Content-Type"] == "application/problem+json"
    answer = http.delete("/v1/campaigns")
    assert answer.status_code == 405
    assert answer.json()["title"] == "method not allowed"
    assert answer.headers["Allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(("path", "most"), [("/v1/campaigns", 256 << 10), ("/v1/tokens", 16 << 10)])
def test_a_body_that_is_too_large_is_refused_unread(http: TestClient, path: str, most: int) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(most // 1000 + 1):
            yield b" " * 1000

    for content in (b" " * (most + 1), chunks()):
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413, answer.text
        assert f"larger than {memory(most)}, the most" in answer.json()["detail"]
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_malformed_json_says_where_and_a_field_that_is_no_text_can_be_read(
    http: TestClient,
) -> None:
    answer = http.post(
        "/v1/workers",
        content='{"name": "w",\n  nope}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert "line 2, column 3" in answer.json()["detail"]

    for body in ('{"host": "\\ud800"}', '{"\\ud800": 1}'):
        answer = http.post(
            "/v1/workers", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 422
        assert answer.json()["detail"]


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


def test_every_error_of_ours_has_a_status() -> None:
    away_from_http = {
        *("LayoutTunerError", "ResultsDbError", "ApiError"),  # bases
        *("AccessUndeclaredError", "RowRefusedError"),  # faults of ours
        *("ServiceStartError", "ServiceRunsAlreadyError", "ServiceUnstableError"),
        *("TokenFileInvalidError", "DataDirInvalidError", "DataDirLockedError"),
        *("DatabaseInvalidError", "DatabaseUrlInvalidError", "DriverLeaseLostError"),
        *("SchemaNewerError", "SchemaOutdatedError"),
        # Those of the db commands.
        *("BackupInvalidError", "BackupPathError", "DatabaseInUseError", "DatabaseNotEmptyError"),
        "RetentionInvalidError",
        *("ServiceError", "EventsMissedError", "ServiceUnansweredError"),  # of clients
    }
    for module in (db_errors, api_errors, space_errors):
        for name, error in inspect.getmembers(module, inspect.isclass):
            if error.__module__ == module.__name__ and name not in away_from_http:
                assert any(base in STATUS_OF for base in error.__mro__), name
