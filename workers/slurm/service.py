"""What the service says of allocations: a reader beside the lease client."""

from __future__ import annotations

from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from workers.errors import RequestRefusedError, ServiceUnreachableError, TokenRefusedError

_ANSWER_WITHIN_S: Final = 30.0


class AllocationReader:
    """Asks a service about the allocations of its workers.

    Every method raises `ServiceUnreachableError`, `TokenRefusedError` or `RequestRefusedError`; the
    message is the service's own where it has one.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        host = httpx.URL(self._url).host
        self._http = httpx.Client(
            base_url=f"{self._url}/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=_ANSWER_WITHIN_S,
            trust_env=not (host == "localhost" or host.startswith("127.")),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def allocations(self) -> list[dict[str, Any]]:
        """Every allocation that was heard of lately."""
        found: list[dict[str, Any]] = self._ask("GET", "/allocations")["allocations"]
        return found

    def allocation(self, worker_id: str) -> dict[str, Any]:
        """One allocation, by its worker's id or its job's."""
        found: dict[str, Any] = self._ask("GET", f"/allocations/{quote(worker_id, safe='')}")
        return found

    def release(self, cluster: str, node: str) -> dict[str, Any]:
        """Takes a node out of quarantine."""
        path = f"/nodes/{quote(cluster, safe='')}/{quote(node, safe='')}/release"
        found: dict[str, Any] = self._ask("POST", path) or {}
        return found

    def _ask(self, method: str, path: str) -> Any:
        try:
            answer = self._http.request(method, path)
        except httpx.HTTPError as error:
            raise ServiceUnreachableError(
                f"the service at {self._url} does not answer ({error or type(error).__name__})"
            ) from error
        if answer.is_success:
            return answer.json() if answer.content else None
        if answer.status_code in (401, 403):
            raise TokenRefusedError(f"{_detail(answer)}; check the token file")
        raise RequestRefusedError(_detail(answer))


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the service answered {answer.status_code} {answer.reason_phrase}"
