"""Errors of the database; one base, so that a caller can catch them all."""


class ResultsDbError(Exception):
    """Base of everything that `results_db` raises on purpose."""


class CampaignNotFoundError(ResultsDbError):
    """No campaign has this id or name."""


class CampaignDuplicateError(ResultsDbError):
    """Another campaign has this name already."""


class CampaignStateError(ResultsDbError):
    """The campaign is in a state that does not allow this."""


class IdempotencyKeyReusedError(ResultsDbError):
    """A request came with the key of another request."""


class IdempotencyKeyInUseError(ResultsDbError):
    """The same request was being answered; its answer is there now."""


class DescriptionNotFoundError(ResultsDbError):
    """Users have no model, or no cluster, of this name."""


class DescriptionOwnedError(ResultsDbError):
    """The model, or cluster, of this name is somebody else's."""


class DescriptionLimitError(ResultsDbError):
    """Users have as many models, or clusters, as there may be."""


class TrialNotFoundError(ResultsDbError):
    """No trial has this id."""


class TrialLogNotFoundError(ResultsDbError):
    """Of this trial no log is kept: it has not ended, nothing was printed, or it is not kept for ever."""


class TrialDuplicateError(ResultsDbError):
    """The campaign has a trial of this layout already, and this is not a deliberate repeat."""


class TrialStateError(ResultsDbError):
    """The trial is in a state that does not allow this."""


class TrialFilterInvalidError(ResultsDbError):
    """No trial can be as a filter wants it."""


class AttemptNotFoundError(ResultsDbError):
    """The trial never had this attempt."""


class WorkerNotFoundError(ResultsDbError):
    """No session of a worker has this id, or it has ended: the worker registers again."""


class WorkerSupersededError(ResultsDbError):
    """Another worker has registered under the same name: this one must end, not register again."""


class NodeNotFoundError(ResultsDbError):
    """No allocation of the cluster ever had a node of this name."""


class NodeStateError(ResultsDbError):
    """The node is in a state that does not allow this."""


class MeasurementInvalidError(ResultsDbError):
    """A measurement contradicts itself, or does not suit its layout."""


class ObjectiveUnknownError(ResultsDbError):
    """Nothing is ranked by this name."""


class TokenNotFoundError(ResultsDbError):
    """No token has this id."""


class TokenDuplicateError(ResultsDbError):
    """A valid token has this name already."""


class TokenInvalidError(ResultsDbError):
    """A token cannot be made like this: its name or its end is impossible."""


class ListingInvalidError(ResultsDbError):
    """No part of a leaderboard can be listed like this."""


class SchemaNewerError(ResultsDbError):
    """A newer version of the program wrote the database."""


class SchemaOutdatedError(ResultsDbError):
    """The database has not been upgraded to this version of the program."""


class DatabaseUnavailableError(ResultsDbError):
    """The database does not answer, or cannot be written to just now."""


class DatabaseConflictError(DatabaseUnavailableError):
    """Transactions were in each other's way, and this one was undone: nothing of it was kept."""


class ValueUnstorableError(ResultsDbError):
    """A text is too long or has a NUL in it, or a number is too large, to be kept."""


class RowRefusedError(ResultsDbError):
    """A constraint of the schema stood against it: what must never be was about to be, a fault of ours."""


class DriverLeaseLostError(ResultsDbError):
    """Another driver has taken over: this one may write nothing any more."""


class DatabaseUrlInvalidError(ResultsDbError):
    """The address of a database is none, or that of a kind that is not understood."""


class DatabaseInvalidError(ResultsDbError):
    """The database holds what this version's schema refuses."""


class RetentionInvalidError(ResultsDbError):
    """A setting that says what is kept for how long is none."""


class BackupPathError(ResultsDbError):
    """A backup cannot be written or read where it was named."""


class BackupInvalidError(ResultsDbError):
    """A backup is none, is damaged, or holds what the database cannot keep."""


class DatabaseNotEmptyError(ResultsDbError):
    """A backup would take the place of a database that holds something."""


class DatabaseInUseError(ResultsDbError):
    """A service or a driver works on the database that a backup is to take the place of."""


class DataDirInvalidError(ResultsDbError):
    """The data directory cannot be used."""


class DataDirLockedError(ResultsDbError):
    """Another process works on the data directory."""
