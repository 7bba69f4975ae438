import gc
import json
import re
import subprocess
import sys
import weakref
from contextlib import closing

import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from api.openapi_document import CHECKED_IN, openapi_text
from api.security.roles import ACCESS
from api.settings import Settings
from results_db.store import Store
from tests.kit.api import HEADERS


def test_the_page_and_all_it_needs_come_from_this_service(http: TestClient) -> None:
    page = http.get("/docs", headers={"Authorization": ""})
    assert page.status_code == 200
    assert not re.search(r"https?:|//[a-z]", page.text), "the page names another host"
    wanted = re.findall(r"""(?:src|href|url)[=:]\s*["']([^"']+)["']""", page.text)
    assert len(wanted) == 4
    for path in wanted:
        answer = http.get(path, headers={"Authorization": ""})
        assert answer.status_code == 200, path
        assert len(answer.content) > 100, path

    policy = http.get("/docs").headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'")
    assert "http" not in policy

    # Swagger UI reads OpenAPI 3.1 from its version 5 on.
    script = http.get("/docs/assets/swagger-ui-bundle.js").text
    version = re.search(r'PACKAGE_VERSION:"(\d+)\.', script)
    assert version is not None
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
    def printed(seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "api.openapi_document"],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            cwd=CHECKED_IN.parent.parent,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    assert printed("1") == printed("2")


def test_every_route_is_described_and_has_a_rule_of_access() -> None:
    document = json.loads(openapi_text())
    operations = [
        operation
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in ("get", "put", "post", "patch", "delete")
    ]
    assert len(operations) > 40
    for operation in operations:
        assert operation["operationId"] in ACCESS
        assert operation["summary"], operation["operationId"]
        assert operation["description"], f"{operation['operationId']} has no docstring"
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))

    assert "Raises:" not in openapi_text()
