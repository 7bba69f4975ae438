"""A typed client of the HTTP API; the command line is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from api.allocation_schemas import AllocationPage, AllocationRead, ClusterNodeRead, NodePage
from api.errors import ServiceError
from api.local_service import LOOPBACK, find_service
from api.schemas import (
    AnalysisRead,
    CampaignDetail,
    CampaignPage,
    CampaignRead,
    ExportRead,
    Health,
    ImportRead,
    LeaderboardPage,
    TrialDetailRead,
    TrialPage,
    TrialRead,
)
from api.token_file import read_token
from api.worker_schemas import WorkerPage
from results_db.data_dir import DataDir

TIMEOUT_S: Final = 30.0
PAGE: Final = 200

Answer = TypeVar("Answer", bound=BaseModel)


class Client:
    """A service, seen from outside.

    Every method raises `ServiceError` when the service refuses or does not answer; the message is the
    service's own.
    """

    def __init__(
        self, url: str, token: str, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._url = url.rstrip("/")
        try:
            host = httpx.URL(self._url).host
        except httpx.InvalidURL as error:
            raise ServiceError(f"{url!r} is not the address of a service: {error}") from error
        self._http = httpx.Client(
            base_url=f"{self._url}/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT_S,
            transport=transport,
            # A proxy of the environment would look for its own loopback, not for ours.
            trust_env=host not in LOOPBACK,
        )

    @classmethod
    def of_data_dir(cls, data_dir: DataDir) -> Self:
        """The service that runs on a data directory of this machine.

        Raises:
            ServiceError: none runs there.
            TokenFileInvalidError: its token cannot be read.
        """
        service = find_service(data_dir)
        if service is None:
            raise ServiceError(
                f"no service runs on the data directory {data_dir.path}: start one with "
                "`layout-tuner up`, or say where it is with --url and --token-file"
            )
        return cls(service.url, read_token(data_dir.token_file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def health(self) -> Health:
        """Whether the service's parts are there."""
        return self._get("/health", Health)

    def create_campaign(self, document: Mapping[str, Any]) -> CampaignDetail:
        """Submits a campaign."""
        return self._ask("POST", "/campaigns", CampaignDetail, json=document)

    def import_table(
        self, table: bytes, *, name: str | None = None, cells: Sequence[str] = ()
    ) -> ImportRead:
        """Imports the cells of a measurement table as campaigns that have ended."""
        return self._ask(
            "POST",
            "/campaigns/import",
            ImportRead,
            content=table,
            params=_given({"name": name, "cell": list(cells)}),
            headers={"Content-Type": "text/csv"},
        )

    def table(self, campaign: str) -> str:
        """All that a campaign measured, as a measurement table."""
        return self._send("GET", f"/campaigns/{_segment(campaign)}/table").text

    def campaigns(self) -> Iterator[CampaignRead]:
        """Every campaign, the youngest first."""
        cursor: str | None = None
        while True:
            page = self._get("/campaigns", CampaignPage, limit=PAGE, cursor=cursor)
            yield from page.campaigns
            cursor = page.next_cursor
            if cursor is None:
                return

    def campaign(self, campaign: str) -> CampaignDetail:
        """One campaign, by its name or id."""
        return self._get(f"/campaigns/{_segment(campaign)}", CampaignDetail)

    def pause_campaign(self, campaign: str) -> CampaignDetail:
        """Hands out no more of its trials."""
        return self._ask("POST", f"/campaigns/{_segment(campaign)}/pause", CampaignDetail)

    def resume_campaign(self, campaign: str) -> CampaignDetail:
        """Takes it up again."""
        return self._ask("POST", f"/campaigns/{_segment(campaign)}/resume", CampaignDetail)

    def cancel_campaign(self, campaign: str) -> CampaignDetail:
        """Ends it now."""
        return self._ask("POST", f"/campaigns/{_segment(campaign)}/cancel", CampaignDetail)

    def trials(self, campaign: str, *, state: str | None = None) -> Iterator[TrialRead]:
        """A campaign's trials in order of their numbers."""
        path = f"/campaigns/{_segment(campaign)}/trials"
        cursor: str | None = None
        while True:
            page = self._get(path, TrialPage, limit=PAGE, cursor=cursor, state=state)
            yield from page.trials
            cursor = page.next_cursor
            if cursor is None:
                return

    def trial(self, trial_id: int) -> TrialDetailRead:
        """One trial with everything that is kept about it."""
        return self._get(f"/trials/{trial_id}", TrialDetailRead)

    def leaderboard(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> LeaderboardPage:
        """A page of the campaign's leaderboard, or of its Pareto front."""
        return self._get(
            f"/campaigns/{_segment(campaign)}/leaderboard",
            LeaderboardPage,
            objective=objective,
            front=front or None,
            limit=limit,
            offset=offset,
        )

    def leaderboard_csv(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        intervals: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> str:
        """A page of the campaign's leaderboard, or of its Pareto front, as a measurement table."""
        query = {
            "objective": objective,
            "front": front or None,
            "intervals": intervals or None,
            "limit": limit,
            "offset": offset,
            "format": "csv",
        }
        return self._send(
            "GET", f"/campaigns/{_segment(campaign)}/leaderboard", params=_given(query)
        ).text

    def analysis(self, campaign: str) -> AnalysisRead:
        """Which of the campaign's knobs matter, and what a step in each would do."""
        return self._get(f"/campaigns/{_segment(campaign)}/analysis", AnalysisRead)

    def export(self, campaign: str, format_name: str, *, trial: int | None = None) -> ExportRead:
        """The files of a training job, for the best trial or another one."""
        path = f"/campaigns/{_segment(campaign)}/exports"
        return self._get(path, ExportRead, format=format_name, trial=trial)

    def workers(self) -> WorkerPage:
        """The workers that were heard of lately."""
        return self._get("/workers", WorkerPage)

    def allocations(self, *, ended: bool = False, limit: int | None = None) -> AllocationPage:
        """Allocations, the youngest first: those that are there, or also those that have ended."""
        return self._get("/allocations", AllocationPage, all=ended or None, limit=limit)

    def allocation(self, allocation_id: str) -> AllocationRead:
        """One allocation, by the id of its worker's session."""
        return self._get(f"/allocations/{_segment(allocation_id)}", AllocationRead)

    def nodes(self, cluster: str | None = None) -> NodePage:
        """Nodes of allocations, and those in quarantine."""
        return self._get("/nodes", NodePage, cluster=cluster)

    def quarantine_node(self, cluster: str, node: str, reason: str) -> ClusterNodeRead:
        """Sets a node aside until it is released."""
        path = f"{_node_path(cluster, node)}/quarantine"
        return self._ask("POST", path, ClusterNodeRead, json={"reason": reason})

    def release_node(self, cluster: str, node: str) -> ClusterNodeRead:
        """Takes a node out of quarantine."""
        return self._ask("POST", f"{_node_path(cluster, node)}/release", ClusterNodeRead)

    def _get(self, path: str, answer: type[Answer], **query: Any) -> Answer:
        return self._ask("GET", path, answer, params=_given(query))

    def _ask(self, method: str, path: str, answer: type[Answer], **request: Any) -> Answer:
        response = self._send(method, path, **request)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise ServiceError(
                f"{self._url} answered what this version does not understand "
                f"({error.error_count()} fields); are client and service of the same version?"
            ) from error

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise ServiceError(
                f"the service at {self._url} does not answer ({error}); "
                "is it running? `layout-tuner up` starts one"
            ) from error
        if response.is_error:
            raise ServiceError(_detail(response), status=response.status_code)
        return response


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the service answered {response.status_code} {response.reason_phrase}"


def _given(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _node_path(cluster: str, node: str) -> str:
    return f"/nodes/{_segment(cluster)}/{_segment(node)}"


def _segment(name: str) -> str:
    """A name as one part of a path, whatever is in it."""
    return quote(name, safe="")
