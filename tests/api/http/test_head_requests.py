from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import pytest
from fastapi.routing import iter_route_contexts
from starlette.testclient import TestClient

from tests.kit.api import HEADERS, Api
from tests.kit.services import ServeProcess

ENDLESS = "/v1/events"


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
        get = http.get(path, headers=HEADERS, follow_redirects=False)
        head = http.head(path, headers=HEADERS, follow_redirects=False)
        assert head.status_code == get.status_code, path
        assert head.content == b"", path
        assert head.headers["content-type"] == get.headers["content-type"], path


@pytest.mark.parametrize("path", ["/v1/health", "/v1/campaigns", "/", ENDLESS, "/static/none.css"])
def test_over_the_wire_a_connection_is_free_for_the_next_request(
    path: str, service: ServeProcess
) -> None:
    address = urlsplit(service.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
    headers = {"Authorization": f"Bearer {service.token}"}
    for _ in range(2):
        connection.request("HEAD", path, headers=headers)
        answer = connection.getresponse()
        assert answer.read() == b""
        assert answer.status == (404 if "none" in path else 200)
    connection.close()


def test_head_needs_a_token_as_get_does(http: TestClient) -> None:
    refused = http.head("/v1/campaigns", headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401


def test_where_there_is_no_get_there_is_no_head(http: TestClient) -> None:
    refused = http.head("/v1/workers/w/leases", headers=HEADERS)
    assert refused.status_code == 405
    assert refused.headers["allow"] == "POST"
