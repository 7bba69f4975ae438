"""Errors of the worker room; one base, so that a command can turn any of them into one line."""


class WorkerError(Exception):
    """Base of everything that `workers` raises outside the trainer."""


class NodeLostError(WorkerError):
    """A node's agent, warden or zygote is gone; its ranks are ended by whichever is left.

    Args:
        message: how that showed.
        node: position of the node in its set; None: it is none of several.
    """

    def __init__(self, message: str, node: int | None = None) -> None:
        super().__init__(message)
        self.node = node


class RanksLeftError(WorkerError):
    """Processes of a probe could not be ended; the node must not be used again.

    Args:
        message: which.
        node: position of the node in its set; None: it is none of several.
    """

    def __init__(self, message: str, node: int | None = None) -> None:
        super().__init__(message)
        self.node = node


class MemoryNotBackError(RanksLeftError):
    """A group left no process, but less free memory than before it; the node must not be used."""


class CoresForbiddenError(WorkerError):
    """A rank shall run on cores none of which this process may use."""


class PlacementImpossibleError(WorkerError):
    """A layout needs more devices than the launcher's nodes have."""


class DeviceHiddenError(WorkerError):
    """A rank's device is not among those that the node's environment shows."""


class RayClusterFailedError(WorkerError):
    """The worker's Ray cluster could not be started or joined."""


class ServiceUnreachableError(WorkerError):
    """The service did not answer, or answered that it cannot work now; worth trying again."""


class ServiceFailedError(WorkerError):
    """The service broke down over this request; others may fare better, and this one later."""


class TokenRefusedError(WorkerError):
    """The service does not accept the token; trying again is useless."""


class WorkerUnknownError(WorkerError):
    """The service does not know this worker (any more): register again."""


class WorkerSupersededError(WorkerError):
    """Another worker has registered under this one's name; registering again would evict it."""


class RequestRefusedError(WorkerError):
    """The service understood the request and refuses it for good."""


class AnswerUnreadableError(RequestRefusedError):
    """What answers does not speak the worker protocol: another program, or a proxy's own page."""


class CalibrationFailedError(WorkerError):
    """The machine's constants could not be measured."""


class AllocationMissingError(WorkerError):
    """What was asked for works inside a Slurm job alone."""


class SpoolInUseError(WorkerError):
    """Another worker process of the same name uses the spool directory."""


class SpoolUnusableError(WorkerError):
    """The spool directory can't be created, read or written."""


class UrlInvalidError(WorkerError):
    """The service's address is no HTTP address."""
