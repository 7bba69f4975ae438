"""Campaigns with something for every plot: several workers, failures on nodes, a baseline."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from playwright.sync_api import Browser

from layout_tuner.api.settings import Settings
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.api.dashboard.browser import Visitor, session_of, visiting
from tests.api.plot_data.layout_points import OBJECTIVE
from tests.kit.api import CLUSTER, TOKEN
from tests.kit.live import live_service
from tests.kit.store import (
    TINY,
    TimelyStore,
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_worker,
    post_outcome,
)
from tests.results_db.campaigns.test_analyses import make_analysis

BASELINE = Layout(tp=1, pp=2, dp=4, num_microbatches=4, micro_batch_size=1)
"""The second layout that runs."""
TOKENS_PER_STEP = 16 * TINY.seq_length

DOCUMENT = {
    "name": "plotted",
    "model": "tiny",
    "cluster": {**CLUSTER, "devices_per_node": 8, "device_memory_bytes": 16 << 30},
    "space": {
        "global_batch_size": 16,
        "tp": [1, 2, 4],
        "pp": [1, 2],
        "micro_batch_size": [1, 2],
        "recompute": ["none", "selective", "full"],
        "zero_stage": [0, 1],
    },
    "strategy": "random",
    "budget": {"trials": 100},
    "baseline": BASELINE.to_mapping(),
}


@dataclass(frozen=True, kw_only=True)
class Plotted:
    """A service with a campaign of many plots."""

    url: str
    store: Store
    campaign_id: int
    clock: TurnableClock
    workers: list[str]

    @contextmanager
    def visitor(self, browser: Browser, **options: Any) -> Iterator[Visitor]:
        """A new window of somebody who is signed in."""
        state = session_of(self.url, TOKEN)
        with visiting(browser, self.url, storage_state=state, **options) as visitor:
            yield visitor

    def run_one(self, layout: Layout, outcome: Outcome, *, worker: int = 0) -> int:
        """Proposes, leases and ends a trial; returns its number."""
        trial = self.store.trials.add(self.campaign_id, layout, prediction=prediction_of(layout))
        lease = lease_one(self.store, self.workers[worker])
        self.clock.forward(outcome.duration_s)
        assert post_outcome(self.store, trial.id, lease.attempt, outcome).accepted
        return trial.number


def layouts() -> Iterator[Layout]:
    """Layouts of 8 devices, the baseline second."""
    knobs = itertools.product((1, 2, 4), (1, 2), (1, 2), ("none", "selective", "full"), (0, 1))
    made = [
        Layout(
            tp=tp,
            pp=pp,
            dp=8 // (tp * pp),
            micro_batch_size=size,
            num_microbatches=16 // size // (8 // (tp * pp)) or 1,
            recompute=recompute,  # type: ignore[arg-type]
            zero_stage=zero,
        )
        for tp, pp, size, recompute, zero in knobs
    ]
    # Neighbours differ, as those of a search do.
    order = sorted((each for each in made if each != BASELINE), key=hash_of)
    yield order[0]
    yield BASELINE
    yield from order[1:]


def hash_of(layout: Layout) -> int:
    """A number that is the same in every process."""
    return crc32(layout.key.encode())


def tokens_per_s(layout: Layout) -> float:
    """A throughput that depends on the layout, without noise."""
    slow = {"none": 1.0, "selective": 1.05, "full": 1.3}[layout.recompute]
    split = (1 + 0.06 * (layout.tp - 1)) * (1 + 0.1 * (layout.pp - 1))
    jitter = 1 + (hash_of(layout) % 97) / 1500
    return 9000 * (1 + 0.15 * (layout.micro_batch_size - 1)) / (slow * split * jitter)


def prediction_of(layout: Layout) -> Prediction:
    """An estimate that is off by up to a third."""
    off = 0.8 + (hash_of(layout) % 61) / 120
    return Prediction(
        step_time_s=off * TOKENS_PER_STEP / tokens_per_s(layout),
        log_step_time_sd=0.12,
        peak_memory_bytes=int(off * memory_of(layout)),
        fit_probability=0.9,
        source="calibrated",
    )


def memory_of(layout: Layout) -> int:
    """The peak of a layout."""
    return (2 + 5 // layout.tp + (layout.recompute == "none") * 4) << 30


def outcome_of(layout: Layout, number: int) -> Outcome:
    """Most trials complete; some run out of memory, crash, or are stopped early."""
    if layout.micro_batch_size == 2 and layout.recompute == "none" and layout.tp == 1:
        return failed("out_of_memory", duration_s=8.0)
    if number % 11 == 7:
        return failed("crashed", duration_s=15.0)
    duration_s = 20.0 + hash_of(layout) % 25
    memory = memory_of(layout)
    changes: dict[str, Any] = {
        "tokens_per_s": tokens_per_s(layout),
        "peak_memory_bytes": memory,
        "peak_memory_bytes_by_stage": tuple(memory for _ in range(layout.pp)),
    }
    if number % 9 == 4:
        changes["tokens_per_s"] *= 0.5
        changes |= {"shortened": True, "iterations_asked": 10}
    return completed(layout, duration_s=duration_s, **changes)


def plotted_store(store: Store, clock: TurnableClock, url: str, *, trials: int) -> Plotted:
    """Fills a store with one campaign."""
    spec = CampaignSpec.from_mapping(DOCUMENT).to_mapping()
    campaign_id = store.campaigns.create(spec, num_legal_layouts=500).id
    workers = [make_worker(store, name, num_nodes=1).id for name in ("w1", "w2")]
    plotted = Plotted(url=url, store=store, campaign_id=campaign_id, clock=clock, workers=workers)
    for number, layout in enumerate(itertools.islice(layouts(), trials)):
        plotted.run_one(layout, outcome_of(layout, number), worker=number % 2)
        clock.forward(2.0)
    return plotted


@contextmanager
def plotted_service(database_url: str, *, trials: int) -> Iterator[Plotted]:
    """A service on loopback with a campaign of so many trials, and one trial that runs."""
    clock = TurnableClock()
    with (
        closing(TimelyStore(database_url, clock=clock)) as store,
        live_service(Settings(token=TOKEN, requests_per_s=1e6), store) as url,
    ):
        plotted = plotted_store(store, clock, url.removesuffix("/v1"), trials=trials)
        # As the driver does.
        winner = store.leaderboard.winner(plotted.campaign_id, OBJECTIVE)
        importances = {"micro_batch_size": 0.5, "recompute": 0.3, "tp": 0.15}
        figures = {"objective": OBJECTIVE, "importances": importances, "steps": ()}
        store.reports.keep_analysis(plotted.campaign_id, make_analysis(winner.trial.id, **figures))
        store.trials.add(plotted.campaign_id, Layout(tp=8, num_microbatches=16))
        lease_one(store, plotted.workers[1])
        clock.forward(12)
        yield plotted
