"""A service in this process, asked over HTTP, by the Python client and by commands."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from click.testing import Result
from httpx import Response

from layout_tuner.client.clients import Client
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.campaigns import space_of
from tests.kit.store import completed

if TYPE_CHECKING:  # importing it warns, which tests/kit/service_fixtures.py ignores
    from fastapi.testclient import TestClient


def bearer(token: str) -> dict[str, str]:
    """The header of whoever asks with this token."""
    return {"Authorization": f"Bearer {token}"}


TOKEN = "lt_test_token"
HEADERS = bearer(TOKEN)

CLUSTER = {
    "name": "local-cpu",
    "device": "CPU core",
    "num_nodes": 1,
    "devices_per_node": 4,
    "device_memory_bytes": 8 << 30,
}

SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "seq_length": 64, "vocab_size": 128}
MODEL = {"family": "gpt", **SIZES}
MACHINE = {key: value for key, value in CLUSTER.items() if key != "name"}
"""Descriptions without a name, as they are put under one."""

CAMPAIGN: dict[str, Any] = {
    "name": "first",
    "model": "tiny",
    "cluster": CLUSTER,
    "objective": "tokens_per_s",
    "strategy": "random",
    "budget": {"trials": 5},
    "space": space_of(global_batch_size=8, tp=[1, 2], pp=[1, 2], dp=1),
}

INTRODUCTION: dict[str, Any] = {
    "name": "w",
    "host": "h",
    "cluster": "c",
    "num_nodes": 1,
    "devices_per_node": 2,
    "device": "d",
}
"""The least that a worker says of itself."""


def measured_as_asked(lease: dict[str, Any], layout: Layout, **changes: Any) -> Outcome:
    """The outcome of a leased trial, with the model and the iterations of its request."""
    request = ProbeRequest.from_mapping(lease["request"])
    length = "iterations_asked" if changes.get("shortened") else "timed"
    return completed(layout, **{"model": request.model, length: request.iterations, **changes})


Command = Callable[..., Result]
"""Runs a command of the command line; see the fixtures `command` and `run`."""


def ends(result: Result, code: int, *texts: str) -> Result:
    """Fails unless a command ended with this code, and said all texts: on stderr if it failed."""
    assert result.exit_code == code, result.output
    for text in texts:
        assert text in (result.stderr if code else result.output)
    return result


def refused_line(result: Result) -> str:
    """The one line that a command which ends with 1 has printed."""
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    (line,) = result.stderr.splitlines()
    return line


def answered(answer: Response, status: int, *texts: str) -> Response:
    """Fails unless an answer has this status, and says all texts."""
    assert answer.status_code == status, answer.text
    is_problem = answer.headers.get("Content-Type") == "application/problem+json"
    said = answer.text + (answer.json()["detail"] if texts and is_problem else "")
    for text in texts:
        assert text in said
    return answer


class Api:
    """A service in this process, spoken to over its HTTP interface."""

    def __init__(self, http: TestClient) -> None:
        self.http = http
        self.store: Any = http.app.state.store  # type: ignore[attr-defined]

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        return answered(self.http.post(f"/v1{path}", json=body), status).json()

    def get(self, path: str, status: int = 200, **query: Any) -> Any:
        return answered(self.http.get(f"/v1{path}", params=query), status).json()

    def table(self, path: str, **query: Any) -> list[dict[str, str]]:
        """The rows of a table that is answered as CSV."""
        answer = self.http.get(f"/v1{path}", params=query)
        assert answer.headers["content-type"].startswith("text/csv"), answer.text
        return list(csv.DictReader(io.StringIO(answer.text)))

    def submit(self, **changes: Any) -> dict[str, Any]:
        return self.post("/campaigns", {**CAMPAIGN, **changes}, status=201)

    def holder(self, name: str, role: str) -> dict[str, str]:
        """The header of whoever asks with a new token."""
        return bearer(self.post("/tokens", {"name": name, "role": role}, status=201)["token"])

    def register(self, name: str = "w1", **changes: Any) -> str:
        local = {"cluster": "local-cpu", "devices_per_node": 4, "device": "CPU core"}
        body = {**INTRODUCTION, "name": name, "host": "node-1", "versions": {"python": "3.11"}}
        return self.post("/workers", {**body, **local, **changes}, status=201)["worker_id"]

    def lease(self, worker_id: str) -> dict[str, Any]:
        body = {"max_trials": 1, "wait_s": 0}
        (lease,) = self.post(f"/workers/{worker_id}/leases", body)["leases"]
        return lease

    def report(self, worker_id: str, lease: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
        body = {
            "worker_id": worker_id,
            "attempt": lease["attempt"],
            "outcome": dataclasses.asdict(outcome),
        }
        return self.post(f"/trials/{lease['trial_id']}/outcome", body)

    def report_measured(
        self, worker_id: str, lease: dict[str, Any], layout: Layout, **changes: Any
    ) -> None:
        """Reports that a leased trial was measured, as its lease asks."""
        outcome = measured_as_asked(lease, layout, **changes)
        assert self.report(worker_id, lease, outcome)["accepted"]

    def complete(
        self,
        worker_id: str,
        campaign: str,
        layout: Layout,
        *,
        fidelity: Fidelity | None = None,
        prediction: Prediction | None = None,
        **changes: Any,
    ) -> int:
        """Adds a trial as the driver would, runs it as a worker would; returns its id."""
        campaign_id = self.store.campaigns.by_name(campaign).id
        trial = self.store.trials.add(campaign_id, layout, fidelity=fidelity, prediction=prediction)
        self.report_measured(worker_id, self.lease(worker_id), trial.layout, **changes)
        return int(trial.id)


def client_of(api: Api) -> Client:
    """The Python client, connected to a service in this process."""
    return Client("http://testserver", TOKEN, transport=api.http._transport)
