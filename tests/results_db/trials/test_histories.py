"""Any order of what drivers, workers, users and clocks do to a store gives a legal history."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.states import ATTEMPT_PHASES, AttemptPhase
from layout_tuner.protocol.worker_messages import BeatBody, NodeStatusBody, RoomBody, StatusBody
from layout_tuner.results_db.allocations.leases import LEASE_S
from layout_tuner.results_db.database.store_base import Clock
from layout_tuner.results_db.errors import ResultsDbError
from layout_tuner.results_db.models.table_base import Base
from layout_tuner.results_db.records import LeaseRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.outcome_checks import CLOCK_MARGIN_S
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.postgres import upgraded
from tests.kit.store import (
    TurnableClock,
    completed,
    failed,
    make_iterations,
    make_worker,
    post_outcome,
    send_beats,
    take_leases,
)
from tests.results_db.legal_history import violations, wrong_leaderboards
from tests.tuner.factories import make_spec

OpenStores = Callable[[Clock], AbstractContextManager[Sequence[Store]]]
"""Opens an empty database several times, as several processes of one service do."""
NewDatabase = Callable[[], AbstractContextManager[str]]
"""Makes a database that is empty and upgraded; yields its URL."""

MAX_CAMPAIGNS = 3
NAMES = ("w0", "w1", "large")
CLUSTERS = ("local-cpu", "other")
TIMED = 3
"""Iterations that are asked for."""
INDEX = st.integers(0, 40)
"""Chooses among what there is; taken modulo how much that is."""

T = TypeVar("T")
State = tuple[str, str | None]


def make_campaign(store: Store, name: str, *, cluster: str = CLUSTERS[0]) -> int:
    spec = make_spec(name, probe={"iterations": TIMED}).to_mapping()
    spec["cluster"]["name"] = cluster
    return store.campaigns.create(spec, num_legal_layouts=100).id


class HistoryMachine(RuleBasedStateMachine):
    """The rules. Whatever they do, `legal_history` finds nothing, and what was accepted is kept."""

    def __init__(self, open_stores: OpenStores) -> None:
        super().__init__()
        self.open_stores = open_stores

    @initialize()
    def start(self) -> None:
        self.clock = TurnableClock()
        self.opened = self.open_stores(self.clock)
        self.stores = self.opened.__enter__()
        self.turn = 0
        self.campaigns = [make_campaign(self.store, f"c{n}", cluster=CLUSTERS[0]) for n in (0, 1)]
        self.sessions = [make_worker(self.store, NAMES[0]).id]
        for size in (1, 2, 3):
            self.store.trials.add(self.campaigns[0], Layout(micro_batch_size=size))
        self.leases = take_leases(self.store, self.sessions[0], 2)
        self.serial = 0
        self.kept: dict[int, float] = {}
        """By trial, the rate of the measurement that the store took."""
        self.reported: dict[tuple[int, int], tuple[Outcome, float | None]] = {}
        """By trial and attempt, what the store took first."""
        self.deleted: set[int] = set()
        self.rows = self.read_rows()
        self.states = self.found_states()
        self.pages = self.read_pages()
        self.told = self.count_events()

    def teardown(self) -> None:
        if hasattr(self, "opened"):
            try:
                self.read_everything()
            finally:
                self.opened.__exit__(None, None, None)

    # How rules act

    @property
    def store(self) -> Store:
        """One of the processes' stores, in turn."""
        self.turn += 1
        return self.stores[self.turn % len(self.stores)]

    def pick(self, among: Sequence[T], index: int) -> T:
        return among[index % len(among)]

    def act(self, action: Callable[[], T], *, twice: bool = False) -> T | None:
        """Calls the action: a refusal must change nothing, nor a second call if `twice` is set."""
        try:
            answer = action()
        except ResultsDbError:
            assert self.read_rows() == self.rows, "it was refused, and changed something"
            return None
        if twice:
            self.rows = self.read_rows()
            again = action()
            assert again == answer
            assert self.read_rows() == self.rows, "the second time changed something"
        return answer

    def read_rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """All that is in the database."""
        with self.store._db.read() as session:
            return {
                table.name: sorted(map(tuple, session.execute(table.select())), key=repr)
                for table in Base.metadata.sorted_tables
            }

    def trial_ids(self) -> list[int]:
        return sorted(self.states)

    # The driver

    @rule(campaign=INDEX, size=st.integers(1, 5), tp=st.sampled_from([1, 1, 2]))
    def propose(self, campaign: int, size: int, tp: int) -> None:
        layout = Layout(micro_batch_size=size, tp=tp)
        self.act(lambda: self.store.trials.add(self.pick(self.campaigns, campaign), layout))

    @precondition(lambda self: self.states)
    @rule(trial=INDEX)
    def repeat(self, trial: int) -> None:
        self.act(lambda: self.store.trials.repeat(self.pick(self.trial_ids(), trial)))

    @rule(campaign=INDEX)
    def cancel_what_waits(self, campaign: int) -> None:
        chosen = self.pick(self.campaigns, campaign)
        self.act(lambda: self.store.campaigns.cancel_pending(chosen, "budget"))

    @rule(campaign=INDEX, state=st.sampled_from(["COMPLETED", "FAILED"]), really=st.integers(0, 3))
    def end_campaign(self, campaign: int, state: Any, really: int) -> None:
        chosen = self.pick(self.campaigns, campaign)
        if really == 0:
            self.act(lambda: self.store.campaigns.end(chosen, state, "budget", "all done"))

    @rule()
    def driver_beats(self) -> None:
        self.act(lambda: self.store.driver.move_clocks())

    # The user

    @rule()
    def submit(self) -> None:
        if len(self.campaigns) < MAX_CAMPAIGNS:
            cluster = CLUSTERS[len(self.campaigns) % 2]
            name = f"c{len(self.campaigns)}"
            self.campaigns.append(make_campaign(self.store, name, cluster=cluster))

    @rule(campaign=INDEX, action=st.sampled_from(["pause", "resume"]))
    def pause_or_resume(self, campaign: int, action: str) -> None:
        chosen = self.pick(self.campaigns, campaign)
        self.act(lambda: getattr(self.store.campaigns, action)(chosen), twice=True)

    @rule(campaign=INDEX, really=st.integers(0, 3))
    def cancel_campaign(self, campaign: int, really: int) -> None:
        if really == 0:
            chosen = self.pick(self.campaigns, campaign)
            self.act(lambda: self.store.campaigns.cancel(chosen), twice=True)

    @precondition(lambda self: self.states)
    @rule(trial=INDEX, times=st.integers(1, 2))
    def measure_again(self, trial: int, times: int) -> None:
        chosen = self.pick(self.trial_ids(), trial)
        self.act(lambda: self.store.trials.measure_again(chosen, times=times))

    @precondition(lambda self: self.states)
    @rule(trial=INDEX)
    def queue_again(self, trial: int) -> None:
        self.act(lambda: self.store.trials.requeue(self.pick(self.trial_ids(), trial)))

    @precondition(lambda self: self.states)
    @rule(trial=INDEX)
    def cancel_trial(self, trial: int) -> None:
        chosen = self.pick(self.trial_ids(), trial)
        self.act(lambda: self.store.trials.cancel(chosen), twice=True)

    @rule(campaign=INDEX, notes=st.sampled_from(["", "for the paper"]), trials=st.integers(1, 9))
    def change_campaign(self, campaign: int, notes: str, trials: int) -> None:
        chosen = self.pick(self.campaigns, campaign)
        changes = {"notes": notes, "budget": {"trials": trials}}
        self.act(lambda: self.store.campaigns.update(chosen, **changes), twice=True)

    @rule(campaign=INDEX)
    def delete_campaign(self, campaign: int) -> None:
        chosen = self.pick(self.campaigns, campaign)
        of_it = {t["id"] for t in self.table("trials") if t["campaign_id"] == chosen}

        def delete() -> bool:
            self.store.campaigns.delete(chosen)
            return True

        if self.act(delete):
            self.campaigns.remove(chosen)
            self.deleted |= of_it
            self.campaigns.append(make_campaign(self.store, f"after-{chosen}"))

    # Workers

    @rule(name=st.sampled_from(NAMES), cluster=st.sampled_from([CLUSTERS[0], *CLUSTERS]))
    def register(self, name: str, cluster: str) -> None:
        nodes = 2 if name == "large" else 1
        self.sessions.append(
            make_worker(self.store, name, cluster=cluster, num_nodes=nodes, devices_per_node=2).id
        )

    @rule(session=INDEX)
    def drain(self, session: int) -> None:
        self.act(lambda: self.store.workers.drain(self.pick(self.sessions, session)))

    @rule(
        session=INDEX,
        number=st.integers(1, 3),
        devices=st.sampled_from([None, None, 1, 2]),
        longest_s=st.sampled_from([None, None, 1.0]),
    )
    def lease(
        self, session: int, number: int, devices: int | None, longest_s: float | None
    ) -> None:
        room = None if devices is None else RoomBody(nodes=0, devices=devices)
        chosen = self.pick(self.sessions, session)
        leases = self.act(
            lambda: take_leases(self.store, chosen, number, room=room, longest_s=longest_s)
        )
        for lease in leases or ():
            assert lease.layout.num_devices <= (devices or 2)
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(
        lease=INDEX,
        session=INDEX,
        phase=st.sampled_from(ATTEMPT_PHASES),
        held_s=st.sampled_from([None, 0.0, 1.5, 40.0]),
        nodes_held=st.sampled_from([None, 0.25, 1.0]),
    )
    def beat(
        self,
        lease: int,
        session: int,
        phase: AttemptPhase,
        held_s: float | None,
        nodes_held: float | None,
    ) -> None:
        held = self.pick(self.leases, lease)
        beat = BeatBody(
            trial_id=held.trial_id,
            attempt=held.attempt,
            iterations_done=1,
            phase=phase,
            held_s=0.0 if phase == "waiting" else held_s,
            nodes_held=nodes_held,
        )
        chosen = self.pick(self.sessions, session)
        self.act(lambda: send_beats(self.store, chosen, [beat]), twice=True)

    @rule(session=INDEX, idle_node_s=st.integers(0, 50), state=st.sampled_from(["idle", "lost"]))
    def tell_status(self, session: int, idle_node_s: int, state: Any) -> None:
        node = NodeStatusBody(name="n0", state=state, reason="loud" if state == "lost" else "")
        status = StatusBody(idle_node_s=float(idle_node_s), nodes=[node])
        chosen = self.pick(self.sessions, session)
        self.act(lambda: send_beats(self.store, chosen, [], status=status), twice=True)

    # Outcomes: early, late, twice, of anybody

    @precondition(lambda self: self.leases)
    @rule(
        lease=INDEX,
        offset=st.sampled_from([0.0, 0.0, 0.5]),
        iterations_s=st.sampled_from([None, 2.0]),
        duration_s=st.sampled_from([4.0, 4.0, 90.0]),
    )
    def complete(
        self, lease: int, offset: float, iterations_s: float | None, duration_s: float
    ) -> None:
        held = self.pick(self.leases, lease)
        self.serial += 1
        seconds = 0.1 + self.serial / 10_000
        iterations = make_iterations(seconds, timed=TIMED, loss_off=offset)
        outcome = completed(held.layout, iterations=iterations, duration_s=duration_s)
        if self.report(held, outcome, iterations_s):
            self.kept[held.trial_id] = outcome.measurement.tokens_per_s

    @precondition(lambda self: self.leases)
    @rule(
        lease=INDEX,
        reason=st.sampled_from(["crashed", "out_of_memory", "node_lost", "cancelled", "timeout"]),
    )
    def fail(self, lease: int, reason: str) -> None:
        self.report(self.pick(self.leases, lease), failed(reason), None)

    def report(self, held: LeaseRecord, outcome: Outcome, iterations_s: float | None) -> bool:
        """Posts it, twice; whether the store took it, for the first time."""
        key = (held.trial_id, held.attempt)
        receipt = self.act(
            lambda: post_outcome(self.store, *key, outcome, iterations_s=iterations_s), twice=True
        )
        is_too_long = key not in self.reported and self.is_longer_than_its_lease(held, outcome)
        if held.trial_id in self.deleted or is_too_long:
            assert receipt is None
            return False
        assert receipt is not None, "a leased attempt may always say how it ended"
        if key in self.reported:
            return False
        if receipt.accepted:
            self.reported[key] = (outcome, iterations_s)
        return receipt.accepted

    def is_longer_than_its_lease(self, held: LeaseRecord, outcome: Outcome) -> bool:
        """By the clock of the service, unless it was set back to before the lease."""
        rows = {(row["trial_id"], row["attempt"]): row for row in self.table("attempts")}
        began = rows[held.trial_id, held.attempt]["started_at"]
        passed_s = (self.clock.now - began).total_seconds()
        return 0 <= passed_s < outcome.duration_s - CLOCK_MARGIN_S

    @precondition(lambda self: self.leases)
    @rule(lease=INDEX)
    def repeat_an_earlier_report(self, lease: int) -> None:
        held = self.pick(self.leases, lease)
        key = (held.trial_id, held.attempt)
        if key not in self.reported or held.trial_id in self.deleted:
            return
        outcome, took_s = self.reported[key]
        receipt = self.act(lambda: post_outcome(self.store, *key, outcome, iterations_s=took_s))
        assert receipt.accepted, "what was taken once is taken for ever"
        assert self.read_rows() == self.rows, "what was posted again changed something"

    @rule(trial=st.integers(0, 50), attempt=st.integers(4, 9))
    def report_what_never_was(self, trial: int, attempt: int) -> None:
        assert self.act(lambda: post_outcome(self.store, trial, attempt, failed())) is None

    # Time, and who watches it

    @rule(seconds=st.sampled_from([1.0, LEASE_S + 1, 3600.0]))
    def wait(self, seconds: float) -> None:
        self.clock.forward(seconds)

    @rule()
    def sweep(self) -> None:
        self.act(lambda: self.store.leases.expire())

    @rule(seconds=st.sampled_from([1.0, 3600.0]))
    def set_the_clock_back(self, seconds: float) -> None:
        self.clock.forward(-seconds)
        self.act(lambda: self.store.leases.cut())

    @rule()
    def be_away(self) -> None:
        self.clock.forward(3600.0)
        self.act(lambda: self.store.leases.extend())

    # Readers

    @rule()
    def read_everything(self) -> None:
        assert wrong_leaderboards(self.store) == []
        for campaign in self.campaigns:
            record = self.store.campaigns.get(campaign)
            trials = self.store.trials.find(campaign)
            details = [self.store.trials.detail(trial.id) for trial in trials]
            for row in (record, *trials, *(a for d in details for a in d.attempts)):
                assert min(dataclasses.astuple(row.cost)) >= 0
            ended = [trial for trial in trials if trial.ended_seq is not None]
            told = [trial.id for trial in self.store.trials.ended_since(campaign, 0)]
            assert told == [t.id for t in sorted(ended, key=lambda t: t.ended_seq)]
            standings = self.store.leaderboard.ranked_layouts(campaign, record.objective)
            counted = {run for standing in standings for run in standing.trial_ids}
            assert counted == {t.id for t in trials if t.state == "COMPLETED"}

    # What must hold

    @invariant()
    def everything_holds(self) -> None:
        self.rows = self.read_rows()
        assert violations(self.store) == []
        self.states_change_as_they_may()
        self.what_was_accepted_is_kept_and_nothing_else()
        self.whatever_a_page_shows_is_told()
        self.events_retell_what_became_of_everything()

    def found_states(self) -> dict[int, State]:
        return {row["id"]: (row["state"], row["reason"]) for row in self.table("trials")}

    def states_change_as_they_may(self) -> None:
        found = self.found_states()
        assert set(self.states) - set(found) <= self.deleted, "a trial is gone"
        assert not set(found) & self.deleted, "a trial has the id of one that is gone"
        for trial, state in found.items():
            before = self.states.get(trial)
            assert _may_become(before, state), f"trial {trial} went from {before} to {state}"
        self.states = found

    def what_was_accepted_is_kept_and_nothing_else(self) -> None:
        found = {row["trial_id"]: row["tokens_per_s"] for row in self.table("measurements")}
        assert found == {k: v for k, v in self.kept.items() if k not in self.deleted}

    def whatever_a_page_shows_is_told(self) -> None:
        """Pages are not sent again, and watchers hear nothing, while there is no new event."""
        pages, told = self.read_pages(), self.count_events()
        for campaign, page in pages.items():
            if page != self.pages.get(campaign):
                assert told[campaign] > self.told[campaign], f"{campaign} changed in silence"
        self.pages, self.told = pages, told

    def read_pages(self) -> dict[int, list[dict[str, Any]]]:
        """By campaign, what pages show, without sums of cost and time, which no event reports."""
        shown = {row["id"]: [_shown(row)] for row in self.table("campaigns")}
        for trial in self.table("trials"):
            shown[trial["campaign_id"]].append(_shown(trial))
        return shown

    def count_events(self) -> Counter[int]:
        return Counter(row["campaign_id"] for row in self.table("events"))

    def table(self, name: str) -> list[dict[str, Any]]:
        """Its rows, as `read_rows` found them last."""
        columns = Base.metadata.tables[name].columns.keys()
        return [dict(zip(columns, row, strict=True)) for row in self.rows[name]]

    def events_retell_what_became_of_everything(self) -> None:
        trials: dict[int, State] = {}
        campaigns: dict[int, str] = {}
        for row in sorted(self.table("events"), key=lambda row: row["id"]):
            if row["kind"] == "campaign.deleted":
                campaigns.pop(row["campaign_id"], None)
            elif row["trial_id"] is not None:
                trials[row["trial_id"]] = (row["data"]["state"], row["data"]["reason"])
            elif "state" in row["data"]:
                campaigns[row["campaign_id"]] = row["data"]["state"]
        assert trials == self.states
        assert campaigns == {row["id"]: row["state"] for row in self.table("campaigns")}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in _TICKS and not k.endswith("node_seconds")}


_TICKS = ("wall_time_s", "clock_at", "iterations_done", "lease_expires_at", "cancel_requested")


def _may_become(before: State | None, after: State) -> bool:
    if before is None:
        return after == ("PENDING", None)
    if before == after:
        return True
    if before[0] in ("PENDING", "RUNNING"):
        return not (before[0] == "RUNNING" and after == ("FAILED", None))
    verdicts = {("COMPLETED", None), ("FAILED", "diverged")}
    return {before, after} <= verdicts


@contextmanager
def _new_sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield upgraded(Path(folder)).database_url


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database(request: pytest.FixtureRequest) -> NewDatabase:
    if request.param == "postgresql":
        return request.getfixturevalue("empty_databases").lend
    return _new_sqlite


ANY: Final = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
FEW: Final = settings(
    ANY,
    max_examples=6,
    stateful_step_count=30,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
"""The same each time."""
SOME: Final = settings(ANY, max_examples=3, stateful_step_count=40)
MANY: Final = settings(ANY, max_examples=12, stateful_step_count=60)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "how_many",
    [
        pytest.param(FEW, marks=pytest.mark.sqlite_is_enough),
        pytest.param(SOME, marks=pytest.mark.slow),
        pytest.param(MANY, marks=pytest.mark.nightly),
    ],
    ids=["few", "some", "many"],
)
def test_any_order_of_events_gives_a_legal_history(
    new_database: NewDatabase, how_many: settings
) -> None:
    @contextmanager
    def open_stores(clock: Clock) -> Iterator[Sequence[Store]]:
        with (
            new_database() as url,
            closing(Store(url, clock=clock)) as one,
            closing(Store(url, clock=clock)) as another,
        ):
            yield (one, another)

    run_state_machine_as_test(lambda: HistoryMachine(open_stores), settings=how_many)
