"""Queries that must find nothing in the database, whatever happened before.

They read the tables and not the store: a store that reads what it wrote with the same mistake would
agree with itself.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from sqlalchemy import Executable, text

from layout_tuner.results_db.admin.row_rules import RULES
from layout_tuner.results_db.leaderboard.leaderboard import Leaderboards
from layout_tuner.results_db.leaderboard.leaderboard_memo import LeaderboardMemo
from layout_tuner.results_db.store import Store

ILLEGAL: Final[dict[str, str]] = {
    "attempts are not numbered from 1 to the trial's": """
        SELECT t.id FROM trials t LEFT JOIN attempts a ON a.trial_id = t.id
        GROUP BY t.id, t.attempt HAVING count(a.attempt) <> t.attempt
        OR coalesce(max(a.attempt), 0) <> t.attempt OR coalesce(min(a.attempt), 1) <> 1""",
    "a trial that does not run has a worker or a lease": """
        SELECT id FROM trials WHERE state <> 'RUNNING'
        AND (worker_id IS NOT NULL OR lease_expires_at IS NOT NULL)""",
    "a trial runs at a worker of another cluster, or one that it does not fit": """
        SELECT t.id FROM trials t JOIN workers w ON w.id = t.worker_id
        JOIN campaigns c ON c.id = t.campaign_id
        WHERE c.cluster_name <> w.cluster OR t.num_nodes > w.num_nodes
        OR t.num_devices > t.num_nodes * w.devices_per_node""",
    "a trial that waits is to be cancelled": """
        SELECT id FROM trials WHERE state = 'PENDING' AND cancel_requested""",
    "a log or an environment belongs to a trial that has not ended": """
        SELECT t.id FROM trials t WHERE t.ended_at IS NULL AND (
            EXISTS (SELECT 1 FROM trial_logs l WHERE l.trial_id = t.id)
            OR EXISTS (SELECT 1 FROM environments e WHERE e.trial_id = t.id))""",
    "the campaign's last ending is not that of its trials": """
        SELECT c.id FROM campaigns c LEFT JOIN trials t ON t.campaign_id = c.id
        GROUP BY c.id, c.last_ended_seq HAVING coalesce(max(t.ended_seq), 0) <> c.last_ended_seq""",
    "trials are not numbered from 1 to the campaign's last": """
        SELECT c.id FROM campaigns c LEFT JOIN trials t ON t.campaign_id = c.id
        GROUP BY c.id, c.last_number
        HAVING count(t.id) <> c.last_number OR coalesce(max(t.number), 0) <> c.last_number""",
    "a trial was lost more often than it may be, or went on after": """
        SELECT id FROM trials WHERE lost_attempts > 3 OR lost_attempts < 0
        OR (lost_attempts = 3 AND ended_at IS NULL)
        OR (reason = 'node_lost' AND lost_attempts < 3)""",
    "fewer attempts are counted as lost than were": """
        SELECT t.id FROM trials t WHERE t.lost_attempts < (
            SELECT count(*) FROM attempts a WHERE a.trial_id = t.id AND a.ending = 'lost')""",
    "a cost is not the sum of its parts, or one is under 0": """
        SELECT id FROM trials WHERE abs(node_seconds - iterations_node_seconds - start_node_seconds
            - idle_node_seconds - lost_node_seconds) > 1e-6
        OR iterations_node_seconds < 0 OR start_node_seconds < 0 OR idle_node_seconds < 0
        OR lost_node_seconds < 0""",
    "a trial runs and never began": """
        SELECT id FROM trials WHERE state = 'RUNNING' AND started_at IS NULL""",
}
"""By what is wrong, a query that finds the rows it is wrong of: what neither a constraint refuses
nor a rule of `db check` finds."""


@cache
def _queries() -> dict[str, Executable]:
    queries: dict[str, Executable] = {wrong: text(query) for wrong, query in ILLEGAL.items()}
    return queries | dict(RULES.values())


def violations(store: Store) -> list[str]:
    """What is illegal in the database of a store, a line each."""
    with store._db.read() as session:
        found = {wrong: session.execute(query).all()[:10] for wrong, query in _queries().items()}
    return [f"{wrong}: {rows}" for wrong, rows in found.items() if rows]


def wrong_leaderboards(store: Store) -> list[str]:
    """Names of campaigns whose leaderboard is kept, and is not the one that is computed anew."""
    fresh = Leaderboards(store._db, store.now, LeaderboardMemo())
    return [
        campaign.name
        for campaign in store.campaigns.find()
        if store.leaderboard.ranked_layouts(campaign.id) != fresh.ranked_layouts(campaign.id)
    ]
