"""What the service says of allocations: a reader beside the lease client."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from search_spaces.pinned_certificate import trusting
from workers.errors import (
    RequestRefusedError,
    ServiceUnreachableError,
    TokenRefusedError,
)
from workers.service_http import refuse_unless_http

_ANSWER_WITHIN_S: Final = 30.0


class AllocationReader:
    """Asks a service about the allocations of its workers.

    Every method raises `ServiceUnreachableError`, `TokenRefusedError` or `RequestRefusedError`; the
    message is the service's own where it has one.

    Raises:
        UrlInvalidError: at construction, when the address is none.
        CertificateUnreadableError: at construction, when the certificate is none.
    """

    def __init__(self, url: str, token: str, *, certificate: Path | None = None) -> None:
        self._url = url.rstrip("/")
        refuse_unless_http(self._url)
        host = httpx.URL(self._url).host
        self._http = httpx.Client(
            base_url=f"{self._url}/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=_ANSWER_WITHIN_S,
            verify=True if certificate is None else trusting(certificate),
            trust_env=not (host == "localhost" or host.startswith("127.")),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def allocations(self) -> list[dict[str, Any]]:
        """The allocations that live, the youngest first."""
        found: list[dict[str, Any]] = self._ask("GET", "/allocations")["allocations"]
        return found

    def allocation(self, name: str) -> dict[str, Any]:
        """The youngest allocation, ended or not, whose job, worker or session is called so.

        Raises:
            RequestRefusedError: there is none.
        """
        path = f"/allocations?all=true&limit=1&name={quote(name, safe='')}"
        found: list[dict[str, Any]] = self._ask("GET", path)["allocations"]
        if found:
            return found[0]
        raise RequestRefusedError(
            f"the service knows no allocation {name!r}; `allocation show` without a name lists those that live"
        )

    def release(self, node: str, *, cluster: str | None) -> dict[str, Any]:
        """Takes a node out of quarantine."""
        return self._tell("release", node, cluster, None)

    def quarantine(self, node: str, *, cluster: str | None, reason: str) -> dict[str, Any]:
        """Sets a node aside."""
        return self._tell("quarantine", node, cluster, {"reason": reason})

    def _tell(self, what: str, node: str, cluster: str | None, body: Any) -> dict[str, Any]:
        cluster = cluster or self._cluster_of(node)
        path = f"/nodes/{quote(cluster, safe='')}/{quote(node, safe='')}/{what}"
        found: dict[str, Any] = self._ask("POST", path, body)
        return found

    def _cluster_of(self, node: str) -> str:
        nodes = self._ask("GET", "/nodes")["nodes"]
        clusters = sorted({found["cluster"] for found in nodes if found["name"] == node})
        if len(clusters) == 1:
            return str(clusters[0])
        if clusters:
            raise RequestRefusedError(
                f"{' and '.join(clusters)} each have a node {node!r}: say which with --cluster"
            )
        raise RequestRefusedError(
            f"the service knows no node {node!r}: `allocation show` lists those of allocations that live"
        )

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServiceUnreachableError(
                f"the service at {self._url} does not answer ({error or type(error).__name__})"
            ) from error
        if answer.is_success:
            return answer.json()
        if answer.status_code in (401, 403):
            raise TokenRefusedError(f"{_detail(answer)}; check the token file")
        raise RequestRefusedError(_detail(answer))


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the service answered {answer.status_code} {answer.reason_phrase}"
