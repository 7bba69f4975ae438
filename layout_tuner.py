"""The Python client of a layout-tuner service: the one import that users need.

```python
from layout_tuner import Client

with Client("http://127.0.0.1:8080", token) as client:
    client.create_campaign({"name": "mine", "model": "tiny", "budget": {"trials": 16}})
    for trial in client.leaderboard("mine").trials:
        print(trial.rank, trial.layout_key, trial.measurement.tokens_per_s)
```

Importing this module imports nothing else: each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from api.client import AsyncClient, Client, Retries
    from api.errors import ApiError, EventsMissedError, ServiceError, TokenFileInvalidError
    from api.schemas.access import (
        AuditEntryRead,
        AuditPage,
        SignInCodeCreated,
        TokenCreate,
        TokenCreated,
        TokenPage,
        TokenRead,
        WhoAmI,
    )
    from api.schemas.allocations import (
        AllocationPage,
        AllocationRead,
        ClusterNodeRead,
        NodePage,
        WorkerPage,
    )
    from api.schemas.campaigns_and_trials import (
        AnalysisRead,
        CampaignDetail,
        CampaignPage,
        CampaignRead,
        EventRead,
        ExportFormatPage,
        ExportRead,
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
    from api.schemas.catalogue import ClusterPage, ClusterRead, ModelPage, ModelRead
    from results_db.campaigns.filter import CampaignFilter
    from results_db.database.data_dir import DataDir
    from results_db.errors import TrialFilterInvalidError
    from results_db.records import MeasurementRecord
    from results_db.trials.filter import TrialFilter

    __version__: str

__all__ = [
    "AllocationPage",
    "AllocationRead",
    "AnalysisRead",
    "ApiError",
    "AsyncClient",
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
    "TrialDetailRead",
    "TrialFilter",
    "TrialFilterInvalidError",
    "TrialPage",
    "TrialRead",
    "TrialsAdded",
    "WhoAmI",
    "WorkerPage",
    "__version__",
]

_SOURCES: Final = (
    "api.client",
    "api.errors",
    "api.schemas.access",
    "api.schemas.allocations",
    "api.schemas.campaigns_and_trials",
    "api.schemas.catalogue",
    "results_db.campaigns.filter",
    "results_db.database.data_dir",
    "results_db.errors",
    "results_db.records",
    "results_db.trials.filter",
)
"""Modules that define the names of `__all__`; importing the client imports all of them."""


def __getattr__(name: str) -> Any:
    """Imports a name at its first use; the module keeps it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: Any = import_module("api.version").version()
    else:
        modules = map(import_module, _SOURCES)
        value = next(vars(module)[name] for module in modules if name in vars(module))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
