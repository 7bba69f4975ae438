"""The content of a leaderboard page, read with plain SQL by sqlite3 or psycopg, as tuples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

_TRIAL: Final = (
    "t.id, t.number, t.campaign_id, t.layout_key, t.num_devices, t.global_batch_size, t.state, t.reason, "
    "t.message, t.node, t.attempt, t.lost_attempts, t.iterations_done, t.repeat_of, t.node_seconds, "
    "t.created_at, t.started_at, t.ended_at, t.num_nodes, t.tp, t.tp_columns, t.cp, t.pp, t.dp, t.vpp, t.cp_comm_type, t.pipeline_split, "
    "t.micro_batch_size, t.num_microbatches, t.zero_stage, t.zero_replicas, t.recompute, t.sequence_parallel, t.precision, "
    "t.iterations_node_seconds, t.start_node_seconds, t.idle_node_seconds, t.lost_node_seconds"
)
_MEASUREMENT: Final = (
    "m.step_time_s, m.step_time_q25_s, m.step_time_q75_s, m.tokens_per_step, m.tokens_per_s, "
    "m.tokens_per_s_per_device, m.model_tflops_per_device, m.hardware_tflops_per_device, "
    "m.peak_tflops_per_device, m.peak_source, m.mfu, m.hfu, m.peak_memory_bytes, m.memory_kind, "
    "m.oversubscribed, m.warmup_settled, m.skipped_steps, m.shortened, m.iterations_asked"
)
_BREAKDOWN: Final = (
    "b.compute_s, b.tp_s, b.cp_s, b.ep_s, b.pp_s, b.dp_s, b.optimizer_s, b.unexplained_s"
)
_CAMPAIGN: Final = "SELECT id, spec, objective, max_peak_memory_bytes FROM campaigns WHERE name = ?"
_SOURCE: Final = "SELECT source FROM imports WHERE campaign_id = ?"

_RANKED: Final = """
WITH runs AS (
  SELECT t.id, t.layout_key, m.step_time_s, m.tokens_per_s_per_device AS rate,
    row_number() OVER (PARTITION BY t.layout_key ORDER BY t.id) AS place,
    row_number() OVER (PARTITION BY t.layout_key ORDER BY m.step_time_s) AS by_time,
    count(*) OVER (PARTITION BY t.layout_key) AS num_runs
  FROM trials t JOIN measurements m ON m.trial_id = t.id
  WHERE t.campaign_id = ? AND t.state = 'COMPLETED' AND NOT m.oversubscribed AND NOT m.shortened
), pooled AS (
  SELECT layout_key, min(id) AS id, max(num_runs) AS num_runs,
    avg(CASE WHEN by_time * 2 BETWEEN num_runs AND num_runs + 2 THEN step_time_s END) AS step_time_s,
    max(CASE WHEN place = 1 THEN rate * step_time_s END) AS tokens
  FROM runs GROUP BY layout_key
), iterating AS (
  SELECT r.layout_key, count(*) AS timed, avg(i.step_time_s) AS mean,
    avg(i.step_time_s * i.step_time_s) AS square
  FROM runs r JOIN iterations i ON i.trial_id = r.id AND i.kind = 'timed' GROUP BY r.layout_key
)
SELECT p.id, p.tokens / p.step_time_s AS value, count(*) OVER () AS total, p.num_runs, p.step_time_s,
  i.timed, i.mean, i.square
FROM pooled p JOIN iterating i ON i.layout_key = p.layout_key
ORDER BY value DESC, p.id LIMIT ?
"""
"""Layouts ranked by the median of their runs, with the moments of their iterations, from which
intervals are computed. Only for campaigns in which no probe was stopped early."""

_LAYOUTS: Final = (
    f"SELECT {_TRIAL}, {_MEASUREMENT}, {_BREAKDOWN} FROM trials t "
    "JOIN measurements m ON m.trial_id = t.id LEFT JOIN breakdowns b ON b.trial_id = t.id "
    "WHERE t.id IN ({ids})"
)
_STAGES: Final = (
    "SELECT trial_id, peak_memory_bytes, peak_reserved_bytes FROM stage_memories "
    "WHERE trial_id IN ({ids}) ORDER BY trial_id, stage"
)
_MFU: Final = f"{_TRIAL}, {_MEASUREMENT}".split(", ").index("m.mfu")


@dataclass(frozen=True, kw_only=True, slots=True)
class BarePage:
    """What was fetched, as far as it is compared with the page."""

    total: int
    figures: list[tuple[int, float, float]]
    """Trial, objective and MFU of each layout."""
    peaks: dict[int, list[int]]
    """Peaks of the stages of each trial."""


class BareLeaderboard:
    """A connection that asks for a page as its author would by hand.

    Args:
        connection: of sqlite3 or psycopg, without transactions of its own.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._mark = "?" if type(connection).__module__.startswith("sqlite3") else "%s"

    def page(self, campaign: str, limit: int) -> BarePage:
        """All that a page shows, in one transaction."""
        with self._reading():
            ((id_, *_),) = self._all(_CAMPAIGN, campaign)
            ranked = self._all(_RANKED, id_, limit)
            ids = ", ".join(str(row[0]) for row in ranked)
            layouts = {row[0]: row for row in self._all(_LAYOUTS.format(ids=ids))}
            stages = self._all(_STAGES.format(ids=ids))
            self._all(_SOURCE, id_)
        peaks: defaultdict[int, list[int]] = defaultdict(list)
        for trial_id, peak, _ in stages:
            peaks[trial_id].append(peak)
        return BarePage(
            total=ranked[0][2],
            figures=[(row[0], row[1], layouts[row[0]][_MFU]) for row in ranked],
            peaks=dict(peaks),
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK")

    def _all(self, statement: str, *values: Any) -> list[Any]:
        found: list[Any] = self._connection.execute(
            statement.replace("?", self._mark), values
        ).fetchall()
        return found
