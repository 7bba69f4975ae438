"""Errors of the database; one base, so that a caller can catch them all."""

from layout_tuner.errors import LayoutTunerError


class ResultsDbError(LayoutTunerError):
    """Base of all errors that `results_db` raises on purpose."""


class CampaignNotFoundError(ResultsDbError):
    """No campaign has this id or name."""


class PlanNotFoundError(ResultsDbError):
    """No plan has this id."""


class PlanLimitError(ResultsDbError):
    """Too many plans wait for the driver."""


class CampaignDuplicateError(ResultsDbError):
    """Another campaign has this name already."""


class CampaignStateError(ResultsDbError):
    """The campaign is in a state that does not allow this."""


class IdempotencyKeyReusedError(ResultsDbError):
    """The idempotency key was sent before, with another request."""


class IdempotencyKeyInUseError(ResultsDbError):
    """The same request was just answered; sending it again returns the answer."""


class DescriptionNotFoundError(ResultsDbError):
    """Users have no model or cluster of this name."""


class DescriptionOwnedError(ResultsDbError):
    """The model or cluster of this name belongs to another user."""


class DescriptionLimitError(ResultsDbError):
    """The number of models or clusters of users has reached its limit."""


class TrialNotFoundError(ResultsDbError):
    """No trial has this id."""


class TrialLogNotFoundError(ResultsDbError):
    """The trial has no log: it has not ended, printed nothing, or its log was pruned."""


class TrialDuplicateError(ResultsDbError):
    """The campaign has a trial of this layout, and this one is not a deliberate repeat."""


class TrialStateError(ResultsDbError):
    """The trial is in a state that does not allow this."""


class TrialFilterInvalidError(ResultsDbError):
    """No trial can match the filter."""


class AttemptNotFoundError(ResultsDbError):
    """The trial never had this attempt."""


class WorkerNotFoundError(ResultsDbError):
    """No worker session has this id, or the session has ended; the worker must register again."""


class WorkerSupersededError(ResultsDbError):
    """Another worker registered under the same name; this one must end, and not register again."""


class WorkerOwnedError(ResultsDbError):
    """Another token registered the worker."""


class NodeNotFoundError(ResultsDbError):
    """No allocation of the cluster ever had a node of this name."""


class NodeStateError(ResultsDbError):
    """The node is in a state that does not allow this."""


class MeasurementInvalidError(ResultsDbError):
    """The figures of a measurement contradict each other, or the layout."""


class ObjectiveUnknownError(ResultsDbError):
    """There is no objective of this name."""


class TokenNotFoundError(ResultsDbError):
    """No token has this id."""


class DeviceSignInRefusedError(ResultsDbError):
    """A command line gets no token; the kind is the word of RFC 8628 or RFC 6749 for why."""

    def __init__(self, kind: str) -> None:
        why = kind.replace("_", " ")
        super().__init__(f"no token ({why}): `layout-tuner login --device` begins a sign-in")
        self.kind = kind


class TokenDuplicateError(ResultsDbError):
    """A valid token has this name already."""


class OwnerInvalidError(ResultsDbError):
    """The weight or the quota of an owner or a group, or the members of a group, cannot be."""


class OwnerNotFoundError(ResultsDbError):
    """There is no owner, or no group, of this name."""


class QuotaExceededError(ResultsDbError):
    """The budget of a new campaign is more than a quota leaves to its owner or its group."""


class WebhookInvalidError(ResultsDbError):
    """A webhook's address, events or format cannot be."""


class WebhookNotFoundError(ResultsDbError):
    """The owner has no webhook of this id."""


class TokenInvalidError(ResultsDbError):
    """The name or the expiry of a new token is invalid."""


class ListingInvalidError(ResultsDbError):
    """A parameter of a leaderboard query is out of range."""


class SchemaNewerError(ResultsDbError):
    """A newer or an unreleased version of the program wrote the database."""


class SchemaOutdatedError(ResultsDbError):
    """The database has not been upgraded to this version of the program."""


class DatabaseUnavailableError(ResultsDbError):
    """The database does not answer, or cannot be written to just now."""

    def __init__(self, message: str = "", *, is_away: bool = False) -> None:
        super().__init__(message)
        self.is_away = is_away
        """Whether its server is starting, stopping or unreachable, and may answer later."""


class DatabaseConflictError(DatabaseUnavailableError):
    """This transaction conflicted with another one, and was rolled back."""


class ValueUnstorableError(ResultsDbError):
    """A text is too long or contains NUL, or a number is too large to be stored."""


class RowRefusedError(ResultsDbError):
    """A constraint of the schema refused a row: this is a bug of the program."""


class DriverLeaseLostError(ResultsDbError):
    """Another driver has taken over; this one may no longer write."""


class DatabaseUrlInvalidError(ResultsDbError):
    """The URL of a database is invalid, or of an unsupported kind."""


class DatabaseInvalidError(ResultsDbError):
    """The database contains rows that this version's schema refuses."""


class RetentionInvalidError(ResultsDbError):
    """A retention setting is invalid."""


class BackupPathError(ResultsDbError):
    """A backup cannot be written to, or read from, the given path."""


class BackupInvalidError(ResultsDbError):
    """The file is not a backup, is damaged, or contains values that the database cannot store."""


class DatabaseNotEmptyError(ResultsDbError):
    """A restore would replace a database that contains data."""


class DatabaseInUseError(ResultsDbError):
    """A service or a driver uses the database that a restore would replace."""


class DataDirInvalidError(ResultsDbError):
    """The data directory cannot be used."""


class DataDirLockedError(ResultsDbError):
    """Another process holds the lock of the data directory."""


def campaign_not_found(reference: int | str) -> CampaignNotFoundError:
    named = f"named {reference!r}" if isinstance(reference, str) else str(reference)
    return CampaignNotFoundError(f"there is no campaign {named}")
