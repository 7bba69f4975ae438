"""Trials without a result, for a report: by reason, with their nodes and the end of a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from results_db.campaigns.reports import TrialBrief
from results_db.store import Store
from search_spaces.protocol.worker_messages import TrialState

LOG_LINES: Final = 14
"""Last lines of a failed trial's log that are shown."""
_NUMBERS_SHOWN: Final = 12
_NODES_SHOWN: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Trials without a result, for one reason."""

    reason: str
    trials: Sequence[TrialBrief]
    """In the order in which they ended."""
    log: str
    """The last lines of the log of the newest of them."""

    @property
    def nodes(self) -> str:
        """The nodes that failed first, where they are known, with their numbers of trials."""
        counted = Counter(trial.node for trial in self.trials if trial.node).most_common()
        named = [f"{node} ({times})" for node, times in counted[:_NODES_SHOWN]]
        if len(counted) > _NODES_SHOWN:
            named.append(f"{len(counted) - _NODES_SHOWN} more")
        return ", ".join(named) or "not told"

    @property
    def numbers(self) -> str:
        """The numbers of the trials in the campaign."""
        numbers = [str(trial.number) for trial in self.trials]
        if len(numbers) > _NUMBERS_SHOWN:
            more = len(numbers) - _NUMBERS_SHOWN
            return f"{', '.join(numbers[:_NUMBERS_SHOWN])} and {more} more"
        return ", ".join(numbers)

    @property
    def node_seconds(self) -> float:
        """Node-seconds that they cost."""
        return sum(trial.node_seconds for trial in self.trials)


def failures(store: Store, ended: Sequence[TrialBrief]) -> list[Failure]:
    """Failures by reason, the most frequent first, without cancelled trials.

    Those say nothing about their layouts.
    """
    by_reason: dict[tuple[TrialState, str], list[TrialBrief]] = {}
    for trial in ended:
        if trial.state in ("FAILED", "INFEASIBLE"):
            key = (trial.state, trial.reason or trial.state.lower())
            by_reason.setdefault(key, []).append(trial)
    found = [
        Failure(
            reason=reason,
            trials=trials,
            log="\n".join(store.reports.log_tail(trials[-1].trial_id).splitlines()[-LOG_LINES:]),
        )
        for (_state, reason), trials in by_reason.items()
    ]
    return sorted(found, key=lambda failure: -len(failure.trials))
