"""Simulated workers: the workers of one simulated machine, in one process with one event queue.

Each worker has a session, an allocation, a packer and a roster of its own, and does what any worker
does: it leases, packs, checks nodes, runs a probe again elsewhere, posts. But its clock is
simulated, and all of them share it. One thread moves the clock from the end of one probe to the
next, and posts the outcomes in that order.

The clock stands still while the service has something to answer that comes before the next end:
outcomes that are being posted, nodes that are being checked, and the driver's next trials where
they are late. So the driver's real seconds cost next to no simulated ones. The driver keeps as many
nodes busy as there are, and one trial ahead (`tuner.driver.open_trial_target`); it is late while
no trial waits and the open ones leave more nodes free than `_LEAST_OPEN` allows. A driver that has
no further trial sends none. Each empty answer halves the next wait.

A worker asks for a trial when one of its probes ends, and not ahead: no device waits meanwhile. So
trials wait at the service until some worker has room. A few workers lease one ahead nevertheless,
and keep devices for it, for a large one would never fit otherwise.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Final

from layout_tuner.documents.limits import visible_line
from layout_tuner.errors import LayoutTunerError
from layout_tuner.protocol.outcome import MAX_MESSAGE_LENGTH, FailureReason, Outcome
from layout_tuner.protocol.worker_messages import WorkerCreate
from layout_tuner.units import SECONDS_PER_HOUR
from layout_tuner.workers.errors import ServiceUnreachableError
from layout_tuner.workers.launchers.simulated import SimulatedLauncher, TimedOutcome
from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.packing.topology import Topology
from layout_tuner.workers.ranks.rank_task import Device
from layout_tuner.workers.service.lease_client import LeaseClient
from layout_tuner.workers.worker.events import (
    DrainAsked,
    EndMoved,
    HeartbeatAnswered,
    LeaseAnswered,
    ProbeEnded,
    WorkerEvent,
)
from layout_tuner.workers.worker.heartbeat import Heartbeat, News
from layout_tuner.workers.worker.held_trial import HeldTrial, ProbeProgress
from layout_tuner.workers.worker.leasing import MOST_WAITING, Leasing
from layout_tuner.workers.worker.node_health import PRECISIONS, HealthReport
from layout_tuner.workers.worker.outcome_posting import Outbox, Posting
from layout_tuner.workers.worker.roster import NodeRoster
from layout_tuner.workers.worker.scheduler import Scheduler, SchedulerOptions
from layout_tuner.workers.worker.trial_book import TrialBook
from layout_tuner.workers.worker.worker import (
    Drain,
    DrainRequested,
    unregister,
    warn_of_too_much_power,
)

_LOG = logging.getLogger(__name__)

_POST_WITHIN_S: Final = 10.0
_LEAVE_LEASING_WITHIN_S: Final = 1.0

_TICK_S: Final = 1.0
"""Real seconds after which every worker takes a step although nothing has happened."""
_BLOCKED_WAIT_S: Final = 0.2
_STALLED_WAIT_S: Final = 0.05
_STALLED_STEP_S: Final = 1.0
"""Simulated seconds that pass after so many real ones while trials are held and none runs."""

_MOST_PATIENCE_S: Final = 10.0
_LEAST_PATIENCE_S: Final = 0.5
"""Limits of the real seconds for which a late driver is waited for, while it answers."""
_PATIENCE: Final = 2.0
"""The wait for the next trial, as a multiple of the wait for the last one."""
_PATIENCE_DECAY: Final = 0.8
"""Smallest factor by which one trial changes the wait for the next."""
_LEAST_OPEN: Final = 0.99
"""Share of the nodes that open trials must need, or else the clock stands."""
_LONGEST_ASK_S: Final = 5.0
_WORKERS_PER_TRIAL_AHEAD: Final = 16
"""One worker of this many may lease a trial ahead."""


class SimulatedClock:
    """Simulated seconds since the workers began. Their thread moves it; any thread reads it."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def move_to(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)


class SimulatedProgress(ProbeProgress):
    """The progress of a simulated probe by now."""

    def __init__(self, run: TimedOutcome, clock: SimulatedClock) -> None:
        super().__init__()
        self._run = run
        self._clock = clock

    @property
    def iterations_done(self) -> int:
        return self._run.iterations_done(self._clock())

    @property
    def iterations_s(self) -> float:
        return sum(self._run.steps_s[: self.iterations_done])


@dataclass(kw_only=True, eq=False, slots=True)
class _SimulatedWorker:
    """One of the workers, to which events are sent; the counts are as of its last step."""

    queue: SimpleQueue[tuple[_SimulatedWorker | None, WorkerEvent]]
    """The events of all workers."""
    identity: WorkerCreate
    launcher: SimulatedLauncher
    heartbeat: Heartbeat = field(init=False)
    leasing: Leasing = field(init=False)
    roster: NodeRoster = field(init=False)
    trials: TrialBook = field(init=False)
    scheduler: Scheduler = field(init=False)
    ends: dict[HeldTrial, int] = field(default_factory=dict)
    """By running trial, the number of its end in the order of simulated time."""
    num_waiting: int = 0
    open_nodes: float = 0.0
    largest_open: float = 0.0
    smallest_open: int = 0
    """Devices of the smallest of its trials."""
    devices: int = 0
    devices_used: int = 0

    def put(self, event: WorkerEvent, /) -> None:
        self.queue.put((self, event))

    def count(self) -> None:
        """Counts trials and devices."""
        trials, size = self.trials.held, self.identity.devices_per_node
        shares = self.trials.packer.share_nodes
        nodes = [
            min(each.request.layout.num_devices / size, 1.0)
            if shares and each.request.layout.num_nodes == 1
            else float(each.request.layout.num_nodes)
            for each in trials
        ]
        running = [each.request.layout.num_devices for each in trials if each.is_running]
        self.num_waiting = len(trials) - len(running)
        self.open_nodes, self.largest_open = sum(nodes), max(nodes, default=0.0)
        self.smallest_open = min((each.request.layout.num_devices for each in trials), default=0)
        self.devices_used = sum(running)
        self.devices = sum(self.roster.sizes(self.roster.usable()))

    @property
    def devices_free(self) -> int:
        return self.devices - self.devices_used


@dataclass(kw_only=True, slots=True)
class _Use:
    """Simulated device-seconds, while trials waited for devices and in all."""

    waited: float = 0.0
    used_while_waited: float = 0.0
    there: float = 0.0
    used: float = 0.0

    def add(self, members: Sequence[_SimulatedWorker], seconds: float) -> None:
        there = seconds * sum(each.devices for each in members)
        used = seconds * sum(each.devices_used for each in members)
        self.there += there
        self.used += used
        if any(each.num_waiting for each in members):
            self.waited += there
            self.used_while_waited += used

    @property
    def words(self) -> str:
        waited = self.used_while_waited / self.waited if self.waited else 1.0
        share = self.used / self.there if self.there else 0.0
        return f"{waited:.1%} of the devices' time was used while trials waited, {share:.1%} in all"


class _Patience:
    """How many real seconds the workers wait for the driver."""

    def __init__(self) -> None:
        self._seconds = _MOST_PATIENCE_S
        self._since = time.monotonic()
        self._is_over = False

    def began(self) -> None:
        """The driver has something new to react to."""
        self._since, self._is_over = time.monotonic(), False

    def answered(self) -> None:
        """A trial has come: a longer wait counts at once, a shorter one little by little."""
        waited_s = _PATIENCE * (time.monotonic() - self._since)
        longest_s = max(waited_s, _PATIENCE_DECAY * self._seconds, _LEAST_PATIENCE_S)
        self._seconds = min(longest_s, _MOST_PATIENCE_S)
        self.began()

    @property
    def left_s(self) -> float:
        """Seconds to wait from now."""
        if self._is_over:
            return 0.0
        left = self._since + self._seconds - time.monotonic()
        if left <= 0:
            self._is_over = True
            self._seconds /= 2
        return max(left, 0.0)


@dataclass(kw_only=True)
class SimulatedWorkers:
    """Runs simulated workers until they are signalled to end, or their allocations end.

    The thread that calls `run` owns all state. Two other threads a worker lease and send
    heartbeats, and two in all store and post outcomes.
    """

    client: LeaseClient
    workers: Sequence[tuple[WorkerCreate, SimulatedLauncher]]
    """How each registers, and its nodes."""
    clock: SimulatedClock
    """The clock of the launchers."""
    outbox: Outbox
    drain: Drain
    options: SchedulerOptions
    end_when_idle_s: float | None = None
    """Real seconds without a trial after which the workers end; None: never."""
    time_scale: float = 0.0
    """Real seconds that a simulated second takes; 0: as few as possible."""
    time_left_s: float | None = None
    """Simulated seconds until the allocations end; None: they do not."""

    def __post_init__(self) -> None:
        self._queue: SimpleQueue[tuple[_SimulatedWorker | None, WorkerEvent]] = SimpleQueue()
        self._members: list[_SimulatedWorker] = []
        self._moved: set[_SimulatedWorker] = set()
        """Workers that have a step to take."""
        self._asking: set[_SimulatedWorker] = set()
        """Those of them that ask for a trial afterwards."""
        self._ends: list[tuple[float, int, _SimulatedWorker, HeldTrial, Outcome]] = []
        """The ends of probes, in the order of simulated time; those that were stopped, too."""
        self._order = count()
        self._patience = _Patience()
        self._use = _Use()
        self._num_ended = 0
        self._ticked_at = self._paced_at = self._busy_at = time.monotonic()

    def run(self, *, patience_s: float) -> None:
        """Works until all must end; then the leases are returned.

        It waits `patience_s` for a service that does not answer at the start.

        Raises:
            WorkerError: a worker can't go on; the leases have been returned where possible.
        """
        posting = Posting(self.outbox)
        try:
            for identity, launcher in self.workers:
                self._begin(identity, launcher, posting, patience_s)
            warn_of_too_much_power(self.client)
            self._serve(posting)
        except DrainRequested:
            _LOG.info("ending: asked to, before anything ran")
        finally:
            self._leave(posting)

    def _begin(
        self,
        identity: WorkerCreate,
        launcher: SimulatedLauncher,
        posting: Posting,
        patience_s: float,
    ) -> None:
        registration = self.client.register_patiently(
            identity, patience_s=patience_s, sleep=self.drain.sleep
        )
        _LOG.info("registered as %s (%s)", identity.name, registration.worker_id)
        member = _SimulatedWorker(queue=self._queue, identity=identity, launcher=launcher)
        member.heartbeat = Heartbeat(
            self.client,
            # As seldom as leases allow: there may be many workers of many nodes.
            interval_s=max(registration.heartbeat_interval_s, registration.lease_s / 4),
            news=News(worker_id=registration.worker_id, clock=self.clock),
            events=member,
        )
        member.leasing = Leasing(
            client=self.client,
            identity=identity,
            worker_id=registration.worker_id,
            events=member,
            catch_up=posting.catch_up,
        )
        member.roster = NodeRoster(
            launcher,
            Packer(share_nodes=self.options.share_nodes),
            member,
            check=lambda nodes, *_: {node: _health_of(launcher, node) for node in nodes},
            topology=Topology.of(launcher.machine.cluster),
        )
        member.trials = TrialBook(
            start_probe=partial(self._start, member),
            roster=member.roster,
            posting=posting,
            clock=self.clock,
            is_simulated=True,
            signal_within_s=0.0,
        )
        member.scheduler = Scheduler(
            trials=member.trials,
            leasing=member.leasing,
            registration=registration,
            options=self.options,
        )
        if self.time_left_s is not None:
            member.scheduler.take(EndMoved(ends_at=self.time_left_s))
        self._members.append(member)
        self._moved.add(member)

    def _serve(self, posting: Posting) -> None:
        self.drain.on_request = lambda: self._queue.put((None, DrainAsked()))
        if self.drain.requested:
            self._take(None, DrainAsked())
        while not all(member.scheduler.has_ended for member in self._members):
            self._advance()
            wait_s = self._blocked_s(posting)
            if wait_s is None:
                wait_s = self._step()
            else:
                self._paced_at = time.monotonic()  # the clock stands
            self._wait(wait_s)
        _LOG.info(
            "simulated %.4g h with %d probes: %s",
            self.clock() / SECONDS_PER_HOUR,
            self._num_ended,
            self._use.words,
        )
        failures = [each.scheduler.failure for each in self._members if each.scheduler.failure]
        if failures:
            raise failures[0]

    def _leave(self, posting: Posting) -> None:
        for member in self._members:
            member.roster.close()
            member.heartbeat.end()
        posting.close(_POST_WITHIN_S)
        for member in self._members:
            member.leasing.close(0)
            unregister(self.client, member.leasing.worker_id)
        for member in self._members:
            # The service ends the long poll with the session.
            member.leasing.close(_LEAVE_LEASING_WITHIN_S)

    # Real events.

    def _wait(self, seconds: float) -> None:
        """Waits for an event of the service, and takes all that have come."""
        try:
            self._take(*self._queue.get(block=seconds > 0, timeout=seconds or None))
            while not self._queue.empty():
                self._take(*self._queue.get())
        except Empty:
            return

    def _take(self, member: _SimulatedWorker | None, event: WorkerEvent) -> None:
        if member is None:
            for each in self._members:
                each.scheduler.take(event)
            self._moved.update(self._members)
            return
        member.scheduler.take(event)
        if isinstance(event, LeaseAnswered):
            if event.lease is None:
                return
            self._patience.answered()
            self._asking.add(member)
        if isinstance(event, HeartbeatAnswered) and not any(
            (event.answer.stop, event.answer.release, event.answer.quarantine)
        ):
            return
        self._moved.add(member)
        if member.scheduler.failure is not None:
            self._queue.put((None, DrainAsked()))

    def _ask_after(self, member: _SimulatedWorker) -> None:
        """Requests a trial for a worker or, where it has no room, for the freest one.

        Room is for the smallest trial that is open anywhere.
        """
        sizes = [each.smallest_open for each in self._members if each.open_nodes]
        least = min(sizes, default=0)
        asker = member if member.devices_free >= least else self._freest
        if asker.devices_free >= least or self._may_lease_ahead(asker):
            self._ask(asker, 0.0)

    def _ask(self, member: _SimulatedWorker, wait_s: float) -> bool:
        """Requests a trial that fits, or any where one may be leased ahead; whether it did."""
        return member.scheduler.ask(wait_s=wait_s, ahead=self._may_lease_ahead(member))

    @property
    def _freest(self) -> _SimulatedWorker:
        return max(self._members, key=lambda each: each.devices_free)

    def _advance(self) -> None:
        """Takes the steps of all workers for which something has happened."""
        now = time.monotonic()
        if now >= self._ticked_at + _TICK_S:
            self._ticked_at = now
            self._moved.update(self._members)
        while self._moved:
            member = self._moved.pop()
            member.scheduler.advance()
            self._end_stopped(member)
            member.count()
            member.heartbeat.news = member.scheduler.news()
            if member.open_nodes:
                self._busy_at = now
        for member in self._asking:
            if member.num_waiting < MOST_WAITING:
                self._ask_after(member)
        self._asking.clear()
        idle_s = self.end_when_idle_s
        if idle_s is not None and now >= self._busy_at + idle_s:
            for member in self._members:
                member.scheduler.drain(f"there has been no trial for {idle_s:g} s")

    # Simulated events.

    def _start(self, member: _SimulatedWorker, trial: HeldTrial) -> None:
        """Simulates the probe of a trial that has devices, and notes its end."""
        now, lease = self.clock(), trial.lease
        drawn = (trial.request.simulation_seed, lease.number, lease.attempt, len(trial.runs))
        run_seed = int.from_bytes(hashlib.sha256(repr(drawn).encode()).digest()[:4])
        try:
            run = member.launcher.run(trial.request, trial.placement, run_seed=run_seed)
        except Exception as error:  # the other probes go on
            _LOG.error("the simulator failed with %s", trial.title, exc_info=error)
            message = visible_line(f"the simulator failed: {error}", MAX_MESSAGE_LENGTH)
            is_known = isinstance(error, LayoutTunerError)
            reason: FailureReason = "unsupported" if is_known else "crashed"
            outcome = Outcome(state="failed", reason=reason, message=message)
            run = TimedOutcome(outcome=outcome, ends_at=now, steps_end_at=(), steps_s=())
        trial.progress = SimulatedProgress(run, self.clock)
        order = member.ends[trial] = next(self._order)
        heapq.heappush(self._ends, (max(run.ends_at, now), order, member, trial, run.outcome))

    def _end_stopped(self, member: _SimulatedWorker) -> None:
        """Ends the running probes that must end now."""
        for trial in [each for each in member.ends if each.stop.is_set()]:
            outcome = Outcome(
                state="cancelled",
                reason="cancelled",
                message="the simulated probe was stopped",
                duration_s=self.clock() - trial.started_at,
            )
            self._end(member, trial, outcome)

    def _end(self, member: _SimulatedWorker, trial: HeldTrial, outcome: Outcome) -> None:
        del member.ends[trial]
        self._num_ended += 1
        member.scheduler.take(ProbeEnded(trial=trial, outcome=outcome))
        self._moved.add(member)
        self._asking.add(member)
        self._patience.began()

    def _blocked_s(self, posting: Posting) -> float | None:
        """How long to wait for the service before the clock moves on; None: not at all."""
        if self._moved:
            return 0.0
        if not any(each.open_nodes for each in self._members):
            return None
        if not posting.has_caught_up:
            try:
                posting.catch_up(_BLOCKED_WAIT_S)
            except ServiceUnreachableError:
                return _BLOCKED_WAIT_S
            self._patience.began()
            return 0.0
        if any(e.roster.is_in_motion or e.scheduler.is_requesting for e in self._members):
            return _BLOCKED_WAIT_S
        left_s = self._patience.left_s if self._is_driver_late() else 0.0
        freest, wait_s = self._freest, min(left_s, _LONGEST_ASK_S)
        is_asked = wait_s > 0 and freest.devices_free > 0 and self._ask(freest, wait_s)
        return _BLOCKED_WAIT_S if is_asked else None

    def _is_driver_late(self) -> bool:
        """Whether no trial waits, and the open ones, without the largest, leave nodes free."""
        if any(each.num_waiting for each in self._members):
            return False
        open_nodes = sum(each.open_nodes for each in self._members)
        largest = max(each.largest_open for each in self._members)
        # The driver does not supply nodes that are lost or in quarantine.
        num_nodes = sum(each.devices / each.identity.devices_per_node for each in self._members)
        return open_nodes - largest < _LEAST_OPEN * num_nodes

    def _may_lease_ahead(self, member: _SimulatedWorker) -> bool:
        """Whether a worker may lease a trial for which it has no devices yet."""
        num_ahead = sum(each.num_waiting > 0 for each in self._members)
        return not member.num_waiting and num_ahead * _WORKERS_PER_TRIAL_AHEAD < len(self._members)

    def _step(self) -> float:
        """Moves the clock to the next end, as far as real time allows; returns how long to wait."""
        while self._ends and self._ends[0][2].ends.get(self._ends[0][3]) != self._ends[0][1]:
            heapq.heappop(self._ends)  # it was stopped
        if not self._ends:
            return self._stand()
        (ends_at, _, member, trial, outcome), now = self._ends[0], time.monotonic()
        passed_s, self._paced_at = now - self._paced_at, now
        at_s = ends_at
        if self.time_scale:
            at_s = min(at_s, self.clock() + min(passed_s, _TICK_S) / self.time_scale)
        self._move_to(at_s)
        if at_s < ends_at:
            self._moved.update(self._members if self.time_left_s else ())
            return min((ends_at - at_s) * self.time_scale, _BLOCKED_WAIT_S)
        heapq.heappop(self._ends)
        self._end(member, trial, outcome)
        return 0.0

    def _stand(self) -> float:
        """No probe runs: time passes for trials that wait, and to the end of the allocations."""
        now = time.monotonic()
        passed_s, self._paced_at = now - self._paced_at, now
        if any(each.num_waiting for each in self._members):
            self._move_to(self.clock() + _STALLED_STEP_S)
            self._moved.update(self._members)
            return _STALLED_WAIT_S
        if self.time_left_s is not None:
            self._move_to(self.clock() + min(passed_s, _TICK_S) / (self.time_scale or 1.0))
        if not any(each.scheduler.is_requesting for each in self._members):
            self._ask(self._freest, _LONGEST_ASK_S)
        return _TICK_S

    def _move_to(self, at_s: float) -> None:
        self._use.add(self._members, at_s - self.clock())
        self.clock.move_to(at_s)


def _health_of(launcher: SimulatedLauncher, node: int) -> HealthReport:
    """What a health check shows of a simulated node: how slow it is, or that it is lost."""
    cluster, peaks = launcher.machine.cluster, launcher.machine.cluster.peak_flops_per_s
    device: Device = "cpu" if cluster.has_cpu_devices else "cuda"
    size, memory_bytes = cluster.devices_per_node, cluster.device_memory_bytes
    if launcher.is_lost(node):
        return HealthReport(device=device, num_devices=size, failure="it has failed")
    rate = peaks.get(PRECISIONS[device], max(peaks.values())) / 1e12 / launcher.slowness(node)
    return HealthReport(
        device=device,
        num_devices=size,
        num_devices_seen=size,
        memory_bytes=memory_bytes,
        memory_free_bytes=memory_bytes,
        gemm_tflops=(rate,) * size,
        peak_tflops=rate,
        peak_source=f"simulated ({cluster.name})",
    )
