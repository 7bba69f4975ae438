"""Runs of a replayed search, made up from the regret of each probe."""

from __future__ import annotations

from search_spaces.spec.layout import Layout
from search_spaces.tables import CellKey
from tuner.replay.run import ReplayedProbe, ReplayRun

KEY = CellKey(
    source="", cluster="testbox", model="m", seq_length=8, num_devices=8, global_batch_size=8
)


def make_run(*regrets: float | None, allowed: int = 10, search_s: float = 0.0) -> ReplayRun:
    probes = [
        ReplayedProbe(
            layout=Layout(),
            regret=regret,
            leader_regret=min((r for r in regrets[:place] if r is not None), default=None),
            ended_at_s=place,
            node_seconds=2.0,
            step_time_s=None if regret is None else 1.0,
        )
        for place, regret in enumerate(regrets, 1)
    ]
    return ReplayRun(
        cell=KEY,
        strategy="some",
        seed=0,
        num_probes=allowed,
        probes=tuple(probes),
        search_s=search_s,
    )
