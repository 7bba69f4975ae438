import gc
import re
import weakref
from contextlib import closing

from fastapi.testclient import TestClient

from api.app import create_app
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


def test_the_browser_is_told_to_load_nothing_from_elsewhere(http: TestClient) -> None:
    policy = http.get("/docs").headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'")
    assert "http" not in policy


def test_the_page_understands_the_version_of_the_description(http: TestClient) -> None:
    # Swagger UI reads OpenAPI 3.1 from its version 5 on.
    script = http.get("/docs/assets/swagger-ui-bundle.js").text
    version = re.search(r'PACKAGE_VERSION:"(\d+)\.', script)
    assert version is not None
    assert int(version[1]) >= 5
    assert http.get("/openapi.json").json()["openapi"].startswith("3.1")


def test_the_description_has_the_problem_document_and_the_bearer_scheme(http: TestClient) -> None:
    description = http.get("/openapi.json").json()
    assert set(description["components"]["schemas"]["Problem"]["required"]) == {
        "type",
        "title",
        "status",
        "detail",
    }
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
