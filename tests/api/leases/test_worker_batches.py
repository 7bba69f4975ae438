"""What workers are answered in batches, each for itself, and what they are told to beat."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from layout_tuner.api.leases.worker_batches import Batcher, WorkerBatches
from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions.belief.step_time_to_beat import stop_above_s
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.predictions.statistics.run_spread import RunSpread
from layout_tuner.protocol.worker_messages import LeaseRead, LeaseRequest
from layout_tuner.results_db.allocations.leases import LeaseAsk
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.records import WorkerRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from tests.kit.api import CAMPAIGN, CLUSTER, Api
from tests.kit.store import make_campaign, make_worker, run_trial
from tests.results_db.database.test_query_plans import statements_of

Answers = list[int | BaseException]


class Work:
    """Doubles numbers and refuses negative ones; each batch waits until it may go on."""

    def __init__(self, *, waits: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.goes_on = threading.Event()
        if not waits:
            self.goes_on.set()

    def __call__(self, asks: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(asks))
        assert self.goes_on.wait(30), "nobody said to go on"
        if 0 in asks:
            raise ZeroDivisionError("the batch broke")
        return [ValueError(f"no {ask}") if ask < 0 else 2 * ask for ask in asks]


async def settled(tasks: Sequence[asyncio.Task[int]]) -> Answers:
    async with asyncio.timeout(30):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def busy(most: int, *asks: int, cancelled: int | None = None) -> tuple[Answers, Work]:
    """Answers of a first call, of 1, and of calls that come while it is at work."""
    work = Work(waits=True)
    batcher: Batcher[int, int] = Batcher(work, most=most)
    tasks = [asyncio.create_task(batcher.ask(1))]
    while not work.batches:
        await asyncio.sleep(0)
    tasks += [asyncio.create_task(batcher.ask(ask)) for ask in asks]
    await asyncio.sleep(0)  # all have asked by then
    if cancelled is not None:
        tasks[cancelled].cancel()
        await asyncio.sleep(0)
    work.goes_on.set()
    return await settled(tasks), work


def test_calls_during_a_batch_form_the_next_batches_and_fail_alone_or_with_their_batch() -> None:
    answers, work = asyncio.run(busy(3, 2, 3, 4, 5, 6))
    assert answers == [2, 4, 6, 8, 10, 12]
    assert work.batches == [[1], [2, 3, 4], [5, 6]]
    (first, second, refused, last), _ = asyncio.run(busy(8, 2, -3, 4))
    assert (first, second, str(refused), last) == (2, 4, "no -3", 8)
    (first, second, third, last), _ = asyncio.run(busy(2, 2, 0, 4))
    assert (first, last) == (2, 8)
    assert [type(each) for each in (second, third)] == [ZeroDivisionError] * 2


@pytest.mark.parametrize("cancelled", [0, 1], ids=["at work", "waiting"])
def test_a_cancelled_call_does_not_affect_its_batch(cancelled: int) -> None:
    answers, _ = asyncio.run(busy(8, 2, 3, cancelled=cancelled))
    assert isinstance(answers.pop(cancelled), asyncio.CancelledError)
    assert answers == ([4, 6] if cancelled == 0 else [2, 6])


def test_a_batch_gathers_more_calls_after_one_of_several_until_it_is_full() -> None:
    async def asked_apart(work: Work) -> Answers:
        batcher = Batcher(work, most=8, gather_s=0.2)
        together = [asyncio.create_task(batcher.ask(ask)) for ask in (1, 2)]
        answers = await settled(together)
        apart = [asyncio.create_task(batcher.ask(3))]
        await asyncio.sleep(0)
        apart.append(asyncio.create_task(batcher.ask(4)))
        return answers + await settled(apart)

    async def asked_together(work: Work) -> Answers:
        batcher = Batcher(work, most=2, gather_s=3600.0)
        return await settled([asyncio.create_task(batcher.ask(ask)) for ask in range(1, 7)])

    work = Work()
    assert asyncio.run(asked_apart(work)) == [2, 4, 6, 8]
    assert work.batches == [[1, 2], [3, 4]]
    work = Work()
    assert asyncio.run(asked_together(work)) == [2, 4, 6, 8, 10, 12]
    assert work.batches == [[1, 2], [3, 4], [5, 6]]
    work = Work()
    assert asyncio.run(Batcher(work, most=8).ask(3)) == 6, "a single call is not delayed"
    assert work.batches == [[3]]


LAYOUT = Layout(num_microbatches=8)


def submit(store: Store) -> int:
    """A campaign on the cluster of the factories' workers."""
    spec = CampaignSpec.from_mapping(CAMPAIGN)
    return store.campaigns.create(spec.to_mapping(), num_legal_layouts=4).id


def lease_for_each(store: Store, *workers: WorkerRecord) -> list[list[LeaseRead] | BaseException]:
    """What workers are answered that ask at the same time, for a trial each."""

    async def ask() -> list[list[LeaseRead] | BaseException]:
        batches = WorkerBatches.of(store)
        asks = [LeaseAsk(worker_id=worker.id, request=LeaseRequest()) for worker in workers]
        return await asyncio.gather(*map(batches.leases.ask, asks), return_exceptions=True)

    return asyncio.run(ask())


def test_leasing_reads_no_runs(store: Store) -> None:
    campaign, worker = submit(store), make_worker(store)
    run_trial(store, campaign, LAYOUT, worker=worker.id)
    trial = store.trials.add(campaign, OTHER)
    with statements_of(store) as ran:
        (leases,) = lease_for_each(store, worker)
    assert [(lease.trial_id, lease.attempt) for lease in leases] == [(trial.id, 1)]
    assert leases[0].request["stop_above_step_time_s"] > 0
    assert [sql for sql, _ in ran if "measurements" in sql or "iterations." in sql] == []


def test_an_outcome_is_accepted_although_what_to_beat_is_not_computed(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    campaign, worker = submit(store), make_worker(store)

    def gone(_campaign_id: int) -> None:
        raise DatabaseUnavailableError("the server has gone")

    with monkeypatch.context() as without, caplog.at_level(logging.WARNING):
        without.setattr(store.leaderboard, "to_beat", gone)
        run_trial(store, campaign, LAYOUT, worker=worker.id)
    assert "the server has gone" in caplog.text
    assert store.trials.by_number(campaign, 1).state == "COMPLETED"
    store.trials.add(campaign, OTHER)
    (leases,) = lease_for_each(store, worker)
    assert leases[0].request["stop_above_step_time_s"] is None


def test_an_unreadable_campaign_does_not_affect_leases_of_others(store: Store) -> None:
    broken = store.trials.add(make_campaign(store, "no-space"), LAYOUT)
    sound = store.trials.add(submit(store), LAYOUT)
    answers = lease_for_each(store, make_worker(store, "w1"), make_worker(store, "w2"))
    assert store.trials.get(broken.id).state == "RUNNING"
    (refused,) = (answer for answer in answers if isinstance(answer, SearchSpaceError))
    assert "space" in str(refused)
    (leases,) = (answer for answer in answers if isinstance(answer, list))
    assert [lease.trial_id for lease in leases] == [sound.id]


BEST = Layout(num_microbatches=8)
OTHER = Layout(tp=2, num_microbatches=8)
TOKENS = 8 * 128
"""Tokens a step: tiny has sequences of 128, and the batch is 8."""
TWO = ["tokens_per_s", "memory_headroom"]


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    return module_api


class Leased:
    """A campaign on a cluster of its own, with a worker."""

    def __init__(self, api: Api, name: str, **changes: Any) -> None:
        self.api, self.name = api, name
        cluster = {**CLUSTER, "name": name}
        self.id = api.submit(name=name, cluster=cluster, **changes)["id"]
        self.worker = api.register(cluster=name)

    def measure(self, layout: Layout, tokens_per_s: float = 1024.0, **changes: Any) -> int:
        changes["tokens_per_s"] = tokens_per_s
        return self.api.complete(self.worker, self.name, layout, **changes)

    def request(self, layout: Layout, fidelity: Fidelity | None = None) -> dict[str, Any]:
        """What the worker is asked to run of a new trial."""
        self.api.store.trials.add(self.id, layout, fidelity=fidelity)
        return self.api.lease(self.worker)["request"]

    def to_beat(self, layout: Layout = OTHER) -> float | None:
        return self.request(layout)["stop_above_step_time_s"]


def test_the_first_probe_a_repeat_a_baseline_and_a_cheap_probe_have_no_step_time_to_beat(
    api: Api,
) -> None:
    assert Leased(api, "first").to_beat() is None
    leased = Leased(api, "compared", baseline=OTHER.to_mapping())
    leased.measure(BEST)
    assert leased.to_beat(OTHER) is None
    leased = Leased(api, "again")
    trial = leased.measure(OTHER, 10.0)
    leased.measure(BEST)
    api.store.trials.repeat(trial)
    assert api.lease(leased.worker)["request"]["stop_above_step_time_s"] is None

    leased = Leased(api, "cheap", strategy="guided", budget={"node_hours": 1.0})
    leased.measure(BEST)
    part = Fidelity(num_microbatches=4, dp=1, num_layers=2)
    request = leased.request(OTHER, part)
    assert request["stop_above_step_time_s"] is None
    assert request["layout"] == part.reduced(OTHER).to_mapping()
    assert request["model"]["num_layers"] == 2, "it trains the layers of its part"


@pytest.mark.parametrize(
    ("name", "campaign", "step_time_s"),
    [
        ("plain", {}, TOKENS / 1024.0),
        ("per-device", {"objective": "tokens_per_s_per_device"}, TOKENS / 2 / 1024.0),  # it has two
        ("not-early", {"stop": {"early": False}}, None),
        ("exhaustive", {"strategy": "exhaustive"}, None),
        ("few-iterations", {"probe": {"iterations": 3}}, None),  # too few to stop early
    ],
)
def test_a_probe_is_told_the_step_time_at_which_it_would_equal_the_best(
    api: Api, name: str, campaign: dict[str, Any], step_time_s: float | None
) -> None:
    leased = Leased(api, name, **campaign)
    leased.measure(BEST)
    # Nothing was repeated: the best may be as slow as the assumed spread of runs allows.
    slower = math.exp(RunSpread.prior().reach)
    expected = None if step_time_s is None else pytest.approx(step_time_s * slower)
    assert leased.to_beat() == expected


@pytest.mark.parametrize(
    ("name", "peak_bytes", "is_told"), [("surely-less", 9 << 20, True), ("more", 1 << 32, False)]
)
def test_with_two_objectives_a_probe_must_beat_a_layout_that_surely_needs_less_memory(
    api: Api, name: str, peak_bytes: int, is_told: bool
) -> None:
    leased = Leased(api, name, objective=TWO)
    leased.measure(OTHER, peak_memory_bytes=peak_bytes)
    # Two runs may differ by 3 %.
    expected = pytest.approx(TOKENS / (0.97 * 1024.0)) if is_told else None
    assert leased.to_beat(BEST) == expected


def test_a_probe_must_beat_the_fastest_layout_of_a_front_with_enough_headroom_in_every_rate() -> (
    None
):
    spec = CampaignSpec.from_mapping(CAMPAIGN | {"objective": TWO})
    peak = float(peak_memory_bytes(LayoutColumns.of_each([OTHER]), spec.model)[0])
    reachable = 1.0 - 0.8 * peak / spec.cluster.device_memory_bytes
    front = [
        (2000.0, reachable - 1e-6),  # the other layout may have more headroom
        (1500.0, reachable + 1e-6),
        (1000.0, 1.0),
        (None, 1.0),
    ]
    assert stop_above_s(front, spec, OTHER) == pytest.approx(TOKENS / (0.97 * 1500.0))
    assert stop_above_s(front[:1], spec, OTHER) is None
    assert stop_above_s([], spec, OTHER) is None
    rates = ["tokens_per_s", "tokens_per_s_per_device"]
    spec = CampaignSpec.from_mapping(CAMPAIGN | {"objective": rates})
    # The other layout has two devices: half of its rate a device.
    seconds = stop_above_s([(1024.0, 128.0)], spec, OTHER)
    assert seconds == pytest.approx(TOKENS / 2 / (0.97 * 128.0))


def test_the_best_is_taken_at_the_low_end_of_its_interval(api: Api) -> None:
    leased = Leased(api, "repeated")
    again = api.store.trials.repeat(leased.measure(BEST))
    api.report_measured(leased.worker, api.lease(leased.worker), again.layout, tokens_per_s=1000.0)
    seconds = leased.to_beat()
    assert seconds > 1.05 * TOKENS / 1000.0, "two runs say little about how far apart runs lie"
