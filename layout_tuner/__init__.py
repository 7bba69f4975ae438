"""The Python client of a layout-tuner service, and `report_step` for training programs.

```python
from layout_tuner import Client

with Client("http://127.0.0.1:8080", token) as client:
    client.create_campaign({"name": "mine", "model": "tiny", "budget": {"trials": 16}})
    for trial in client.leaderboard("mine").trials:
        print(trial.rank, trial.layout_key, trial.measurement.tokens_per_s)
```

A training program that a worker runs as a probe calls `report_step` after each optimizer step. The
worker puts a copy of this file alone on the program's PYTHONPATH, so that `report_step` needs
neither this project nor its dependencies. Importing this module imports nothing else: each name of
the client is imported at its first use.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from layout_tuner.api.errors import ApiError, TokenFileInvalidError
    from layout_tuner.api.schemas.access import (
        AuditPage,
        SignInCodeCreated,
        TokenCreate,
        TokenCreated,
        TokenPage,
        TokenRead,
        WhoAmI,
    )
    from layout_tuner.api.schemas.allocations import (
        AllocationPage,
        AllocationRead,
        NodePage,
        WorkerPage,
    )
    from layout_tuner.api.schemas.campaigns_and_trials import (
        AnalysisRead,
        CampaignDetail,
        CampaignPage,
        CampaignRead,
        EventRead,
        ExportFormatPage,
        Health,
        ImportRead,
        LeaderboardPage,
        Problem,
        RankedTrial,
        Readiness,
        TrialDetailRead,
        TrialPage,
        TrialRead,
        TrialsAdded,
    )
    from layout_tuner.api.schemas.model_and_cluster_documents import (
        ClusterPage,
        ClusterRead,
        ModelPage,
        ModelRead,
    )
    from layout_tuner.api.schemas.plans import PlanRead
    from layout_tuner.client import Client, Retries
    from layout_tuner.client.errors import EventsMissedError, ServiceError
    from layout_tuner.predictions.belief.plan import Plan
    from layout_tuner.predictions.statistics.job_duration import TrainingJob
    from layout_tuner.results_db.campaigns.filter import CampaignFilter
    from layout_tuner.results_db.database.data_dir import DataDir
    from layout_tuner.results_db.errors import TrialFilterInvalidError
    from layout_tuner.results_db.records import MeasurementRecord
    from layout_tuner.results_db.service_records import AuditEntryRead, ClusterNodeRead
    from layout_tuner.results_db.trials.filter import TrialFilter
    from layout_tuner.trainers.exports.exported import ExportRead

    __version__: str

__all__ = [
    "AllocationPage",
    "AllocationRead",
    "AnalysisRead",
    "ApiError",
    "AuditEntryRead",
    "AuditPage",
    "CampaignDetail",
    "CampaignFilter",
    "CampaignPage",
    "CampaignRead",
    "Client",
    "ClusterNodeRead",
    "ClusterPage",
    "ClusterRead",
    "DataDir",
    "EventRead",
    "EventsMissedError",
    "ExportFormatPage",
    "ExportRead",
    "Health",
    "ImportRead",
    "LeaderboardPage",
    "MeasurementRecord",
    "ModelPage",
    "ModelRead",
    "NodePage",
    "Plan",
    "PlanRead",
    "Problem",
    "RankedTrial",
    "Readiness",
    "Retries",
    "ServiceError",
    "SignInCodeCreated",
    "TokenCreate",
    "TokenCreated",
    "TokenFileInvalidError",
    "TokenPage",
    "TokenRead",
    "TrainingJob",
    "TrialDetailRead",
    "TrialFilter",
    "TrialFilterInvalidError",
    "TrialPage",
    "TrialRead",
    "TrialsAdded",
    "WhoAmI",
    "WorkerPage",
    "__version__",
    "report_step",
]

_SOURCES: Final = (
    "layout_tuner.client",
    "layout_tuner.client.errors",
    "layout_tuner.api.errors",
    "layout_tuner.trainers.exports.exported",
    "layout_tuner.api.schemas.access",
    "layout_tuner.api.schemas.allocations",
    "layout_tuner.api.schemas.campaigns_and_trials",
    "layout_tuner.api.schemas.model_and_cluster_documents",
    "layout_tuner.api.schemas.plans",
    "layout_tuner.results_db.campaigns.filter",
    "layout_tuner.results_db.database.data_dir",
    "layout_tuner.results_db.errors",
    "layout_tuner.results_db.records",
    "layout_tuner.results_db.service_records",
    "layout_tuner.results_db.trials.filter",
    "layout_tuner.predictions.belief.plan",
    "layout_tuner.predictions.statistics.job_duration",
)
"""Modules that define the names of `__all__`; importing the client imports all of them."""


_REPORT_VARIABLE: Final = "LAYOUT_TUNER_REPORT"
"""The named pipe of the probe; not set outside of one."""
_TRIES: Final = 1000
_PAUSE_S: Final = 0.001


def report_step(
    *,
    step_time_s: float | None = None,
    tokens: int | None = None,
    loss: float | None = None,
    peak_memory_bytes: int | None = None,
) -> None:
    """Reports that an optimizer step has ended, where a worker runs this program as a probe.

    Outside of a probe it does nothing. One rank may report for the whole job, or every rank may:
    then the slowest rank's time, the mean loss and the largest memory count.

    Args:
        step_time_s: seconds of the whole step; None: the time since the previous report counts.
        tokens: tokens that the whole job consumed in the step, counted by the program; None: they
            are assumed to be those of the layout, and the measurement is marked so.
        loss: mean loss of the step, in nats a token.
        peak_memory_bytes: peak memory of this rank so far; None: the worker samples it.
    """
    path = os.environ.get(_REPORT_VARIABLE)
    if not path:
        return
    import json

    figures = {
        "step_time_s": step_time_s,
        "tokens": tokens,
        "loss": loss,
        "peak_memory_bytes": peak_memory_bytes,
    }
    document = {name: _number(value) for name, value in figures.items() if value is not None}
    document["rank"] = int(os.environ.get("RANK", "0"))
    document["at_s"] = time.monotonic()
    _write_report(path, json.dumps(document).encode() + b"\n")


def _number(value: Any) -> float:
    """A number, or what stands for one: a tensor of one element, or a scalar of numpy."""
    return float(value.detach() if hasattr(value, "detach") else value)


def _write_report(path: str, line: bytes) -> None:
    """Writes a line to the pipe, as a whole; training goes on where nobody reads it."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # the worker has ended the probe
        return
    try:
        for _ in range(_TRIES):
            try:
                os.write(pipe, line)
                return
            except BlockingIOError:  # the pipe is full
                time.sleep(_PAUSE_S)
        sys.stderr.write("layout_tuner.report_step: a report was not read, and is lost\n")
    except OSError:
        return
    finally:
        os.close(pipe)


def __getattr__(name: str) -> Any:
    """Imports a name at its first use; the module keeps it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: Any = import_module("layout_tuner.version").version()
    else:
        modules = map(import_module, _SOURCES)
        value = next(vars(module)[name] for module in modules if name in vars(module))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
