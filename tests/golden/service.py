"""Records what clients, workers and watchers exchange with a real service."""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import pyarrow.parquet
import pytest

from layout_tuner.api.settings import Settings
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.worker_messages import (
    AllocationBody,
    BeatBody,
    HeartbeatBody,
    LeaseRead,
    LeaseRequest,
    NodeBody,
    NodeStatusBody,
    OutcomeReport,
    RoomBody,
    StatusBody,
    WorkerCreate,
)
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.trainers.exports.export import FORMATS
from layout_tuner.workers.errors import WorkerError
from layout_tuner.workers.service.lease_client import EncodedOutcome, LeaseClient
from tests.golden.calls import REFUSED, UNSENDABLE, exit_codes
from tests.kit.api import CAMPAIGN, HEADERS, TOKEN
from tests.kit.fake_service import QuietHandler, serving
from tests.kit.live import live_service
from tests.kit.store import completed, failed, make_campaign, send_beats, take_leases
from tests.results_db.campaigns.test_analyses import make_analysis

LONGEST_LINE: Final = 200
MANY: Final = 1e6
WORKER_TOKEN: Final = "lt_worker_token"
LAYOUTS: Final = {
    "one-device": Layout(num_microbatches=8, precision="bf16"),
    "every-axis": Layout(
        num_nodes=4,
        tp=4,
        pp=4,
        dp=2,
        vpp=2,
        micro_batch_size=2,
        num_microbatches=8,
        zero_stage=1,
        recompute="full",
        sequence_parallel=True,
        precision="bf16",
    ),
    "zero-groups": Layout(
        num_nodes=2,
        dp=16,
        num_microbatches=2,
        zero_stage=1,
        zero_replicas=2,
        recompute="selective",
        precision="fp16",
    ),
}
"""Layouts that are exported."""

IDENTITY: Final[dict[str, Any]] = {
    "name": "w1",
    "host": "h1",
    "cluster": "local-cpu",
    "device": "CPU core",
    "num_nodes": 2,
    "devices_per_node": 4,
}
LOSSES_AGREE: Final = [Layout(num_microbatches=8), Layout(tp=2, num_microbatches=8)]
LOSS_DIFFERS: Final = Layout(pp=2, num_microbatches=8)


@cache
def recorded() -> dict[str, list[str]]:
    """Lines by document, from one service that every recording of this process shares."""
    settings = Settings(
        token=TOKEN, worker_token=WORKER_TOKEN, requests_per_s=MANY, event_stream_s=0.5
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(Store.open(DataDir(Path(directory) / "data"))) as store,
        live_service(settings, store) as url,
        httpx.Client(base_url=url, headers=HEADERS, timeout=30) as http,
    ):
        refusals = [refusal(http, *request) for request in REFUSED]
        token_file = Path(directory) / "token"
        token_file.write_text(TOKEN)
        address = url.removesuffix("/v1")
        return {
            "protocol": protocol_samples(address, http, store),
            "exit_codes": exit_codes(address, token_file),
            "exports": exports(http, store),
            "tables": tables(http),
            "events": events(http, store),
            "metrics": metrics(address),
            "problems": [f"{name}: {structure}" for name, structure, _ in refusals],
            "refusals": [f"{name}: {sentence}" for name, _, sentence in refusals],
        }


def plain(document: Any) -> str:
    """A document with what differs between runs replaced by its kind; a long one has many lines."""
    text = json.dumps(document, sort_keys=True)
    if len(text) > LONGEST_LINE:
        text = json.dumps(document, sort_keys=True, indent=1).replace("\n", "\n    ")
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", "<time>", text)
    text = re.sub(r'"(detail|title)": "(\\.|[^"\\])*"', r'"\1": "<sentence>"', text)
    return re.sub(r"\b[0-9a-f]{32}\b", "<id>", text)


@contextmanager
def recording(url: str) -> Iterator[tuple[str, list[str]]]:
    """A proxy before a service; yields its address, and the exchanges that go through it."""
    lines: list[str] = []

    class Handler(QuietHandler):
        def exchange(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: self.headers[name] for name in ("Authorization", "Content-Type")}
            kept = {name: value for name, value in headers.items() if value}
            where = f"{url}{self.path}"
            answer = httpx.request(self.command, where, content=body, headers=kept, timeout=30)
            lines.append(f"{self.command} {plain(self.path)[1:-1]}")
            lines.extend([f"  sent {plain(json.loads(body))}"] if body else [])
            told = plain(answer.json()) if answer.content else ""
            lines.append(f"  received {answer.status_code} {told}".rstrip())
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = do_DELETE = exchange

    with serving(Handler) as address:
        yield address, lines


def protocol_samples(url: str, http: httpx.Client, store: Store) -> list[str]:
    """What the worker's own client sends, and what the service answers."""
    identity = WorkerCreate(
        **IDENTITY,
        versions={"python": "3.11"},
        nodes=[NodeBody(name=name, num_devices=4) for name in ("n1", "n2")],
        allocation=AllocationBody(scheduler="slurm", job_id="7", launcher="srun", ends_in_s=60.0),
    )
    campaign = http.post("/campaigns", json=CAMPAIGN).json()["id"]
    with recording(url) as (address, lines), LeaseClient(address, WORKER_TOKEN) as client:
        client.role()
        worker = client.register(identity).worker_id
        room = RoomBody(nodes=1, devices=2)
        client.lease(worker, LeaseRequest(wait_s=0, room=room, longest_s=30.0))
        for layout in (*LOSSES_AGREE, LOSS_DIFFERS):
            store.trials.add(campaign, layout)
            lease = client.lease(worker, LeaseRequest(wait_s=0))
            heartbeat(client, worker, lease)
            report = OutcomeReport(
                trial_id=lease.trial_id,
                attempt=lease.attempt,
                worker_id=worker,
                outcome=outcome(layout),
                nodes_held=0.5,
                iterations_s=12.288,
            )
            client.post_outcome(EncodedOutcome.of(report))
        client.post_outcome(EncodedOutcome.of(report))
        heartbeat(client, worker, lease)
        with pytest.raises(WorkerError):
            client.post_outcome(EncodedOutcome.of(replace(report, attempt=9)))
        body = {**asdict(report), "outcome": {"state": "x"}}
        send(address, f"/v1/trials/{body.pop('trial_id')}/outcome", body)
        store.trials.add(campaign, Layout(dp=2, num_microbatches=4))
        lost = client.lease(worker, LeaseRequest(wait_s=0))
        given_back = replace(report, trial_id=lost.trial_id, outcome=failed(), iterations_s=0.5)
        client.post_outcome(EncodedOutcome.of(given_back))
        http.post("/nodes/local-cpu/n1/quarantine", json={"reason": "loud"})
        client.heartbeat(worker, HeartbeatBody())
        send(address, "/v1/workers", {**IDENTITY, "name": "w2", "versions": identity.versions})
        client.register(identity)
        with pytest.raises(WorkerError):
            client.heartbeat(worker, HeartbeatBody())
        with pytest.raises(WorkerError):
            client.unregister("0" * 32)
    return lines


def send(address: str, path: str, body: dict[str, Any]) -> None:
    """A request that the worker's own client does not send, from one of another version or make."""
    headers = {"Authorization": f"Bearer {WORKER_TOKEN}"}
    httpx.post(f"{address}{path}", json=body, headers=headers, timeout=30)


def heartbeat(client: LeaseClient, worker: str, lease: LeaseRead) -> None:
    """A heartbeat in which every field is set."""
    beat = BeatBody(
        trial_id=lease.trial_id,
        attempt=lease.attempt,
        iterations_done=3,
        phase="iterating",
        held_s=1.0,
        nodes_held=0.5,
        waiting_because="busy",
    )
    health = {"gemm_tflops": [1.0, 2.0], "link_gbytes_per_s": None}
    nodes = [
        NodeStatusBody(name="n1", state="busy", doing="trial 1", free_devices=0, health=health),
        NodeStatusBody(name="n2", state="lost", reason="gone", free_devices=0),
    ]
    status = StatusBody(state="working", ends_in_s=30.0, idle_node_s=3.5, nodes=nodes)
    client.heartbeat(worker, HeartbeatBody(trials=[beat], status=status))


def outcome(layout: Layout) -> Outcome:
    """A measurement; that of one layout has another loss."""
    return completed(layout, loss_off=0.5 if layout == LOSS_DIFFERS else 0.0)


def exports(http: httpx.Client, store: Store) -> list[str]:
    """The files of three layouts in every format; lines of prose begin with "prose "."""
    # Enough memory for the layout on one device.
    cluster = {"preset": "frontier", "device_memory_bytes": 1 << 40}
    spec = {"name": "exported", "model": "gpt-22b", "cluster": cluster, "budget": {"trials": 5}}
    space = {"global_batch_size": 256, "tp": [4, 8], "pp": 4, "precision": "bf16", "num_nodes": 16}
    campaign = http.post("/campaigns", json={**spec, "space": space}).json()["id"]
    size = {"devices_per_node": 8, "num_nodes": 16}
    identity = {**IDENTITY, "name": "f", "cluster": "frontier", **size}
    worker = http.post("/workers", json=identity).json()["worker_id"]
    lines = []
    for number, (name, layout) in enumerate(LAYOUTS.items(), 1):
        trial = store.trials.add(campaign, layout).id
        http.post(f"/workers/{worker}/leases", json={"max_trials": 1, "wait_s": 0})
        measured = completed(
            layout, model=MODEL_PRESETS["gpt-22b"], tokens_per_s=1e6, peak_memory_bytes=500 << 30
        )
        body = {"worker_id": worker, "attempt": 1, "outcome": measured.to_mapping()}
        assert http.post(f"/trials/{trial}/outcome", json=body).json()["accepted"]
        for format_name in FORMATS:
            asked = {"format": format_name, "trial": number}
            answer = http.get("/campaigns/exported/exports", params=asked)
            lines += [f"{name} as {format_name}: {answer.status_code}", *exported(answer)]
            if answer.is_client_error:
                without = re.findall(r"--without (\w+)", answer.json()["detail"])
                if without:
                    asked["without"] = without
                    answer = http.get("/campaigns/exported/exports", params=asked)
                    lines += [f"  without {' '.join(without)}", *exported(answer)]
    return lines


def exported(answer: httpx.Response) -> Iterator[str]:
    """The lines of an export, or of its refusal; those of comments and notes are prose."""
    export = answer.json()
    if answer.is_client_error:
        yield f"  {export['type']}"
        yield f"prose   {export['detail']}"
        return
    for file in export.pop("files"):
        yield f"  file {file['name']} executable={file['executable']}"
        for line in file["content"].splitlines():
            is_prose = line.lstrip().startswith("#") and not line.startswith(("#!", "#SBATCH"))
            yield f"prose   {line}" if is_prose else f"    {line}"
    yield from (f"prose   {note}" for note in export.pop("notes"))
    assert export.pop("model")
    assert export.pop("layout")
    for command in export.pop("commands"):
        words = re.sub(r"\blayout_tuner(\.\w+)+", "<module>", " ".join(command["words"]))
        yield f"  command {words}"
        yield f"prose   {command['when']}"
    yield f"  {plain(export)}"


def tables(http: httpx.Client) -> list[str]:
    """Measurement tables of a campaign, and what importing one answers."""
    paths = ["table", "leaderboard?format=csv", "leaderboard?format=csv&intervals=true"]
    lines = []
    for path in paths:
        text = http.get(f"/campaigns/first/{path}").text
        lines += [path, *(f"  {line}" for line in text.splitlines())]
    content = http.get("/campaigns/first/leaderboard?format=parquet&intervals=true").content
    schema = pyarrow.parquet.read_schema(io.BytesIO(content))
    lines += ["parquet", *(f"  {field.name} {field.type}" for field in schema)]
    table = http.get("/campaigns/first/table").text
    sent = {"content": table, "headers": {"Content-Type": "text/csv"}}
    imported = http.post("/campaigns/import", params={"name": "imported"}, **sent)
    for campaign in imported.json()["campaigns"]:
        lines.append(f"imported {imported.status_code} {plain(campaign['progress'])}")
    return lines


def events(http: httpx.Client, store: Store) -> list[str]:
    """The names of all events that this service has written, and the types in their documents."""
    first = http.get("/campaigns/first").json()["id"]
    store.reports.keep_analysis(first, make_analysis(http.get("/trials/1").json()["id"]))
    http.patch("/campaigns/first", json={"notes": "seen"})
    worker = http.post("/workers", json={**IDENTITY, "name": "returns"}).json()["worker_id"]
    store.trials.add(first, Layout(dp=4, num_microbatches=2))
    http.post(f"/workers/{worker}/leases", json={"max_trials": 1, "wait_s": 0})
    http.delete(f"/workers/{worker}")
    for action in ("pause", "resume", "cancel"):
        http.post(f"/campaigns/first/{action}")
    read = http.get("/events", params={"after": 0}).text
    http.delete("/campaigns/first")
    read += http.get("/events", params={"after": 0}).text
    read += live_events(store)
    found = re.findall(r"event: (.+)\r?\ndata: (.+)", read)
    return sorted({f"{kind} {plain(typed(json.loads(data)))}" for kind, data in found})


def live_events(store: Store) -> str:
    """A stream that begins while a trial runs, and in which a worker registers with a node."""
    trial = store.trials.add(make_campaign(store, "live"), Layout(num_microbatches=8))
    worker = store.workers.register(WorkerCreate(**{**IDENTITY, "name": "runs"}))
    assert [lease.trial_id for lease in take_leases(store, worker.id, 1)] == [trial.id]
    send_beats(store, worker.id, [BeatBody(trial_id=trial.id, attempt=1, iterations_done=2)])
    node = NodeBody(name="n0", num_devices=4)
    joins = WorkerCreate(**{**IDENTITY, "name": "joins", "nodes": [node]})
    wanted = ["campaign.progress", "worker.changed", "nodes.changed"]
    read: list[str] = []
    with (
        live_service(Settings(token=TOKEN, live_event_s=0.05), store) as url,
        httpx.stream("GET", f"{url}/events", headers=HEADERS, timeout=30) as stream,
    ):
        for line in stream.iter_lines():
            read.append(line)
            if wanted and line == f"event: {wanted[0]}":
                wanted.pop(0)
                if len(wanted) == 2:
                    store.workers.register(joins)
            elif line.startswith("data:") and not wanted:
                break
    return "\n".join(read)


def typed(value: Any) -> Any:
    """A document with the types of its values in their place."""
    if isinstance(value, dict):
        return {name: typed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [typed(each) for each in value[:1]]
    return "null" if value is None else type(value).__name__


def metrics(url: str) -> list[str]:
    """Names, kinds and labels of the service's own metrics."""
    text = httpx.get(f"{url}/metrics", headers=HEADERS).text
    kinds = re.findall(r"^# TYPE (layout_tuner_\w+) (\w+)$", text, re.MULTILINE)
    labelled = re.findall(r"^(layout_tuner_\w+)\{(.*)\}", text, re.MULTILINE)
    labels = {f"{name}: {' '.join(re.findall('([a-z_]+)=', inner))}" for name, inner in labelled}
    return [*(f"{name}: {kind}" for name, kind in sorted(kinds)), *sorted(labels)]


def refusal(http: httpx.Client, name: str, method: str, path: str, body: Any) -> tuple[str, ...]:
    """A request's name, its status with type and fields, and its sentences."""
    sent = {"content": body} if isinstance(body, str) else {"json": body}
    answer = http.request(method, path, **({} if body is UNSENDABLE else sent))
    document = answer.json()
    errors = document.get("errors") or []
    fields = " ".join(error["field"] for error in errors)
    structure = f"{answer.status_code} {document['type']} {fields}".rstrip()
    return name, structure, document["detail"]
