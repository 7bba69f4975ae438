"""Simulated workers in a process of their own, against a small service over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from search_spaces.protocol.outcome import Outcome, ProbeRequest
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers import simulator
from search_spaces.trainers.simulator import simulator_trainer
from tests.kit.waiting import wait_until
from tests.kit.worker_loop import FAILED, WorkedService, fail, running_worker
from workers.simulation import probe, scenarios

FRONTIER = ("--simulate", "frontier", "--seed", "5")


def simulated_request(*, nodes: int = 1, **changes: Any) -> dict[str, Any]:
    """A probe of a model of 1.3 billion parameters over whole nodes of Frontier."""
    layout = Layout(num_nodes=nodes, dp=8 * nodes, num_microbatches=4, precision="bf16")
    return ProbeRequest(
        **{
            "model": model_preset("gpt-1.3b"),
            "layout": layout,
            "simulation_seed": 1,
            "iterations": 5,
            **changes,
        }
    ).to_mapping()


@contextmanager
def simulated(service: WorkedService, *options: str, nodes: int = 1) -> Iterator[None]:
    """A simulated worker; while some nodes are free it would wait seconds for a late driver."""
    with running_worker(service, *FRONTIER, "--nodes", str(nodes), *options) as worker:
        yield
        worker.terminate()
        assert worker.wait(30) == 0


def outcomes_of(service: WorkedService, number: int) -> list[dict[str, Any]]:
    return wait_until("the outcomes are posted", lambda: _at_least(service.outcomes, number), 30)


def _at_least(found: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return list(found) if len(found) >= number else []


def test_campaigns_and_workers_have_one_version_of_the_simulator() -> None:
    assert probe.SIMULATOR_VERSION == simulator.SIMULATOR_VERSION
    assert scenarios.SIMULATED == simulator.SIMULATED


def test_outcomes_are_posted_in_the_order_of_their_simulated_ends(service: WorkedService) -> None:
    lengths = {1: 600, 2: 10, 3: 40, 4: 25}
    for trial_id, iterations in lengths.items():
        service.add_trial(trial_id, simulated_request(iterations=iterations))
    with simulated(service, nodes=2):
        posted = outcomes_of(service, 4)
    assert [each["trial_id"] for each in posted] == [2, 3, 4, 1]


def test_it_says_that_it_simulates_and_each_figure_says_so_too(service: WorkedService) -> None:
    service.add_trial(1, simulated_request(nodes=4))
    with simulated(service, nodes=4):
        (posted,) = outcomes_of(service, 1)
    (said,) = service.registrations
    assert said["allocation"]["launcher"] == "simulated"
    assert said["trainers"] == {simulator_trainer(): "1"}
    assert said["device"] == "simulated AMD MI250X GCD"
    assert [node["name"] for node in said["nodes"]][-1] == "frontier-simulated-00003"
    outcome = Outcome.from_mapping(posted["outcome"])
    measured, environment = outcome.measurement, outcome.environment
    assert measured is not None
    assert environment is not None
    assert (measured.trainer, measured.memory_kind) == (simulator_trainer(), "simulated")
    assert environment.backend == "simulator 1, nodes of seed 5"
    assert {each.loss for each in measured.iterations} == {None}, "nothing invents a loss"
    assert not measured.losses_comparable


def test_equal_seeds_give_equal_figures_and_others_do_not(service: WorkedService) -> None:
    for trial_id, seed in ((1, 1), (2, 2)):
        service.add_trial(trial_id, simulated_request(simulation_seed=seed))
    with simulated(service):
        outcomes_of(service, 2)
    service.add_trial(1, simulated_request())
    with simulated(service):
        *first, again = outcomes_of(service, 3)
    times = [
        each["outcome"]["measurement"]["step_time_s"]
        for each in (*sorted(first, key=lambda each: each["trial_id"]), again)
    ]
    assert times[0] == times[2]
    assert times[0] != times[1]


def test_a_slow_probe_is_stopped_early_and_holds_its_nodes_for_less(service: WorkedService) -> None:
    for trial_id, above_s in ((1, None), (2, 1e-3)):
        service.add_trial(
            trial_id, simulated_request(iterations=40, stop_above_step_time_s=above_s)
        )
    with simulated(service):
        outcomes_of(service, 2)
    whole, short = (service.posted()[trial_id] for trial_id in (1, 2))
    assert not whole["measurement"]["shortened"]
    assert short["measurement"]["shortened"]
    assert short["duration_s"] < whole["duration_s"]


def test_a_probe_that_is_too_slow_for_its_deadline_fails_at_it(service: WorkedService) -> None:
    service.add_trial(1, simulated_request(iterations=9000, deadline_s=90.0))
    with simulated(service):
        (posted,) = outcomes_of(service, 1)
    assert posted["outcome"]["reason"] == "timeout"
    assert posted["outcome"]["duration_s"] == pytest.approx(90.0)


def test_a_layout_that_does_not_fit_is_infeasible(service: WorkedService) -> None:
    service.add_trial(1, simulated_request(model=model_preset("gpt-22b")))
    with simulated(service):
        (posted,) = outcomes_of(service, 1)
    assert (posted["outcome"]["state"], posted["outcome"]["reason"]) == (
        "infeasible",
        "out_of_memory",
    )


def test_a_simulated_second_takes_as_long_as_was_asked_and_a_probe_can_be_stopped(
    service: WorkedService,
) -> None:
    service.add_trial(1, simulated_request(iterations=1000))
    service.stop = [1]
    with simulated(service, "--time-scale", "1"):
        (posted,) = outcomes_of(service, 1)
    assert posted["outcome"]["state"] == "cancelled"
    assert 0 < posted["outcome"]["duration_s"] < 60
    beats = [beat for body in service.heartbeats for beat in body["trials"]]
    assert any(0 < beat["held_s"] < 60 for beat in beats)


def test_neither_kind_of_worker_runs_a_probe_of_the_other(service: WorkedService) -> None:
    service.add_trial(1, simulated_request(simulation_seed=None))
    with simulated(service):
        (posted,) = outcomes_of(service, 1)
    assert posted["outcome"]["reason"] == "unsupported"
    assert "its campaign measures, and this worker simulates" in posted["outcome"]["message"]
    service.add(2, simulation_seed=3)
    service.work(fail, until=lambda: 2 in service.posted())
    assert service.posted()[2] != FAILED.to_mapping()
    assert "this worker measures" in service.posted()[2]["message"]


def test_drained_simulated_workers_return_their_leases(service: WorkedService) -> None:
    service.add_trial(1, simulated_request(iterations=1000))
    with simulated(service, "--time-scale", "100"):
        wait_until("it runs", lambda: any(body["trials"] for body in service.heartbeats), 20)
    assert not service.outcomes
    assert service.unregistered == ["session-1"]
