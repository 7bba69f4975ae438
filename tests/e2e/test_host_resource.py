"""A campaign on a worker whose trainer lacks a resource of its host, for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service.live_service import LiveService, wait_until
from tests.kit.campaigns import space_of

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]

PROGRAM = """
import pathlib, resource, time
from layout_tuner import report_step
if not pathlib.Path({fixed!r}).exists():
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
kept = [open("/dev/null") for _ in range(60)]
for _ in range(20):
    time.sleep(0.25)
    report_step(loss=2.0)
"""


def test_three_trials_without_open_files_pause_the_campaign_and_the_mended_host_ends_it(
    tmp_path: Path,
) -> None:
    fixed = tmp_path / "fixed"
    (program := tmp_path / "train.py").write_text(PROGRAM.format(fixed=str(fixed)))
    entry = {"name": "theirs", "version": "1", "command": [sys.executable, str(program)]}
    (trainers := tmp_path / "trainers.json").write_text(json.dumps({"trainers": [entry]}))
    options = ("--launcher", "local", "--trainers", str(trainers))
    with LiveService(tmp_path) as service:
        service.driver().start()
        service.worker(options=options).start()
        wait_until("the worker is there", lambda: service.get("/allocations")["allocations"], 120)
        probe = {"warmup": 2, "iterations": 2, "deadline": "60s", "trainer": "theirs"}
        space = space_of(global_batch_size=4, dp=1, tp=[1, 2], pp=1, micro_batch_size=[1, 2, 4])
        budget = {"trials": 6}
        name = service.submit(probe=probe, space=space, budget=budget)["name"]

        def state() -> str:
            return str(service.get(f"/campaigns/{name}")["state"])

        def trials(**query: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = service.get(f"/campaigns/{name}/trials", **query)[
                "trials"
            ]
            return found

        wait_until("the campaign is paused", lambda: state() == "PAUSED", 120)
        wait_until("no trial runs", lambda: not trials(state="RUNNING"), 60)
        why = service.get(f"/campaigns/{name}")["progress"]["waiting_reason"]
        assert "the campaign is paused after 3 trials" in why
        assert "the host ran out of open files: raise `ulimit -n` where workers start" in why
        failed = trials(reason="host_resource")
        assert len(failed) >= 3, "those that ran already ended alike"
        assert {trial["state"] for trial in failed} == {"FAILED"}
        assert "OSError: [Errno 24] Too many open files" in failed[0]["message"]
        page = service.http.get(f"{service.url}/campaigns/{name}/failures").text
        assert "host_resource" in page

        fixed.touch()
        again = service.post(f"/trials/{failed[0]['id']}/requeue")
        service.post(f"/campaigns/{name}/resume")
        wait_until("the campaign has ended", lambda: state() == "COMPLETED", 120)
        (completed, *_) = (trial for trial in trials() if trial["number"] == again["number"])
        assert completed["state"] == "COMPLETED", completed["message"]
        assert completed["layout_key"] == failed[0]["layout_key"]
        assert len(trials(reason="host_resource")) == len(failed)
