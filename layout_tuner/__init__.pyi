"""The names of `layout_tuner`, for type checkers and for `__init__.py`, which imports them late."""

# ruff: noqa: I001 (`as` makes a name public, and would be a statement of its own each)

from layout_tuner.api.errors import (
    ApiError as ApiError,
    TokenFileInvalidError as TokenFileInvalidError,
)
from layout_tuner.api.schemas.access import (
    AuditPage as AuditPage,
    DeviceCodeCreated as DeviceCodeCreated,
    DeviceToken as DeviceToken,
    GroupPage as GroupPage,
    OwnerPage as OwnerPage,
    QuotaPage as QuotaPage,
    QuotaPut as QuotaPut,
    SharePage as SharePage,
    SignedOut as SignedOut,
    SignInCodeCreated as SignInCodeCreated,
    TokenCreate as TokenCreate,
    TokenCreated as TokenCreated,
    TokenPage as TokenPage,
    TokenRead as TokenRead,
    WebhookCreate as WebhookCreate,
    WebhookPage as WebhookPage,
    WhoAmI as WhoAmI,
)
from layout_tuner.api.schemas.allocations import (
    AllocationPage as AllocationPage,
    AllocationRead as AllocationRead,
    NodePage as NodePage,
    WorkerPage as WorkerPage,
)
from layout_tuner.api.schemas.campaigns_and_trials import (
    AnalysisRead as AnalysisRead,
    CampaignDetail as CampaignDetail,
    CampaignPage as CampaignPage,
    CampaignRead as CampaignRead,
    ExportFormatPage as ExportFormatPage,
    Health as Health,
    ImportRead as ImportRead,
    LeaderboardPage as LeaderboardPage,
    Problem as Problem,
    RankedTrial as RankedTrial,
    Readiness as Readiness,
    TrialDetailRead as TrialDetailRead,
    TrialPage as TrialPage,
    TrialRead as TrialRead,
    TrialsAdded as TrialsAdded,
)
from layout_tuner.api.schemas.model_and_cluster_documents import (
    ClusterPage as ClusterPage,
    ClusterRead as ClusterRead,
    ModelPage as ModelPage,
    ModelRead as ModelRead,
)
from layout_tuner.api.schemas.trainer_documents import (
    TrainerPage as TrainerPage,
    TrainerRead as TrainerRead,
)
from layout_tuner.api.schemas.plans import PlanRead as PlanRead
from layout_tuner.client.clients import Client as Client
from layout_tuner.client.errors import (
    EventsMissedError as EventsMissedError,
    PackageMissingError as PackageMissingError,
    ServiceError as ServiceError,
)
from layout_tuner.client.notebook import RankedTrials as RankedTrials, to_frame as to_frame
from layout_tuner.errors import SearchSpaceError as SearchSpaceError
from layout_tuner.predictions.belief.plan import Plan as Plan
from layout_tuner.predictions.estimator import LayoutEstimate as LayoutEstimate
from layout_tuner.predictions.job_plan import (
    JobAsked as JobAsked,
    JobPlan as JobPlan,
    plan_job as plan_job,
)
from layout_tuner.predictions.plan_and_estimate import estimate as estimate, plan as plan
from layout_tuner.predictions.statistics.job_duration import TrainingJob as TrainingJob
from layout_tuner.protocol.connection.http_connection import Retries as Retries
from layout_tuner.results_db.campaigns.filter import CampaignFilter as CampaignFilter
from layout_tuner.results_db.database.data_dir import DataDir as DataDir
from layout_tuner.results_db.errors import TrialFilterInvalidError as TrialFilterInvalidError
from layout_tuner.results_db.records import (
    EventRead as EventRead,
    MeasurementRecord as MeasurementRecord,
)
from layout_tuner.results_db.service_records import (
    AuditEntryRead as AuditEntryRead,
    ClusterNodeRead as ClusterNodeRead,
)
from layout_tuner.results_db.trials.filter import TrialFilter as TrialFilter
from layout_tuner.step_reports import report_step as report_step
from layout_tuner.trainers.exports.exported import ExportRead as ExportRead

__version__: str
