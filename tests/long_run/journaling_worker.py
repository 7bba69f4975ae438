"""`layout-tuner worker` that writes down each outcome that it stored, and the answer to each.

python -m tests.long_run.journaling_worker JOURNAL [options of the command worker]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from layout_tuner.cli.main import main
from layout_tuner.workers.service.lease_client import EncodedOutcome
from layout_tuner.workers.worker import run_worker
from layout_tuner.workers.worker.outcome_spool import Spool
from tests.e2e.fake_probe_worker import Journal, JournalingClient


class JournalingSpool(Spool):
    """Writes down what it stored; such an outcome is to arrive, whatever is killed."""

    journal: Journal

    def keep(self, outcome: EncodedOutcome) -> None:
        super().keep(outcome)
        self.journal.write(what="kept", trial=outcome.trial_id, attempt=outcome.attempt)


if __name__ == "__main__":
    journal = JournalingSpool.journal = Journal(Path(sys.argv[1]))

    def journaling_client(url: str, token: str, **_: Any) -> JournalingClient:
        return JournalingClient(url, token, journal)

    run_worker.LeaseClient = journaling_client  # type: ignore[assignment,misc]
    run_worker.Spool = JournalingSpool  # type: ignore[misc]
    main(["worker", *sys.argv[2:]])
