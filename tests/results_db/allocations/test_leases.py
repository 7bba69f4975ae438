from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from benchmarks.service.postgres_server import PostgresServer
from layout_tuner.protocol.states import NodeState
from layout_tuner.protocol.worker_messages import (
    BeatBody,
    HeartbeatReply,
    NodeBody,
    NodeStatusBody,
    RoomBody,
    SetAside,
    StatusBody,
)
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.allocations import leases
from layout_tuner.results_db.allocations.leases import LEASE_S
from layout_tuner.results_db.allocations.node_status import (
    RELEASE_TIME_S,
    keep_quarantine,
    note_quarantines,
)
from layout_tuner.results_db.errors import (
    DatabaseUnavailableError,
    NodeNotFoundError,
    NodeStateError,
    WorkerNotFoundError,
    WorkerSupersededError,
)
from layout_tuner.results_db.models.service_tables import WORKER_ALIVE_S, WorkerRow
from layout_tuner.results_db.records import LeaseRecord, WorkerRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER, simulator_trainer
from tests.kit.postgres import is_anybody_waiting
from tests.kit.store import (
    TurnableClock,
    failed,
    lease_one,
    make_campaign,
    make_worker,
    post_outcome,
    send_beats,
    take_leases,
)
from tests.kit.waiting import wait_until
from tests.results_db.database.test_query_plans import statements_of

pytestmark = pytest.mark.sqlite_is_enough


@pytest.mark.sqlite_is_enough(False)
def test_the_oldest_trial_is_leased_first(
    store: Store, clock: TurnableClock, campaign: int, worker: str
) -> None:
    first, second, *others = (store.trials.add(campaign, Layout(tp=tp)).id for tp in (2, 4, 1, 8))
    lease = lease_one(store, worker)
    assert (lease.trial_id, lease.number, lease.attempt) == (first, 1, 1)
    assert (lease.campaign_name, lease.layout) == ("first", Layout(tp=2))
    assert (lease.lease_expires_at - clock.now).total_seconds() == LEASE_S
    assert lease_one(store, worker).trial_id == second
    assert [lease.trial_id for lease in take_leases(store, worker, 9)] == others
    assert take_leases(store, worker, 1) == []
    running = store.trials.get(first)
    assert (running.state, running.attempt, running.worker_id) == ("RUNNING", 1, worker)
    assert running.started_at == clock.now == store.campaigns.get(campaign).started_at


def test_a_worker_gets_only_what_its_cluster_and_its_allocation_can_run(store: Store) -> None:
    campaign = make_campaign(store, cluster="frontier")
    store.trials.add(campaign, Layout(num_nodes=2, tp=8, dp=2))
    elsewhere = make_worker(store, "a", cluster="perlmutter", num_nodes=9)
    few_nodes = make_worker(store, "b", cluster="frontier", num_nodes=1, devices_per_node=16)
    few_devices = make_worker(store, "c", cluster="frontier", num_nodes=4, devices_per_node=4)
    for worker in (elsewhere, few_nodes, few_devices):
        assert take_leases(store, worker.id, 1) == []
    fitting = make_worker(store, "d", cluster="frontier", num_nodes=2, devices_per_node=8)
    assert lease_one(store, fitting.id).number == 1


def beat(trial_id: int, attempt: int = 1, **said: Any) -> BeatBody:
    return BeatBody(trial_id=trial_id, attempt=attempt, **{"iterations_done": 3, **said})


def lose(store: Store, clock: TurnableClock) -> list[int]:
    clock.forward(LEASE_S + 1)
    return store.leases.expire()


def test_heartbeats_extend_a_lease_and_report_progress_and_an_outage_extends_it_too(
    store: Store, clock: TurnableClock, worker: str, running: int
) -> None:
    for done in range(1, 6):
        clock.forward(LEASE_S - 1)
        told = beat(running, iterations_done=done)
        assert send_beats(store, worker, [told]) == HeartbeatReply(stop=())
        assert store.leases.expire() == []
    assert store.trials.get(running).iterations_done == 5
    clock.forward(3600)  # nobody was there to take a heartbeat
    store.leases.extend()
    assert store.leases.expire() == []
    clock.forward(LEASE_S - 1)
    assert send_beats(store, worker, [beat(running)]) == HeartbeatReply(stop=())
    clock.forward(-100)
    store.leases.extend()
    clock.forward(100 + LEASE_S - 1)
    assert store.leases.expire() == [], "it was not shortened"


def test_a_lost_attempt_queues_its_trial_again(
    store: Store, clock: TurnableClock, campaign: int, running: int
) -> None:
    assert lose(store, clock) == [running]
    assert store.leases.expire() == []
    lost = store.trials.get(running)
    assert (lost.state, lost.reason, lost.attempt, lost.lost_attempts) == ("PENDING", None, 1, 1)
    assert lost.worker_id is None
    assert store.trials.ended_since(campaign, 0) == []


def test_three_lost_attempts_end_a_trial(
    store: Store, clock: TurnableClock, worker: str, running: int
) -> None:
    lose(store, clock)
    for attempt in (2, 3):
        assert lease_one(store, worker).attempt == attempt
        lose(store, clock)
    ended = store.trials.get(running)
    assert (ended.state, ended.reason, ended.ended_seq) == ("FAILED", "node_lost", 1)
    assert "3 attempts were lost" in ended.message
    assert ended.node == "node-1"
    assert "w1 on node-1" in ended.message
    assert take_leases(store, worker, 1) == []


def test_an_attempt_that_waited_for_devices_is_returned_when_its_worker_is_lost(
    store: Store, clock: TurnableClock, worker: str, running: int
) -> None:
    for attempt in range(1, 6):
        send_beats(store, worker, [beat(running, attempt, phase="waiting")])
        assert lose(store, clock) == [running]
        lease_one(store, worker)
    trial = store.trials.get(running)
    assert (trial.attempt, trial.lost_attempts) == (6, 0)
    *ended, _ = store.trials.detail(running).attempts
    assert {each.ending for each in ended} == {"returned"}


def test_a_worker_that_beats_for_a_trial_it_lost_is_told_to_stop(
    store: Store, clock: TurnableClock, campaign: int, worker: str, running: int
) -> None:
    other = make_worker(store, "w2").id
    lose(store, clock)
    assert send_beats(store, worker, [beat(running)]).stop == (running,)
    lease_one(store, other)
    assert send_beats(store, worker, [beat(running)]).stop == (running,)
    assert send_beats(store, other, [beat(running, 2)]) == HeartbeatReply(stop=())
    assert send_beats(store, other, [beat(running, 2), beat(999)]).stop == (999,)
    # So is one whose trial was cancelled, which is not tried again.
    store.campaigns.cancel(campaign)
    assert send_beats(store, other, [beat(running, 2)]).stop == (running,)
    assert store.trials.get(running).state == "RUNNING"
    lose(store, clock)
    trial = store.trials.get(running)
    assert (trial.state, trial.reason) == ("CANCELLED", "cancelled")


def test_a_new_session_returns_the_trials_of_the_last(
    store: Store, worker: str, running: int
) -> None:
    make_worker(store, "w2")
    assert store.trials.get(running).worker_id == worker, "another worker's name is another's"
    now = make_worker(store, "w1").id
    lost = store.trials.get(running)
    assert (lost.state, lost.lost_attempts) == ("PENDING", 1)
    assert lease_one(store, now).attempt == 2
    for call, asked in ((take_leases, 1), (send_beats, [])):
        with pytest.raises(WorkerSupersededError, match="another worker has registered as 'w1'"):
            call(store, worker, asked)


def test_draining_returns_leases_without_a_loss(store: Store, worker: str, running: int) -> None:
    store.workers.drain(worker)
    returned = store.trials.get(running)
    assert (returned.state, returned.attempt, returned.lost_attempts) == ("PENDING", 1, 0)
    assert store.workers.find(cluster="local-cpu") == []
    for gone, why in ((worker, "has ended"), ("nobody", "no worker 'nobody'")):
        with pytest.raises(WorkerNotFoundError, match=why):
            store.workers.drain(gone)


def test_workers_are_there_that_were_heard_of_lately(store: Store, clock: TurnableClock) -> None:
    first = make_worker(store, "a")
    make_worker(store, "b")
    make_worker(store, "c", cluster="frontier")
    assert {worker.name for worker in store.workers.find(cluster="local-cpu")} == {"a", "b"}
    assert store.workers.find(cluster="nowhere") == []
    clock.forward(WORKER_ALIVE_S - 1)
    send_beats(store, first.id, [])
    clock.forward(2)
    assert [worker.name for worker in store.workers.find()] == ["a"]
    assert len(store.workers.find(live=False)) == 3


def test_a_trial_that_no_live_worker_fits_is_too_large(store: Store, clock: TurnableClock) -> None:
    campaign, other = make_campaign(store), make_campaign(store, "other")
    store.trials.add(campaign, Layout(dp=8))
    store.trials.add(campaign, Layout(num_nodes=2, dp=2))
    store.trials.add(campaign, Layout(dp=16))
    store.trials.add(other, Layout(num_nodes=2, dp=4))
    assert store.workers.count_too_large(campaign) == 3
    small = make_worker(store, "small")
    make_worker(store, "elsewhere", cluster="frontier", num_nodes=9, devices_per_node=99)
    assert store.workers.count_too_large(campaign) == 2
    large = make_worker(store, "large", num_nodes=2, devices_per_node=16)
    assert store.workers.count_too_large(campaign) == 0
    clock.forward(WORKER_ALIVE_S + 1)
    take_leases(store, small.id, 1)
    assert store.workers.count_too_large(campaign) == 2
    store.workers.drain(large.id)
    assert (store.workers.count_too_large(campaign), store.workers.count_too_large(other)) == (2, 1)


def test_open_trials_say_what_they_need(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store, num_nodes=2)
    for layout in (Layout(dp=4), Layout(num_nodes=2, dp=16), Layout(dp=2)):
        store.trials.add(campaign, layout)
    lease_one(store, worker.id)
    assert [
        (size.num_nodes, size.num_devices, size.is_waiting)
        for size in store.trials.open_sizes(campaign)
    ] == [(1, 4, False), (2, 16, True), (1, 2, True)]
    post_outcome(store, 1, 1, failed("crashed"))
    assert len(store.trials.open_sizes(campaign)) == 2


def test_a_large_heartbeat_takes_few_statements(store: Store, campaign: int, worker: str) -> None:
    for size in range(1, 41):
        store.trials.add(campaign, Layout(micro_batch_size=size))
    beats = [beat(lease.trial_id) for lease in take_leases(store, worker, 1000)]
    assert len(beats) == 40
    with statements_of(store) as ran:
        send_beats(store, worker, beats)
    assert 0 < len(ran) < 12


@pytest.mark.sqlite_is_enough(False)
def test_a_vain_look_for_work_takes_no_lock(store: Store, campaign: int, worker: str) -> None:
    store.trials.add(campaign, Layout(num_nodes=9, dp=9))
    with store._db.write():  # a writer that does not end
        assert take_leases(store, worker, 1) == []
        assert take_leases(store, worker, 1, room=RoomBody(nodes=0, devices=0)) == []
    assert store.leases.expire() == []


def test_a_worker_gets_the_oldest_trials_of_its_cluster_of_any_campaign(store: Store) -> None:
    clusters = ("frontier", "perlmutter")
    campaigns = [
        make_campaign(store, f"{cluster}-{name}", cluster=cluster)
        for name in ("a", "b")
        for cluster in clusters
    ]
    for size in (1, 2):
        for campaign in campaigns:
            store.trials.add(campaign, Layout(micro_batch_size=size))
    for cluster, trials in zip(clusters, ([1, 3, 5, 7], [2, 4, 6, 8]), strict=True):
        workers = [make_worker(store, f"{cluster}-{n}", cluster=cluster).id for n in range(2)]
        assert [lease_one(store, worker).trial_id for worker in workers * 2] == trials


def add_trials(store: Store, owner: str, num_campaigns: int, num_trials: int) -> None:
    """Campaigns of an owner, each with waiting trials."""
    own = store.by(Actor(name=owner, role="submitter"))
    for number in range(num_campaigns):
        campaign = make_campaign(own, f"{owner}-{number}")
        for size in range(1, num_trials + 1):
            store.trials.add(campaign, Layout(micro_batch_size=size))


def owners_of(store: Store, leases: list[LeaseRecord]) -> list[str]:
    return [lease.campaign_name.split("-")[0] for lease in leases]


@pytest.mark.sqlite_is_enough(False)
def test_four_owners_get_equal_shares_however_many_campaigns_each_has(store: Store) -> None:
    for owner, num_campaigns in (("many", 20), ("few", 2), ("one", 1), ("other", 1)):
        add_trials(store, owner, num_campaigns, 20 // num_campaigns)
    worker = make_worker(store).id
    started: Counter[str] = Counter()
    for _ in range(32):  # one trial runs at a time: only the order of turns makes the shares
        (lease,) = take_leases(store, worker, 1)
        started[lease.campaign_name.split("-")[0]] += 1
        post_outcome(store, lease.trial_id, lease.attempt, failed())
    assert set(started.values()) == {8}


def test_turns_of_owners_count_what_runs_and_leave_no_device_idle(store: Store) -> None:
    add_trials(store, "many", 3, 2)
    worker = make_worker(store).id
    assert owners_of(store, take_leases(store, worker, 3)) == ["many"] * 3
    add_trials(store, "late", 1, 4)
    add_trials(store, "small", 1, 1)
    # Those with nothing running catch up first; who has no more trials leaves the rest.
    first = take_leases(store, worker, 5)
    assert owners_of(store, first) == ["late", "small", "late", "late", "many"]
    assert owners_of(store, take_leases(store, worker, 9)) == ["late", "many", "many"]
    assert take_leases(store, worker, 1) == []


CLUSTER = "local-cpu"


def make_allocation(store: Store, name: str = "w1") -> WorkerRecord:
    return make_worker(store, name, nodes=[NodeBody(name="n1", num_devices=8)])


def show(
    store: Store, worker_id: str, state: NodeState, reason: str = "", *others: NodeStatusBody
) -> HeartbeatReply:
    node = NodeStatusBody(name="n1", state=state, reason=reason)
    return send_beats(store, worker_id, [], status=StatusBody(nodes=[node, *others]))


def quarantined(store: Store, **changes: Any) -> list[str]:
    """Why nodes are set aside for a worker that registers now."""
    later = make_worker(store, "later", **changes)
    found = store.workers.quarantined_nodes(later.id)
    store.workers.drain(later.id)
    return [aside.reason for aside in found]


def test_a_release_is_told_until_the_worker_has_done_it(store: Store, clock: TurnableClock) -> None:
    worker = make_allocation(store)
    with pytest.raises(NodeStateError, match="n1 of cluster local-cpu is not in quarantine"):
        store.allocations.release_node(CLUSTER, "n1")
    assert show(store, worker.id, "quarantined", "slow") == HeartbeatReply(stop=())
    assert quarantined(store) == ["slow"]
    store.allocations.release_node(CLUSTER, "n1")
    assert quarantined(store) == []
    clock.forward(3600)  # the worker was away; nothing was told meanwhile
    for _ in range(3):
        clock.forward(2)
        assert show(store, worker.id, "quarantined", "slow").release == ("n1",)
    assert show(store, worker.id, "checking").release == ()
    assert quarantined(store) == []


@pytest.mark.parametrize("how", ["shown idle first", "failed its check at once", "by a new worker"])
def test_a_released_node_is_set_aside_again(store: Store, clock: TurnableClock, how: str) -> None:
    worker = make_allocation(store)
    show(store, worker.id, "quarantined", "slow")
    store.allocations.release_node(CLUSTER, "n1")
    if how == "shown idle first":
        show(store, worker.id, "idle")
    elif how == "failed its check at once":
        assert show(store, worker.id, "quarantined", "slow").release == ("n1",)
        clock.forward(RELEASE_TIME_S + 1)
    else:
        clock.forward(1)
        worker = make_allocation(store)
    assert show(store, worker.id, "quarantined", "slow again") == HeartbeatReply(stop=())
    assert quarantined(store) == ["slow again"]


def test_every_worker_that_has_the_node_hears_of_a_quarantine(store: Store) -> None:
    first, second = make_allocation(store), make_allocation(store, "w2")
    show(store, first.id, "quarantined", "slow")
    assert show(store, second.id, "idle").quarantine == (SetAside(node="n1", reason="slow"),)
    store.allocations.release_node(CLUSTER, "n1")
    assert show(store, first.id, "idle") == HeartbeatReply(stop=())
    for cluster, node in ((CLUSTER, "n7"), ("elsewhere", "n1")):
        with pytest.raises(NodeNotFoundError, match=f"no allocation of cluster '{cluster}'"):
            store.allocations.release_node(cluster, node)
        with pytest.raises(NodeNotFoundError):
            store.allocations.quarantine_node(cluster, node, "loud")


ALICE, BOB = (Actor(name=name, role="worker") for name in ("alice", "bob"))


def test_what_a_worker_reports_of_a_node_counts_for_workers_of_its_token(store: Store) -> None:
    here, there = store.by(ALICE), store.by(BOB)
    hers, his = make_allocation(here), make_allocation(there, "w2")
    show(here, hers.id, "quarantined", "slow")
    assert show(there, his.id, "idle") == HeartbeatReply(stop=())
    assert quarantined(here) == ["slow"]
    assert quarantined(there) == []
    (node,) = store.allocations.nodes()
    found = (node.quarantine.reason, node.quarantine.reported_by, node.quarantine.scope)
    assert found == ("slow", "alice", "alice")


def test_each_token_keeps_what_its_workers_report_until_a_user_releases_the_node(
    store: Store, clock: TurnableClock
) -> None:
    here, there = store.by(ALICE), store.by(BOB)
    hers, his = make_allocation(here), make_allocation(there, "w2")
    show(here, hers.id, "quarantined", "slow")
    show(there, his.id, "quarantined", "warm")
    (node,) = store.allocations.nodes()
    assert (node.allocation, node.quarantine.reason) == (his.id, "warm")
    store.allocations.release_node(CLUSTER, "n1")
    clock.forward(1)
    assert show(here, hers.id, "quarantined", "slow").release == ("n1",)
    assert show(there, his.id, "idle") == HeartbeatReply(stop=())
    clock.forward(RELEASE_TIME_S + 1)
    show(here, hers.id, "quarantined", "slow again")
    assert show(there, his.id, "idle") == HeartbeatReply(stop=())
    assert store.allocations.nodes()[0].quarantine.reported_by == "alice"


def test_a_user_sets_a_node_aside_for_workers_of_all_tokens(
    store: Store, clock: TurnableClock
) -> None:
    here, there = store.by(ALICE), store.by(BOB)
    hers, his = make_allocation(here), make_allocation(there, "w2")
    show(here, hers.id, "quarantined", "slow")
    show(there, his.id, "idle")
    found = store.by(Actor(name="carol", role="admin")).allocations.quarantine_node(
        CLUSTER, "n1", "loud"
    )
    assert (found.quarantine.reported_by, found.quarantine.scope) == ("carol", "")
    assert show(there, his.id, "idle").quarantine == (SetAside(node="n1", reason="loud"),)
    show(there, his.id, "quarantined", "loud")
    store.allocations.release_node(CLUSTER, "n1")
    for token, worker in ((here, hers), (there, his)):
        assert show(token, worker.id, "quarantined", "loud").release == ("n1",)
    assert show(there, his.id, "checking") == HeartbeatReply(stop=())
    clock.forward(RELEASE_TIME_S + 1)
    # One worker does not follow the order: for the other's token the node stays released.
    show(here, hers.id, "quarantined", "slow")
    assert show(there, his.id, "idle") == HeartbeatReply(stop=())


SIMULATED = {"launcher": SIMULATED_LAUNCHER, "trainers": {simulator_trainer(): "1"}}


@pytest.mark.parametrize("end", ["drain", "remove_allocation", "register"])
def test_the_health_of_simulated_nodes_ends_with_their_worker(store: Store, end: str) -> None:
    nodes = [NodeBody(name="n1", num_devices=8)]
    worker = make_worker(store, "rehearsal", nodes=nodes, **SIMULATED)
    show(store, worker.id, "quarantined", "it has failed")
    assert quarantined(store, **SIMULATED) == []
    assert quarantined(store) == []
    assert store.statistics.service_stats().quarantined_nodes == 0
    (node,) = store.allocations.nodes()
    assert (node.quarantine.scope, node.quarantine.released_at) == (worker.id, None)
    store.allocations.release_node(CLUSTER, "n1")
    assert show(store, worker.id, "quarantined", "it has failed").release == ("n1",)
    show(store, worker.id, "idle")
    show(store, worker.id, "quarantined", "it has failed again")
    if end == "register":
        make_worker(store, "rehearsal", **SIMULATED)
    else:
        getattr(store.workers, end)(worker.id)
    assert store.allocations.nodes() == []


def test_the_last_reason_of_a_quarantine_stands(store: Store, clock: TurnableClock) -> None:
    worker = make_allocation(store)
    show(store, worker.id, "busy")
    first = store.allocations.quarantine_node(CLUSTER, "n1", "loud")
    clock.forward(5)
    again = store.allocations.quarantine_node(CLUSTER, "n1", "very loud")
    assert again.quarantine.since == first.quarantine.since
    assert again.quarantine.reason == "very loud"
    # A heartbeat without a status leaves the last one, and is still told of wishes.
    answer = send_beats(store, worker.id, [])
    assert answer.quarantine == (SetAside(node="n1", reason="very loud"),)
    assert [node.state for node in store.allocations.get(worker.id).nodes] == ["busy"]


def test_a_status_of_a_session_that_has_ended_changes_nothing(store: Store) -> None:
    stale = make_allocation(store)
    now = make_allocation(store)
    with pytest.raises(WorkerSupersededError):
        show(store, stale.id, "quarantined", "slow")
    assert quarantined(store) == []
    (node,) = store.allocations.get(now.id).nodes
    assert node.state == "starting"


def test_nodes_that_join_late_make_room_and_nodes_that_leave_are_forgotten(store: Store) -> None:
    worker = make_allocation(store)
    show(store, worker.id, "busy", "", NodeStatusBody(name="n2", state="idle"))
    allocation = store.allocations.get(worker.id)
    assert [(n.name, n.num_devices) for n in allocation.nodes] == [("n1", 8), ("n2", 8)]
    assert allocation.worker.num_nodes == 2
    show(store, worker.id, "busy")
    assert [n.name for n in store.allocations.get(worker.id).nodes] == ["n1"]


def test_a_thousand_nodes_are_kept_in_the_worker_s_order(store: Store) -> None:
    worker = make_worker(store, num_nodes=1000)
    nodes = [NodeStatusBody(name=f"n{number}", state="idle") for number in range(1000)]
    for state in ("idle", "busy"):
        nodes[500] = NodeStatusBody(name="n500", state=state)  # type: ignore[arg-type]
        send_beats(store, worker.id, [], status=StatusBody(nodes=nodes))
    kept = store.allocations.get(worker.id).nodes
    assert [node.name for node in kept] == [node.name for node in nodes]
    assert kept[500].state == "busy"
    assert store.allocations.get(worker.id).worker.num_nodes == 1000


@pytest.mark.parametrize(("by", "stands"), [("its worker", "slow"), ("a user", "loud")])
def test_a_quarantine_that_another_service_is_just_writing_is_waited_for(
    postgres_server: PostgresServer, postgres_url: str, by: str, stands: str
) -> None:
    # On PostgreSQL alone: SQLite has one writer at a time.
    with closing(Store(postgres_url)) as here, closing(Store(postgres_url)) as there:
        first, second = make_allocation(here).id, make_allocation(there, "w2").id
        slow = NodeStatusBody(name="n1", state="quarantined", reason="slow")
        with ThreadPoolExecutor(1) as pool:
            with here._db.write() as session:
                row = session.get_one(WorkerRow, first)
                if by == "its worker":
                    note_quarantines(session, row, [slow], here.now())
                else:
                    about = {"scope": "", "reported_by": "x", "requested_by_user": True}
                    keep_quarantine(session, CLUSTER, "n1", "slow", here.now(), **about)
                done = (
                    pool.submit(show, there, second, "quarantined", "loud")
                    if by == "its worker"
                    else pool.submit(there.allocations.quarantine_node, CLUSTER, "n1", "loud")
                )
                wait_until(
                    "the other one waits", lambda: is_anybody_waiting(postgres_server, postgres_url)
                )
            done.result(30)
        assert quarantined(here) == [stands]


@pytest.mark.sqlite_is_enough(False)
@pytest.mark.parametrize("step", ["lock_rows", "_write_attempts"])
def test_a_lease_whose_connection_is_killed_is_given_once(
    store: Store, campaign: int, worker: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not store.is_shared:
        pytest.skip("a file has no connection to lose")
    trial = store.trials.add(campaign, Layout()).id
    work = getattr(leases, step)

    def killed(session: Session, *rest: Any) -> Any:
        backend = session.scalar(select(func.pg_backend_pid()))
        with store._db.read() as other:
            assert other.scalar(select(func.pg_terminate_backend(backend, 5000)))
        return work(session, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(leases, step, killed)
        with pytest.raises(DatabaseUnavailableError, match="cannot be used: "):
            take_leases(store, worker, 1)
    waiting = store.trials.get(trial)
    assert (waiting.state, waiting.attempt, waiting.worker_id) == ("PENDING", 0, None)
    lease = lease_one(store, worker)
    assert (lease.trial_id, lease.attempt) == (trial, 1)
    assert post_outcome(store, trial, 1, failed("crashed")).accepted
    assert [each.ending for each in store.trials.detail(trial).attempts] == ["reported"]
