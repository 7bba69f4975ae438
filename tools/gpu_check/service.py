"""The whole product on this machine: `layout-tuner up`, campaigns over HTTP, the exported job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from layout_tuner.api.process.supervisor import end_with
from layout_tuner.client.clients import Client
from layout_tuner.predictions.belief.plan import Plan
from layout_tuner.results_db.database.data_dir import DataDir
from tools.gpu_check.comparison import Row, comparison, problems_of, with_trial
from tools.gpu_check.steps import Clock, StepCutError, StepFailedError, layout_tuner
from tools.gpu_check.workloads import MEANT_TO_FAIL, Workload

_UP_WITHIN_S: Final = 90.0
_DOWN_WITHIN_S: Final = 20.0
_POLL_S: Final = 0.25


@contextmanager
def running_service(data_dir: Path, cluster_file: Path, clock: Clock) -> Iterator[Client]:
    """`layout-tuner up` with the launcher `local` on a free port, and a client of it."""
    log = data_dir / "up.log"
    words = layout_tuner("up", "--port", "0", "--launcher", "local", "--cluster", str(cluster_file))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, "--data-dir", str(data_dir)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this check, which then ends it in order
            preexec_fn=end_with(os.getpid()),
        )
    try:
        ends_at = min(clock.ends_at, time.monotonic() + _UP_WITHIN_S)
        while "\nready:" not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > ends_at:
                raise StepFailedError(f"layout-tuner up is not ready: {_end_of(log, data_dir)}")
            time.sleep(_POLL_S)
        with Client.of_data_dir(DataDir(data_dir)) as client:
            yield client
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_DOWN_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its children end with it
            process.wait()


def _end_of(log: Path, data_dir: Path) -> str:
    worker = data_dir / "logs" / "worker.log"
    texts = [path.read_text(errors="replace").strip() for path in (log, worker) if path.exists()]
    return " | ".join(line for text in texts for line in text.splitlines()[-4:])


def predict(client: Client, every: Sequence[Workload], cluster: Mapping[str, Any]) -> list[Row]:
    """A row for each layout, with what the service predicts before anything is measured."""
    rows = []
    for workload in every:
        plan = client.plan(workload.document(cluster), top=1000)
        assert isinstance(plan, Plan), "the campaigns are small"
        planned = {each.layout_key: each.predicted for each in plan.layouts}
        for layout in workload.layouts:
            row = Row(
                campaign=workload.name,
                layout_key=layout.key,
                precision=layout.precision,
                micro_batch_size=layout.micro_batch_size,
                recompute=layout.recompute,
            )
            if (expected := planned.get(layout.key)) is not None:
                row = replace(
                    row,
                    predicted_step_time_s=expected.step_time_s,
                    predicted_peak_bytes=expected.peak_memory_bytes,
                    predicted_fits=expected.fits,
                )
            rows.append(row)
    return rows


def measure(
    client: Client,
    every: Sequence[Workload],
    cluster: Mapping[str, Any],
    rows: list[Row],
    clock: Clock,
) -> None:
    """Runs the campaigns one after the other, and writes what each measured into the rows.

    Raises:
        StepCutError: there was no time for all; the rows have what was measured until then.
    """
    for workload in every:
        name = client.create_campaign(workload.document(cluster)).name
        try:
            while (state := client.campaign(name).state) == "RUNNING":
                if clock.left_s < _DOWN_WITHIN_S:
                    client.cancel_campaign(name)
                    raise StepCutError(f"campaign {name} had not ended")
                time.sleep(_POLL_S)
        finally:
            trials = {trial.layout_key: trial for trial in client.trials(name)}
            rows[:] = [
                with_trial(row, trials[row.layout_key])
                if row.campaign == name and row.layout_key in trials
                else row
                for row in rows
            ]
        if state != "COMPLETED":
            raise StepFailedError(f"campaign {name} is {state}: {client.campaign(name).message}")


def run_campaigns(
    data_dir: Path,
    cluster_file: Path,
    cluster: Mapping[str, Any],
    every: Sequence[Workload],
    report: dict[str, Any],
    clock: Clock,
) -> None:
    """Predicts, measures and compares; exports the winner of the last campaign that has one.

    Args:
        data_dir: of the service.
        cluster_file: description of this machine, for the worker.
        cluster: the same with measured constants, for the campaigns.
        every: the campaigns.
        report: gets "layouts", "comparison" and "export", also where the step fails.
        clock: of this step.
    """
    with running_service(data_dir, cluster_file, clock) as client:
        rows = predict(client, every, cluster)
        report["predicted_at_s"] = round(clock.elapsed_s, 1)
        try:
            measure(client, every, cluster, rows, clock)
        finally:
            report["layouts"] = [row.to_mapping() for row in rows]
            report["comparison"] = comparison(rows)
            measured = {row.campaign for row in rows if row.state == "COMPLETED"}
            for name in [each.name for each in every if each.name in measured][-1:]:
                report["export"] = _export(client, name, data_dir)
    if found := problems_of(rows, meant_to_fail=MEANT_TO_FAIL):
        raise StepFailedError("; ".join(found[:3]))


def _export(client: Client, campaign: str, data_dir: Path) -> dict[str, Any]:
    """Writes the files of the campaign's best layout; returns what the probe measured of it."""
    folder = data_dir / "job"
    folder.mkdir(exist_ok=True)
    for file in client.export(campaign, "trainer").files:
        (folder / file.name).write_text(file.content)
    best = client.leaderboard(campaign, limit=1).trials[0]
    assert best.measurement is not None, "the leaderboard lists completed trials"
    return {
        "campaign": campaign,
        "layout_key": best.layout_key,
        "probe_tokens_per_s": best.measurement.tokens_per_s,
    }


def train(
    data_dir: Path, cluster_file: Path, report: dict[str, Any], steps: int, clock: Clock
) -> None:
    """Runs the exported job for some steps, beside what the probe measured."""
    if "export" not in report:
        raise StepFailedError("no layout was measured, so there is no job to train")
    job = str(data_dir / "job" / "job.json")
    words = layout_tuner("train", "--config", job, "--cluster", str(cluster_file))
    result = json.loads(clock.run([*words, f"--steps={steps}", "--warmup=3", "--json"]))
    report["training"] = {
        "steps": steps,
        "tokens_per_s": result["tokens_per_s"],
        "over_probe": result["tokens_per_s"] / report["export"]["probe_tokens_per_s"],
    }
