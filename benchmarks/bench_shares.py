"""Fair shares of node-hours on one allocation: four owners by weight, and six campaigns beside one.

Run as `python -m benchmarks.bench_shares`; `--record` writes the section "Fair shares" of
RESULTS.md. All of it goes through `layout-tuner up --simulate` and HTTP, but for the weights. The
node-hours are the simulated costs of ended attempts, without those of the first 50 probes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from benchmarks.arguments import count
from benchmarks.bench_idle import running_up
from benchmarks.bench_owners import SHARED, OwnerClients
from benchmarks.results_file import describe_machine, record, table
from benchmarks.trainer.trainer_table import Figure
from layout_tuner.client.clients import Client
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.store import Store

NUM_PROBES: Final = 500
NUM_FIRST: Final = 50
POINTS: Final = 5.0
PATIENCE_S: Final = 1800.0
_POLL_S: Final = 0.2

ENDLESS: Final[Mapping[str, Any]] = {
    **SHARED,
    # A probe takes half a minute; one that hangs must not be a tenth of all node-hours.
    "probe": {"deadline": "2m"},
    "space": {
        **SHARED["space"],
        "num_nodes": [1, 2],
        "cp": [1, 2, 4],
        "recompute": ["none", "selective", "full"],
        "zero_stage": [0, 1, 2],
        "sequence_parallel": [False, True],
    },
}
"""A campaign of 747 legal layouts of one and two nodes: more than any owner gets."""

WEIGHTS: Final[Mapping[str, float]] = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}
ALONE: Final[Mapping[str, int]] = dict.fromkeys(WEIGHTS, 1)
SPLIT: Final[Mapping[str, int]] = {"a": 6, "b": 1}
"""Campaigns of each owner."""


def measure_shares(
    campaigns: Mapping[str, int], weights: Mapping[str, float], num_probes: int, time_scale: str
) -> dict[str, float]:
    """Percent of the node-hours that each owner has after the first 50 of so many probes."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        data_dir = Path(folder) / "data"
        simulated = ("--simulate", "h100-sxm", "--nodes", "4", "--time-scale", time_scale)
        opened.enter_context(running_up(data_dir, *simulated))
        time.sleep(3)  # nodes are checked
        owners = OwnerClients(data_dir, opened)
        clients = {owner: owners.client(owner) for owner in campaigns}
        with closing(Store(DataDir(data_dir).database_url)) as store:
            for owner in campaigns:
                store.owners.put_owner(owner, weight=weights.get(owner, 1.0))
        for owner, number in campaigns.items():
            for place in range(number):
                clients[owner].create_campaign({**ENDLESS, "name": f"{owner}-{place}"})
        first = _use_after(owners.admin, NUM_FIRST)
        use = _use_after(owners.admin, num_probes)
    later = {owner: use[owner] - first[owner] for owner in campaigns}
    return {owner: 100 * each / sum(later.values()) for owner, each in later.items()}


def _use_after(admin: Client, num_probes: int) -> Counter[str]:
    """Node-seconds by owner once so many probes have ended."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        use: Counter[str] = Counter()
        ended = 0
        for campaign in admin.campaigns():
            use[campaign.created_by] += campaign.node_seconds  # type: ignore[assignment]
            ended += campaign.progress.trials_ended
        if ended >= num_probes:
            return use
        time.sleep(_POLL_S)
    raise TimeoutError(f"{num_probes} probes did not end")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and records if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--probes", type=count, default=NUM_PROBES)
    parser.add_argument("--time-scale", default="0.01", help="of the probes")
    parser.add_argument("--record", action="store_true", help="write to RESULTS.md")
    asked = parser.parse_args(arguments)
    figures = []
    for name, campaigns, weights in (
        ("four owners of weights 1, 1, 2, 4", ALONE, WEIGHTS),
        ("an owner with 6 campaigns beside one with 1", SPLIT, {}),
    ):
        shares = measure_shares(campaigns, weights, asked.probes, asked.time_scale)
        print(name, shares, flush=True)
        total = sum(weights.get(owner, 1.0) for owner in shares)
        entitled = {owner: 100 * weights.get(owner, 1.0) / total for owner in shares}
        figures.append(
            Figure(
                name=f"{name}: node-hours of {asked.probes} probes after the first {NUM_FIRST}",
                asked=f"within {POINTS:g} points of "
                + ", ".join(f"{each:g} %" for each in entitled.values()),
                measured=", ".join(f"{each:.1f} %" for each in shares.values()),
                reached=all(abs(shares[each] - entitled[each]) <= POINTS for each in shares),
            )
        )
    rows = [figure.cells() for figure in figures]
    text = f"`python -m benchmarks.bench_shares`; {describe_machine('sqlalchemy')}.\n\n" + table(
        ("figure", "asked", "measured", "reached"), rows
    )
    print(text)
    if asked.record:
        record("Fair shares", text)


if __name__ == "__main__":
    main()
