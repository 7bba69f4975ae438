"""Answers of every route: problem documents, HEAD, and the description."""

from __future__ import annotations

import gc
import http.client
import inspect
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient

from layout_tuner import errors as space_errors
from layout_tuner.api import errors as api_errors
from layout_tuner.api.app import create_app
from layout_tuner.api.http.error_responses import STATUS_OF
from layout_tuner.api.openapi_document import CHECKED_IN, openapi_text
from layout_tuner.api.settings import Settings
from layout_tuner.results_db import errors as db_errors
from layout_tuner.results_db.campaigns.campaigns import Campaigns
from layout_tuner.results_db.store import Store
from layout_tuner.units import memory
from tests.kit.api import HEADERS, Api, answered
from tests.kit.services import ServeProcess

JSON = {"Content-Type": "application/json"}


def test_an_unknown_path_and_method_are_problems(http: TestClient) -> None:
    for path in ("/nothing", "/v1/nothing"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["status"]) == (404, 404)
        assert answer.headers["Content-Type"] == "application/problem+json"
    answer = answered(http.delete("/v1/campaigns"), 405)
    assert answer.json()["title"] == "method not allowed"
    assert answer.headers["Allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(("path", "most"), [("/v1/campaigns", 256 << 10), ("/v1/tokens", 16 << 10)])
def test_a_body_that_is_too_large_is_refused_unread(http: TestClient, path: str, most: int) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(most // 1000 + 1):
            yield b" " * 1000

    for content in (b" " * (most + 1), chunks()):
        refused = http.post(path, content=content, headers=JSON)
        answer = answered(refused, 413, f"larger than {memory(most)}, the most")
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_malformed_json_says_where_and_a_field_that_is_no_text_can_be_read(
    http: TestClient,
) -> None:
    malformed = http.post("/v1/workers", content='{"name": "w",\n  nope}', headers=JSON)
    answered(malformed, 400, "line 2, column 3")

    for body in ('{"host": "\\ud800"}', '{"\\ud800": 1}'):
        answer = answered(http.post("/v1/workers", content=body, headers=JSON), 422)
        assert answer.json()["detail"]


def test_a_fault_of_ours_shows_nothing_of_its_inside(
    http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Campaigns, **_: object) -> list[object]:
        raise RuntimeError("secret path /home/somebody")

    monkeypatch.setattr(Campaigns, "find", broken)
    answer = answered(http.get("/v1/campaigns"), 500)
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


def test_head_is_answered_like_get_without_a_body(http: TestClient, api: Api) -> None:
    api.submit()
    paths = {
        str(route.path).replace("{campaign}", "first")
        for route in iter_route_contexts(http.app.routes)  # type: ignore[attr-defined]
        if "GET" in (route.methods or ())
    }
    asked = sorted(path for path in paths if "{" not in path and "events" not in path)
    assert len(asked) > 25
    for path in asked:
        get, head = (http.request(how, path, follow_redirects=False) for how in ("GET", "HEAD"))
        assert head.status_code == get.status_code, path
        assert head.content == b"", path
        assert head.headers["content-type"] == get.headers["content-type"], path
    answered(http.head("/v1/campaigns", headers={"Authorization": "Bearer wrong"}), 401)
    no_get = http.head("/v1/workers/w/leases")
    assert (no_get.status_code, no_get.headers["allow"]) == (405, "POST")


def test_over_the_wire_a_connection_is_free_for_the_next_request(service: ServeProcess) -> None:
    address = urlsplit(service.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
    paths = ("/v1/health", "/v1/campaigns", "/", "/v1/events", "/static/none.css")
    for path in (each for each in paths for _ in range(2)):
        connection.request("HEAD", path, headers=service.headers)
        answer = connection.getresponse()
        assert answer.read() == b""
        assert answer.status == (404 if "none" in path else 200)
    connection.close()


def test_the_page_and_all_it_needs_come_from_this_service(http: TestClient) -> None:
    page = answered(http.get("/docs", headers={"Authorization": ""}), 200)
    assert not re.search(r"https?:|//[a-z]", page.text), "the page names another host"
    wanted = re.findall(r"""(?:src|href|url)[=:]\s*["']([^"']+)["']""", page.text)
    assert len(wanted) == 4
    for path in wanted:
        answer = answered(http.get(path, headers={"Authorization": ""}), 200)
        assert len(answer.content) > 100, path

    policy = http.get("/docs").headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'")
    assert "http" not in policy

    # Swagger UI reads OpenAPI 3.1 from its version 5 on.
    script = http.get("/docs/assets/swagger-ui-bundle.js").text
    version = re.search(r'PACKAGE_VERSION:"(\d+)\.', script)
    assert int(version[1]) >= 5
    assert http.get("/openapi.json").json()["openapi"].startswith("3.1")


def test_the_description_has_the_problem_document_and_the_bearer_scheme(http: TestClient) -> None:
    description = http.get("/openapi.json").json()
    required = description["components"]["schemas"]["Problem"]["required"]
    assert set(required) == {"type", "title", "status", "detail"}
    assert description["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, operations in description["paths"].items():
        for operation in operations.values():
            if path in ("/v1/health", "/v1/ready"):
                assert "security" not in operation
                continue
            assert operation["security"] == [{"bearer": []}]
            assert "application/problem+json" in operation["responses"]["4XX"]["content"]


def test_an_application_that_has_ended_is_freed(settings: Settings, sqlite_url: str) -> None:
    with closing(Store(sqlite_url)) as store:
        with TestClient(create_app(settings, store), headers=HEADERS) as client:
            assert client.get("/v1/campaigns").is_success
            ended = weakref.ref(client.app)
        del client
        gc.collect()
        assert ended() is None, gc.get_referrers(ended())


@pytest.mark.slow
def test_the_document_is_the_same_however_python_hashes() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "layout_tuner.api.openapi_document"],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        cwd=CHECKED_IN.parent.parent,
        check=True,
        capture_output=True,
        text=True,
    )
    assert printed.stdout == openapi_text(), "this process has another seed"


def test_every_route_is_described() -> None:
    document = json.loads(openapi_text())
    operations = [
        operation
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in ("get", "put", "post", "patch", "delete")
    ]
    assert len(operations) > 40
    for operation in operations:
        assert operation["summary"], operation["operationId"]
        assert operation["description"], f"{operation['operationId']} has no docstring"
    assert "Raises:" not in openapi_text()
