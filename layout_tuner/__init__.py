"""The Python client of a service, predictions without one, and `report_step` for trainers.

```python
from layout_tuner import Client

with Client("http://127.0.0.1:8080", token) as client:
    client.create_campaign({"name": "mine", "model": "tiny", "budget": {"trials": 16}})
    for trial in client.leaderboard("mine").trials:
        print(trial.rank, trial.layout_key, trial.measurement.tokens_per_s)
```

Without a service, `plan` ranks the layouts of a campaign by predictions, and `estimate` predicts
one layout; nothing is run:

```python
import layout_tuner

best = layout_tuner.plan("campaign.yaml", software="megatron-lm").layouts[0]
one = layout_tuner.estimate("gpt-22b", {"tp": 8, "num_microbatches": 8}, cluster="frontier")
print(best.layout_key, best.predicted.step_time_s, one.tokens_per_s, one.fits)
```

A training program that a worker runs as a probe calls `report_step` after each optimizer step.
Importing this package imports nothing but that function: each other name is imported at its first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from layout_tuner.step_reports import report_step

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
    from layout_tuner.client.clients import Client
    from layout_tuner.client.errors import EventsMissedError, ServiceError
    from layout_tuner.errors import SearchSpaceError
    from layout_tuner.predictions.belief.plan import Plan
    from layout_tuner.predictions.estimator import LayoutEstimate
    from layout_tuner.predictions.plan_and_estimate import estimate, plan
    from layout_tuner.predictions.statistics.job_duration import TrainingJob
    from layout_tuner.protocol.connection.http_connection import Retries
    from layout_tuner.results_db.campaigns.filter import CampaignFilter
    from layout_tuner.results_db.database.data_dir import DataDir
    from layout_tuner.results_db.errors import TrialFilterInvalidError
    from layout_tuner.results_db.records import EventRead, MeasurementRecord
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
    "LayoutEstimate",
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
    "SearchSpaceError",
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
    "estimate",
    "plan",
    "report_step",
]

_SOURCES: Final = (
    "layout_tuner.client.clients",
    "layout_tuner.protocol.connection.http_connection",
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
)
"""Modules that define the names of `__all__`; importing the client imports all of them."""

_WITHOUT_CLIENT: Final = {
    "LayoutEstimate": "layout_tuner.predictions.estimator",
    "Plan": "layout_tuner.predictions.belief.plan",
    "SearchSpaceError": "layout_tuner.errors",
    "TrainingJob": "layout_tuner.predictions.statistics.job_duration",
    "estimate": "layout_tuner.predictions.plan_and_estimate",
    "plan": "layout_tuner.predictions.plan_and_estimate",
}
"""Modules of names for which no client is imported."""


def __getattr__(name: str) -> Any:
    """Imports a name at its first use; the module keeps it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: Any = import_module("layout_tuner.version").version()
    else:
        sources = (_WITHOUT_CLIENT[name],) if name in _WITHOUT_CLIENT else _SOURCES
        modules = map(import_module, sources)
        value = next(vars(module)[name] for module in modules if name in vars(module))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
