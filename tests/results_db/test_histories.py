"""Any order of events gives a legal history."""

import contextlib
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from results_db.allocation_records import ATTEMPT_PHASES, AllocationStatus, AttemptPhase
from results_db.data_dir import DataDir
from results_db.errors import (
    AttemptNotFoundError,
    CampaignStateError,
    TrialDuplicateError,
    TrialNotFoundError,
    TrialStateError,
    WorkerNotFoundError,
    WorkerSupersededError,
)
from results_db.leases import LEASE_S
from results_db.lifecycle import MAX_LOST_ATTEMPTS
from results_db.records import ENDED_TRIAL_STATES, TrialBeat, TrialRecord
from results_db.store import Store
from search_spaces.layout import Layout
from search_spaces.outcome import Outcome
from tests.results_db.factories import (
    TurnableClock,
    completed,
    failed,
    make_campaign,
    make_worker,
)

REFUSALS = (
    AttemptNotFoundError,
    CampaignStateError,
    TrialDuplicateError,
    TrialNotFoundError,
    TrialStateError,
    WorkerNotFoundError,
    WorkerSupersededError,
)
OUTCOMES: dict[str, Callable[[], Outcome]] = {
    "completed": lambda: completed(duration_s=3),
    **{
        reason: lambda reason=reason: failed(reason, duration_s=2)  # type: ignore[misc]
        for reason in ("crashed", "out_of_memory", "node_lost", "cancelled")
    },
}


class Histories(RuleBasedStateMachine):
    """Drivers, workers and users who do whatever they like, in any order."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = TurnableClock()
        self.store = Store.open(DataDir(Path(self.folder.name)), clock=self.clock)
        self.campaign = make_campaign(self.store)
        self.rival = make_campaign(self.store, "rival")
        self.sessions = [make_worker(self.store, "w0").id]
        self.ended: dict[int, TrialRecord] = {}
        self.idle_told: Counter[str] = Counter()
        self.idle_shared = 0

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def attempt(self, action: Callable[[], object]) -> None:
        with contextlib.suppress(REFUSALS):
            action()

    def session(self, index: int) -> str:
        return self.sessions[index % len(self.sessions)]

    @rule(size=st.integers(1, 6))
    def propose(self, size: int) -> None:
        layout = Layout(micro_batch_size=size)
        self.attempt(lambda: self.store.add_trial(self.campaign, layout))

    @rule(trial=st.integers(1, 6))
    def repeat(self, trial: int) -> None:
        self.attempt(lambda: self.store.repeat_trial(trial))

    @rule(name=st.sampled_from(["w0", "w1"]))
    def register(self, name: str) -> None:
        self.sessions.append(make_worker(self.store, name).id)

    @rule(session=st.integers(0, 9))
    def drain(self, session: int) -> None:
        self.attempt(lambda: self.store.drain_worker(self.session(session)))

    @rule(session=st.integers(0, 9), number=st.integers(1, 3))
    def lease(self, session: int, number: int) -> None:
        self.attempt(lambda: self.store.lease(self.session(session), number))

    @rule(
        session=st.integers(0, 9),
        trial=st.integers(1, 6),
        attempt=st.integers(1, 4),
        phase=st.sampled_from([None, *ATTEMPT_PHASES]),
        held_s=st.sampled_from([None, 0.0, 1.5, 40.0]),
        nodes_held=st.sampled_from([None, 0.25, 1.0]),
    )
    def beat(
        self,
        session: int,
        trial: int,
        attempt: int,
        phase: AttemptPhase | None,
        held_s: float | None,
        nodes_held: float | None,
    ) -> None:
        beat = TrialBeat(
            trial_id=trial,
            attempt=attempt,
            iterations_done=1,
            phase=phase,
            held_s=0.0 if phase == "waiting" else held_s,
            nodes_held=nodes_held,
        )
        self.attempt(lambda: self.store.heartbeat(self.session(session), [beat]))

    @rule(session=st.integers(0, 9), idle_node_s=st.integers(0, 50))
    def tell_idle_time(self, session: int, idle_node_s: int) -> None:
        worker = self.session(session)
        status = AllocationStatus(idle_node_s=float(idle_node_s))
        with contextlib.suppress(*REFUSALS):
            for _ in range(2):
                self.store.heartbeat(worker, [], status=status)
            states = [self.store.campaign(c).state for c in (self.campaign, self.rival)]
            if "RUNNING" in states:
                self.idle_shared += max(idle_node_s - self.idle_told[worker], 0)
            self.idle_told[worker] = max(idle_node_s, self.idle_told[worker])

    @rule(seconds=st.sampled_from([1.0, LEASE_S + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.forward(seconds)
        self.store.expire_leases()

    @rule(
        trial=st.integers(1, 6),
        attempt=st.integers(1, 4),
        kind=st.sampled_from(list(OUTCOMES)),
        nodes_held=st.sampled_from([None, 0.05, 0.5, 1.0]),
        iterations_s=st.sampled_from([None, 0.0, 1.0, 99.0]),
    )
    def report(
        self,
        trial: int,
        attempt: int,
        kind: str,
        nodes_held: float | None,
        iterations_s: float | None,
    ) -> None:
        def twice() -> None:
            receipts = [
                self.store.post_outcome(
                    trial,
                    attempt,
                    OUTCOMES[kind](),
                    nodes_held=nodes_held,
                    iterations_s=iterations_s,
                )
                for _ in range(2)
            ]
            assert receipts[0].accepted == receipts[1].accepted

        self.attempt(twice)

    @rule(action=st.sampled_from(["pause_campaign", "resume_campaign"]))
    def steer(self, action: str) -> None:
        self.attempt(lambda: getattr(self.store, action)(self.campaign))

    @rule(really=st.integers(0, 4))
    def cancel(self, really: int) -> None:
        if really == 0:
            self.attempt(lambda: self.store.cancel_campaign(self.campaign))

    @invariant()
    def what_has_ended_stays_as_it_is(self) -> None:
        for trial in self.store.trials(self.campaign):
            if trial.id in self.ended:
                before = self.ended[trial.id]
                assert (trial.state, trial.reason, trial.measurement, trial.ended_seq) == (
                    before.state,
                    before.reason,
                    before.measurement,
                    before.ended_seq,
                )
            elif trial.state in ENDED_TRIAL_STATES:
                self.ended[trial.id] = trial

    @invariant()
    def endings_are_numbered_without_gaps(self) -> None:
        told = self.store.trials_told_since(self.campaign, 0)
        assert [trial.ended_seq for trial in told] == list(range(1, len(told) + 1))

    @invariant()
    def attempts_and_costs_add_up(self) -> None:
        trials = self.store.trials(self.campaign)
        for trial in trials:
            attempts = self.store.trial_detail(trial.id).attempts
            assert [a.attempt for a in attempts] == list(range(1, trial.attempt + 1))
            endings = Counter(a.ending for a in attempts)
            assert endings[None] == (trial.state == "RUNNING")
            if endings[None]:
                assert attempts[-1].ending is None
                assert attempts[-1].worker_id == trial.worker_id
            assert trial.lost_attempts <= MAX_LOST_ATTEMPTS
            assert abs(sum(a.node_seconds for a in attempts) - trial.node_seconds) < 1e-6
        spent = self.store.campaign(self.campaign).node_seconds
        assert abs(sum(trial.node_seconds for trial in trials) - spent) < 1e-6

    @invariant()
    def costs_are_split_without_a_rest(self) -> None:
        trials = self.store.trials(self.campaign)
        attempts = [a for t in trials for a in self.store.trial_detail(t.id).attempts]
        for row in (*trials, *attempts):
            assert min(dataclasses.astuple(row.cost)) >= 0
            assert abs(row.cost.total - row.node_seconds) < 1e-6
        for attempt in attempts:
            if attempt.ending in ("lost", "returned", "superseded"):
                assert attempt.cost.lost == attempt.cost.total
            if attempt.ending is None:
                assert attempt.cost.total == 0
        campaign = self.store.campaign(self.campaign)
        for part in ("iterations", "start", "lost"):
            summed = sum(getattr(trial.cost, part) for trial in trials)
            assert abs(getattr(campaign.cost, part) - summed) < 1e-6
        assert campaign.cost.total > campaign.node_seconds - 1e-6

    @invariant()
    def idle_time_is_shared_once(self) -> None:
        campaigns = [self.store.campaign(c) for c in (self.campaign, self.rival)]
        shares = [campaign.cost.total - campaign.node_seconds for campaign in campaigns]
        assert abs(sum(shares) - self.idle_shared) < 1e-6
        # The rival runs all the time.
        assert shares[0] < shares[1] + 1e-6

    @invariant()
    def an_ended_campaign_has_no_trial_that_waits(self) -> None:
        if self.store.campaign(self.campaign).ended_at is not None:
            assert not self.store.trials(self.campaign, states=("PENDING",))


Histories.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestHistories = Histories.TestCase
