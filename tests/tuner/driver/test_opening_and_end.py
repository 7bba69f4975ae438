"""How campaigns open, are deleted amid a round, and end: the trials they ask for, and the words."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import text

from layout_tuner.protocol.states import NodeState
from layout_tuner.protocol.worker_messages import NodeStatusBody, StatusBody
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.errors import CampaignNotFoundError
from layout_tuner.results_db.records import CampaignRecord, TrialRecord, TrialSize, WorkerRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.campaign_settings import Budget
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver import open_searches
from layout_tuner.tuner.driver.campaign_end import Spent, closing_message, time_is_up, trials_left
from layout_tuner.tuner.driver.campaign_opening import MAX_OPENINGS, BackgroundOpening
from layout_tuner.tuner.driver.campaign_search import CampaignSearch
from layout_tuner.tuner.driver.driver import MAX_A_ROUND, Driver
from layout_tuner.tuner.driver.open_trial_target import MAX_TOO_LARGE, MAX_WAITING, OpenTrialTarget
from tests.kit.postgres import upgraded
from tests.kit.store import START, TurnableClock, make_worker, send_beats, take_leases
from tests.results_db.intercepted_store import InterceptedStore
from tests.tuner.factories import (
    DrivenCampaign,
    FakeWorker,
    drive_until,
    ended,
    layouts_of,
    make_spec,
    submit,
    wait_for,
)

PATIENCE_S = 60.0


class Gate(threading.Event):
    """Set by the test; until then the search of the campaign "huge" is not opened."""

    num_openings = 0
    """How often its opening has begun."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()

    class GatedSearch(CampaignSearch):
        @classmethod
        def rebuild(cls, campaign: CampaignRecord, *told: Any) -> CampaignSearch:
            if campaign.name == "huge":
                gate.num_openings += 1
                assert gate.wait(PATIENCE_S)
            return CampaignSearch.rebuild(campaign, *told)

    monkeypatch.setattr(open_searches, "CampaignSearch", GatedSearch)
    yield gate
    gate.set()


def submit_both(store: Store) -> tuple[CampaignRecord, CampaignRecord]:
    """The campaign whose search is not opened yet, and a small one."""
    huge, small = (submit(store, make_spec(n, budget={"trials": 2})) for n in ("huge", "small"))
    return huge, small


def test_a_small_campaign_runs_to_its_end_while_a_huge_one_is_opened(
    store: Store, gate: Gate
) -> None:
    huge, small = submit_both(store)
    driver = Driver(store, opening=BackgroundOpening())
    drive_until_ended(store, small, driver)
    assert store.trials.find(huge.id) == []
    assert store.campaigns.get(huge.id).state == "RUNNING"
    gate.set()
    drive_until_ended(store, huge, driver)


def test_a_search_that_is_opened_beside_proposes_what_it_would_have_proposed_at_once(
    store: Store,
) -> None:
    proposed = []
    for name, opening in (("beside", BackgroundOpening()), ("at-once", None)):
        campaign = submit(store, make_spec(name, seed=7, knowledge="none", budget={"trials": 4}))
        drive_until_ended(store, campaign, Driver(store, opening=opening))
        proposed.append(layouts_of(store.trials.find(campaign.id)))
    assert proposed[0] == proposed[1]


@pytest.mark.parametrize("how", ["paused", "cancelled", "deleted"])
def test_a_campaign_that_no_longer_runs_when_its_search_is_there_gets_no_trials(
    store: Store, gate: Gate, how: str
) -> None:
    huge, small = submit_both(store)
    driver = Driver(store, opening=BackgroundOpening())
    assert driver.step()
    if how == "paused":
        store.campaigns.pause(huge.id)
    else:
        store.campaigns.cancel(huge.id)
    if how == "deleted":
        store.campaigns.delete(huge.id)
    gate.set()
    drive_until_ended(store, small, driver)
    assert store.trials.find(huge.id) == []
    if how == "paused":
        store.campaigns.resume(huge.id)
        drive_until_ended(store, huge, driver)
        assert gate.num_openings == 2  # the first one knew nothing that came meanwhile


def test_a_search_that_cannot_be_opened_breaks_its_campaign_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ArithmeticError("no such strategy")

    monkeypatch.setattr("layout_tuner.tuner.driver.campaign_search.make_strategy", refuse)
    broken = submit(store, make_spec("broken"))
    driver = Driver(store, opening=BackgroundOpening())
    wait_for(lambda: ended(store, broken), driver.step)
    record = store.campaigns.get(broken.id)
    assert (record.state, record.reason) == ("FAILED", "error")
    assert "ArithmeticError: no such strategy" in str(record.message)


def test_an_opening_that_fails_has_not_worked_until_it_does(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = threading.Event()
    failing.set()
    known_trials = store.plans.known_trials

    def fail_or_answer(campaign: CampaignRecord) -> Any:
        if failing.is_set():
            raise KeyError("what no round expects")
        return known_trials(campaign)

    monkeypatch.setattr(store.plans, "known_trials", fail_or_answer)
    campaign = submit(store, make_spec("unlucky"))
    driver = Driver(store, opening=BackgroundOpening())
    wait_for(lambda: "this round failed" in caplog.text, driver.step)
    assert [driver.step() for _ in range(20)] == [False] * 20
    assert not [line for line in caplog.messages if "works again" in line]
    failing.clear()
    wait_for(lambda: bool(store.trials.find(campaign.id)), driver.step)


def test_forgotten_openings_keep_their_places_until_their_threads_end() -> None:
    gate, begun = threading.Event(), []

    def open_search() -> CampaignSearch:
        begun.append(threading.current_thread())
        assert gate.wait(PATIENCE_S)
        raise KeyError

    opening = BackgroundOpening()
    for campaign_id in range(3 * MAX_OPENINGS):
        assert opening.take(campaign_id, open_search) is None
        opening.keep_only(set())
    gate.set()
    for thread in begun:
        thread.join(PATIENCE_S)
    assert len(begun) == MAX_OPENINGS
    assert opening.take(99, open_search) is None
    wait_for(lambda: len(begun) > MAX_OPENINGS)


def test_an_opening_that_never_ends_fails_its_campaign_and_leaves_its_place(
    store: Store, gate: Gate
) -> None:
    huge = submit(store, make_spec("huge"))
    driver = Driver(store, opening=BackgroundOpening(stuck_after_s=0.05))
    wait_for(lambda: ended(store, huge), driver.step)
    record = store.campaigns.get(huge.id)
    assert (record.state, record.reason) == ("FAILED", "error")
    assert "its search was not opened within 0.05 s" in str(record.message)


def drive_until_ended(store: Store, campaign: CampaignRecord, driver: Driver) -> None:
    worker = FakeWorker(store)

    def turn() -> None:
        assert driver.step()
        worker.run_one()

    wait_for(lambda: ended(store, campaign), turn)


MOST_CALLS = 60


class VanishingStore(InterceptedStore):
    """A store of which a campaign is deleted just before a certain call."""

    def __init__(self, store: Store, campaign_id: int, before_call: int) -> None:
        super().__init__(store, self._delete_in_time)
        self._campaign_id, self._before_call = campaign_id, before_call
        self.num_calls = 0
        self._lock = threading.Lock()

    def _delete_in_time(self, _call: str) -> None:
        with self._lock:  # searches that are opened beside the rounds call it from threads
            self.num_calls += 1
            if self.num_calls == self._before_call:
                if self._store.campaigns.get(self._campaign_id).state == "RUNNING":
                    self._store.campaigns.cancel(self._campaign_id)
                self._store.campaigns.delete(self._campaign_id)


def new(_store: Store, _victim: int) -> None:
    """Nothing was done for it yet."""


def half_done(store: Store, victim: int, num_done: int = 5) -> None:
    driver = Driver(store)
    drive_until(
        lambda: store.campaigns.count_trials(victim)["COMPLETED"] >= num_done,
        driver.step,
        FakeWorker(store),
    )
    driver.close()


def nearly_done(store: Store, victim: int) -> None:
    """All is measured; what may be best is measured again next, and then the campaign ends."""
    half_done(store, victim, num_done=8)


def over_time(store: Store, victim: int) -> None:
    half_done(store, victim)
    store.campaigns.update(victim, budget={"trials": None, "wall_time_s": 1e-9})


def broken(store: Store, victim: int) -> None:
    statement = "UPDATE campaigns SET spec = json_remove(spec, '$.model') WHERE id = :id"
    with store._db.write() as session:
        session.execute(text(statement), {"id": victim})


def each_call(
    prepare: Callable[[Store, int], None], tmp_path: Path
) -> Iterator[tuple[Store, int, int]]:
    """Stores in which two campaigns are as a preparation left them, with the number of a call."""
    template = upgraded(tmp_path / "template")
    with closing(Store.open(template)) as store:
        victim = submit(
            store,
            make_spec(
                "victim", budget={"trials": 8}, stop={"remeasure": 2, "converged_within": 0.01}
            ),
        )
        submit(store, make_spec("bystander"))
        prepare(store, victim.id)
    for before_call in range(1, MOST_CALLS):
        copy = DataDir(tmp_path / f"copy-{before_call}")
        copy.create()
        shutil.copy(template.path / "results.sqlite3", copy.path)
        with closing(Store(copy.database_url)) as store:
            yield store, victim.id, before_call


def step_until_opened(driver: Driver) -> list[bool]:
    """Two rounds: the searches that the first one opens on threads are there in the second one."""
    rounds = [driver.step()]
    for thread in threading.enumerate():
        if thread.name == "opening":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    return [*rounds, driver.step()]


@pytest.mark.parametrize(
    ("prepare", "opening"),
    [
        (new, None),
        pytest.param(half_done, BackgroundOpening, marks=pytest.mark.slow),
        pytest.param(nearly_done, None, marks=pytest.mark.slow),
        pytest.param(over_time, None, marks=pytest.mark.slow),
        pytest.param(broken, None, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", "at_once"),
)
def test_a_campaign_that_is_deleted_before_any_step_of_a_round_has_ended(
    prepare: Callable[[Store, int], None],
    opening: type[BackgroundOpening] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("layout_tuner.tuner.driver.driver.ANALYSIS_INTERVAL_S", -1.0)
    monkeypatch.setattr("layout_tuner.tuner.driver.driver.ENDINGS_AN_ANALYSIS", 1)
    was_last = False
    for store, campaign_id, before_call in each_call(prepare, tmp_path):
        vanishing = VanishingStore(store, campaign_id, before_call)
        driver = Driver(cast("Store", vanishing), opening=opening and opening())
        caplog.clear()
        rounds = step_until_opened(driver) if opening else [driver.step()]
        was_last = vanishing.num_calls < before_call
        if was_last:
            break
        rounds.append(driver.step())
        said = {record.getMessage() for record in caplog.records if record.levelno > logging.INFO}
        said -= {"campaign 'victim' is broken"}  # it was, before it was deleted
        assert (set(rounds), said) == ({True}, set()), f"before call {before_call}"
        with pytest.raises(CampaignNotFoundError):
            store.campaigns.get(campaign_id)
        assert store.trials.find(store.campaigns.by_name("bystander").id), "the other one goes on"
    assert was_last


make_spent = partial(Spent, trials=0, node_seconds=0.0, wall_time_s=0.0)


ended_trial = partial(SimpleNamespace, reason=None, is_cheap=False)
"""As much of a trial's record as tells how it ended."""
failed_trial = partial(ended_trial, state="FAILED")
DONE, PART = (ended_trial(state="COMPLETED", is_cheap=is_cheap) for is_cheap in (False, True))
CANCELLED = ended_trial(state="CANCELLED", reason="cancelled")
NO_MEMORY = ended_trial(state="INFEASIBLE", reason="out_of_memory")
CRASHED, LATE = (failed_trial(reason=reason) for reason in ("crashed", "timeout"))
CRASHED_PART = failed_trial(reason="crashed", is_cheap=True)
NO_FULL_ONE = "; no layout was measured in full, so there is no winner"


@pytest.mark.parametrize(
    ("budget", "spent", "left", "said"),
    [
        (Budget(trials=3), make_spent(), 3, None),
        (Budget(trials=3), make_spent(trials=2), 1, None),
        (Budget(trials=3), make_spent(trials=3), 0, None),
        (Budget(trials=3), make_spent(trials=4), 0, None),
        (Budget(trials=1), make_spent(node_seconds=1e9, wall_time_s=1e9), 1, None),
        (Budget(wall_time_s=90.0), make_spent(trials=1000, wall_time_s=89.9), None, None),
        (Budget(wall_time_s=90.0), make_spent(wall_time_s=90.0), None, "90 of 90 s of wall time"),
        (Budget(node_hours=2.0), make_spent(node_seconds=7199.0), None, None),
        (Budget(node_hours=2.0), make_spent(node_seconds=7560.0), None, "2.1 of 2 node-hours"),
        (Budget(node_hours=1.0, wall_time_s=90.0), make_spent(wall_time_s=99.0), None, "99 of 90"),
        (
            Budget(node_hours=1.0, wall_time_s=90.0),
            make_spent(node_seconds=3600.0),
            None,
            "1 of 1 node-hours",
        ),
    ],
)
def test_a_budget_is_spent_at_the_first_of_its_bounds(
    budget: Budget, spent: Spent, left: int | None, said: str | None
) -> None:
    assert trials_left(budget, spent) == left
    words = time_is_up(budget, spent)
    assert words is None if said is None else words is not None and words.startswith(said)


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([DONE] * 12, " (12 completed)"),
        (
            [DONE] * 2 + [NO_MEMORY] * 3 + [CRASHED, CANCELLED],
            " (1 cancelled, 2 completed, 1 failed, 3 infeasible)",
        ),
        (
            [NO_MEMORY] * 3 + [CRASHED] + [CANCELLED] * 5,
            "; no trial completed; most common reason: out_of_memory (3 of 4)",
        ),
        ([CANCELLED] * 2, "; no trial was run"),
        ([], "; no trial was run"),
        (
            [PART, CRASHED_PART],
            f" (1 completed, 1 failed){NO_FULL_ONE}: clone the campaign with a larger budget",
        ),
        ([PART, DONE], " (2 completed)"),
        # Where every full probe failed, a larger budget would not help.
        (
            [PART, *[CRASHED_PART] * 3, LATE, LATE, CANCELLED],
            f" (1 cancelled, 1 completed, 5 failed){NO_FULL_ONE}; most common reason: timeout "
            "(2 of 2)",
        ),
    ],
)
def test_the_closing_message_says_what_came_of_the_trials(
    trials: list[TrialRecord], words: str
) -> None:
    assert closing_message("done", trials) == f"done{words}"


def test_a_lowered_budget_ends_the_campaign_once_what_waits_is_done(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 20}))
    campaign.until_completed(2)
    store.campaigns.update(campaign.id, budget={"trials": 1})
    before = len(campaign.trials)
    record = campaign.to_end()
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert len(campaign.trials) == before


@pytest.mark.parametrize("bound", [{"trials": 2}, {"wall_time_s": 10.0, "trials": 3}])
def test_a_budget_raised_in_the_very_round_that_ends_the_campaign_is_not_lost(
    store: Store, clock: TurnableClock, bound: dict[str, float]
) -> None:
    campaign = submit(store, make_spec(budget=bound))
    raised = []

    def raise_in_time(call: str) -> None:
        """Just before the driver writes that the budget is spent."""
        if call in ("campaigns.end", "campaigns.cancel_pending") and not raised:
            raised.append(call)
            store.campaigns.update(campaign.id, budget={"trials": 4, "wall_time_s": 1000.0})

    between = cast("Store", InterceptedStore(store, raise_in_time))
    driver, worker = Driver(between), FakeWorker(store)
    driver.step()
    if "wall_time_s" in bound:
        clock.forward(12.0)
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    assert raised
    assert store.campaigns.get(campaign.id).message == "4 of 4 trials done (4 completed)"


def live(**changes: Any) -> WorkerRecord:
    """A worker of one node with eight devices that was just registered."""
    worker = dict.fromkeys(("id", "name", "host", "cluster", "device"), "w")
    worker |= {"num_nodes": 1, "devices_per_node": 8, "versions": {}, "trainers": {}}
    times = {"registered_at": START, "seen_at": START, "ended_at": None}
    return WorkerRecord(**worker | times | changes)


sharing = partial(live, shares_nodes=True)


def size(devices: int = 8, nodes: int = 1, *, is_waiting: bool = True) -> TrialSize:
    return TrialSize(num_nodes=nodes, num_devices=devices, is_waiting=is_waiting)


RUNS = size(devices=2, is_waiting=False)


@pytest.mark.parametrize(
    ("workers", "open_trials", "trial", "asked"),
    [
        # Without a worker one trial waits.
        ([], [], size(), 1),
        # A node that is not shared holds one trial, and one more waits.
        ([live()], [], size(devices=1), 2),
        ([live(), live()], [], size(devices=2), 3),
        ([live(num_nodes=4)], [], size(devices=2), 5),
        # One that is shared is filled with small trials; larger ones are counted by their nodes.
        ([sharing()], [], size(devices=2), 5),
        ([sharing(num_nodes=3)], [], size(devices=1), 25),
        ([sharing(num_nodes=6)], [], size(devices=16, nodes=2), 4),
        # What runs is supplied already.
        ([sharing()], [RUNS] * 4, size(devices=2), 1),
        # Smaller trials fill what a large one that waits leaves free.
        (
            [sharing(num_nodes=16)],
            [size(devices=72, nodes=9, is_waiting=False), size(devices=72, nodes=9)],
            size(),
            7,
        ),
        # A worker that drains is not supplied.
        ([sharing(num_nodes=4, state="draining")], [], size(), 1),
        # Trials too large for every worker supply nobody, and no more than a few of them wait.
        ([live()], [size(devices=16, nodes=2)] * 3, size(), 2),
        ([live()], [], size(devices=16, nodes=2), MAX_TOO_LARGE + 2),
        # Neither are those supplied that need nodes which are lost or in quarantine.
        ([live(num_nodes=4, num_unusable=1)], [size(devices=32, nodes=4)] * 2, size(), 4),
        ([live(num_nodes=4, num_unusable=4)], [size(devices=32, nodes=4)] * 2, size(), 0),
        # One that a single worker can hold is not too large.
        ([live(), live(num_nodes=4)], [], size(devices=16, nodes=2), 4),
        # No more than some wait at all.
        ([sharing(num_nodes=1024)], [], size(devices=2), MAX_WAITING),
        ([sharing(num_nodes=1024)], [RUNS] * 100, size(devices=2), MAX_WAITING),
    ],
)
def test_a_campaign_asks_for_as_many_trials_as_fill_its_workers(
    workers: list[WorkerRecord], open_trials: list[TrialSize], trial: TrialSize, asked: int
) -> None:
    supply = OpenTrialTarget(workers, open_trials)
    num_asked = 0
    while supply.is_short:
        supply.add(trial)
        num_asked += 1
    assert num_asked == asked


def test_smaller_layouts_go_on_while_some_wait_for_a_node_in_quarantine(store: Store) -> None:
    campaign, worker = submit(store, make_spec(budget={"trials": 20})), FakeWorker(store, nodes=2)
    states: list[NodeState] = ["idle", "quarantined"]
    nodes = [NodeStatusBody(name=f"n{i}", state=state) for i, state in enumerate(states)]
    send_beats(store, worker.id, [], status=StatusBody(nodes=nodes))
    for batch in (1, 2):
        store.trials.add(campaign.id, Layout(num_nodes=2, dp=16, micro_batch_size=batch))
    Driver(store).step()
    waiting = [size.num_nodes for size in store.trials.open_sizes(campaign.id)]
    assert waiting == [2, 2, 1, 1]


def test_one_trial_waits_beyond_what_the_workers_run(store: Store) -> None:
    campaign = submit(store, make_spec(budget={"trials": 20}))
    workers = [FakeWorker(store, name=f"w{i}") for i in range(3)]
    driver = Driver(store)
    driver.step()
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == 4
    for worker in workers:
        take_leases(store, worker.id, 1)
    driver.step()
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == 1


def test_a_round_asks_for_a_few_trials_only(store: Store) -> None:
    degrees = {"tp": [1, 2, 4], "pp": [1, 2, 4], "micro_batch_size": [1, 2, 4]}
    space = {"global_batch_size": 64, "recompute": ["none", "full"], **degrees}
    campaign = submit(store, make_spec(space=space, budget={"trials": 100}))
    make_worker(store, num_nodes=64, shares_nodes=True)
    driver = Driver(store)
    for number in (1, 2):
        driver.step()
        assert len(store.trials.find(campaign.id)) == number * MAX_A_ROUND


def test_trials_too_large_for_every_worker_do_not_keep_the_smaller_ones_from_being_tried(
    store: Store,
) -> None:
    """Most of the legal layouts need two nodes; the worker has one."""
    spec = make_spec().to_mapping()
    spec["cluster"]["num_nodes"] = 2
    spec["space"]["num_nodes"] = [1, 2]
    spec["budget"] = {"trials": 60}
    campaign = DrivenCampaign(store, CampaignSpec.from_mapping(spec))
    campaign.until(lambda: store.workers.count_too_large(campaign.id) > 2)
    campaign.until_completed(campaign.count() + 2)
    assert campaign.record.state == "RUNNING"
    assert store.workers.count_too_large(campaign.id) <= MAX_TOO_LARGE + 2
