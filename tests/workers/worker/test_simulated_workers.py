"""Simulated workers in a process of their own, against a small service over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.simulator import simulator_trainer
from tests.kit.fake_service import serve
from tests.kit.waiting import wait_until
from tests.kit.worker_loop import WorkedService, fail, running_worker

FRONTIER = ("--simulate", "frontier", "--seed", "5")


def add(service: WorkedService, trial_id: int, **changes: Any) -> None:
    """Adds a probe of a model of 1.3 billion parameters over a node of Frontier."""
    layout = Layout(dp=8, num_microbatches=4, precision="bf16")
    request = {"simulation_seed": 1, "iterations": 5, **changes}
    probe = ProbeRequest(**{"model": model_preset("gpt-1.3b"), "layout": layout, **request})
    service.add_trial(trial_id, probe.to_mapping())


@contextmanager
def simulated(service: WorkedService, *options: str, nodes: int = 1) -> Iterator[None]:
    """A simulated worker; while some nodes are free it would wait seconds for a late driver."""
    with running_worker(service, *FRONTIER, "--nodes", str(nodes), *options) as worker:
        yield
        worker.terminate()
        assert worker.wait(30) == 0


def wait_for(service: WorkedService, number: int) -> None:
    wait_until("the outcomes are posted", lambda: len(service.outcomes) == number, 30)


def test_outcomes_are_posted_in_the_order_of_their_simulated_ends(service: WorkedService) -> None:
    lengths = {1: 600, 2: 10, 3: 40, 4: 25}
    for trial_id, iterations in lengths.items():
        add(service, trial_id, iterations=iterations)
    with simulated(service, nodes=2):
        wait_for(service, 4)
    assert list(service.posted()) == [2, 3, 4, 1]
    (said,) = service.registrations
    assert [node["name"][-5:] for node in said["nodes"]] == ["00000", "00001"]


def test_simulated_time_stands_until_the_driver_has_reacted(service: WorkedService) -> None:
    def react(path: list[str], _body: Any) -> None:
        if path == ["v1", "trials", "2", "outcome"]:
            reaction = partial(add, service, 3, iterations=10)
            threading.Timer(0.3, reaction).start()

    service.intercept(react)
    for trial_id, iterations in ((1, 600), (2, 10)):
        add(service, trial_id, iterations=iterations)
    with simulated(service, nodes=2):
        wait_for(service, 2)
    assert list(service.posted())[:2] == [2, 3]


WHOLE, OTHER_SEED, STOPPED, TOO_SLOW, TOO_LARGE, MEASURED = range(1, 7)
"""Trials that differ in how they end."""


@pytest.fixture(scope="module")
def six_probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkedService]:
    """A service to which a simulated worker has posted the outcome of each of these trials."""
    with serve(WorkedService(tmp_path_factory.mktemp("six") / "spool")) as service:
        add(service, WHOLE, iterations=40)
        add(service, OTHER_SEED, iterations=40, simulation_seed=2)
        add(service, STOPPED, iterations=40, stop_above_step_time_s=1e-3)
        add(service, TOO_SLOW, iterations=9000, deadline_s=90.0)
        add(service, TOO_LARGE, model=model_preset("gpt-22b"))
        add(service, MEASURED, simulation_seed=None)
        with simulated(service):
            wait_for(service, 6)
        yield service


@pytest.fixture
def posted(six_probes: WorkedService) -> dict[int, Any]:
    return six_probes.posted()


def test_a_simulated_worker_says_what_it_is(six_probes: WorkedService) -> None:
    said = six_probes.registrations[0]
    assert said["allocation"]["launcher"] == "simulated"
    assert said["trainers"] == {simulator_trainer(): "2"}
    assert said["device"] == "simulated AMD MI250X GCD"
    assert said["nodes"][0]["name"] == "frontier-simulated-00000"


def test_a_simulated_outcome_says_what_it_is(posted: dict[int, Any]) -> None:
    outcome = Outcome.from_mapping(posted[WHOLE])
    measurement = outcome.measurement
    assert (measurement.trainer, measurement.memory_kind) == (simulator_trainer(), "simulated")
    assert outcome.environment.backend == "simulator 2, nodes of seed 5"


def test_a_simulated_probe_has_no_losses(posted: dict[int, Any]) -> None:
    measurement = Outcome.from_mapping(posted[WHOLE]).measurement
    assert {each.loss for each in measurement.iterations} == {None}, "nothing invents a loss"
    assert not measurement.losses_comparable


def test_a_simulated_probe_is_stopped_early(posted: dict[int, Any]) -> None:
    assert not posted[WHOLE]["measurement"]["shortened"]
    assert posted[STOPPED]["measurement"]["shortened"]
    assert posted[STOPPED]["duration_s"] < posted[WHOLE]["duration_s"]


def test_a_simulated_probe_ends_at_its_deadline(posted: dict[int, Any]) -> None:
    assert posted[TOO_SLOW]["reason"] == "timeout"
    assert posted[TOO_SLOW]["duration_s"] == pytest.approx(90.0)


def test_a_simulated_probe_runs_out_of_memory(posted: dict[int, Any]) -> None:
    refused = posted[TOO_LARGE]
    assert (refused["state"], refused["reason"]) == ("infeasible", "out_of_memory")


def test_a_simulated_worker_runs_no_probe_that_measures(posted: dict[int, Any]) -> None:
    assert posted[MEASURED]["reason"] == "unsupported"
    assert "its campaign measures, and this worker simulates" in posted[MEASURED]["message"]


def test_a_simulated_step_time_follows_from_its_seed(
    service: WorkedService, posted: dict[int, Any]
) -> None:
    add(service, WHOLE, iterations=40)
    with simulated(service):
        wait_for(service, 1)
    again, first, other = (
        each["measurement"]["step_time_s"]
        for each in (service.posted()[WHOLE], posted[WHOLE], posted[OTHER_SEED])
    )
    assert again == first
    assert other != first


def test_simulated_time_runs_as_asked_and_probes_can_be_stopped(service: WorkedService) -> None:
    for trial_id in (1, 2):
        add(service, trial_id, iterations=1000)
    service.stop = [1]
    with simulated(service, "--time-scale", "1"):
        wait_for(service, 1)
        wait_until("the next one runs", lambda: 2 in service.beats(), 20)
    assert service.posted().keys() == {1}
    assert service.posted()[1]["state"] == "cancelled"
    assert 0 < service.posted()[1]["duration_s"] < 60
    beats = [beat for body in service.heartbeats for beat in body["trials"]]
    assert any(0 < beat["held_s"] < 60 for beat in beats)
    assert service.unregistered == ["session-1"], "with the lease of the second"


def test_a_worker_that_measures_runs_no_simulated_probe(service: WorkedService) -> None:
    service.add(2, simulation_seed=3)
    launcher = service.work(fail, until=lambda: service.outcomes)
    assert launcher.requests == []
    assert "this worker measures" in service.posted()[2]["message"]
