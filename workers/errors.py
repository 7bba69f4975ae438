"""Errors of the workers; with one base, so that a command can print any of them as one line."""

from __future__ import annotations

from layout_tuner.errors import LayoutTunerError, SearchSpaceError


class WorkerError(LayoutTunerError):
    """Base of all errors of `workers` outside the trainer."""


class NodeError(WorkerError):
    """A node can't be used.

    Args:
        message: why.
        node: position of the node in its set; None: the set has one node, or it is not known.
    """

    def __init__(self, message: str, node: int | None = None) -> None:
        super().__init__(message)
        self.node = node


class NodeLostError(NodeError):
    """A node's agent, warden or zygote has ended; the remaining ones end the node's ranks."""


class RanksLeftError(NodeError):
    """Processes of a probe could not be ended; the node must not be used again."""


class MemoryNotBackError(RanksLeftError):
    """A group ended, but less memory is free than before it; the node must not be used."""


class CoresForbiddenError(WorkerError):
    """This process may use none of the cores of a rank."""


class PlacementImpossibleError(WorkerError):
    """A layout needs more devices than the launcher's nodes have."""


class TrainerUnknownError(WorkerError):
    """A probe names a trainer that the worker's owner has not listed."""


class DeviceHiddenError(WorkerError):
    """The node's environment hides the device of a rank."""


class LauncherUnavailableError(WorkerError):
    """A package that the launcher needs is not installed."""


class RayClusterFailedError(WorkerError):
    """The worker's Ray cluster could not be started or joined."""


class ServiceUnreachableError(WorkerError):
    """The service did not answer, or answered that it can't at the moment; a retry may help."""


class ServiceFailedError(WorkerError):
    """The service failed over this request; other requests, or a later retry, may work."""


class TokenRefusedError(WorkerError):
    """The service does not accept the token; a retry does not help."""


class WorkerUnknownError(WorkerError):
    """The service does not know this session (any more); the worker must register again."""


class WorkerReplacedError(WorkerError):
    """Another worker has registered under this name; registering again would end its session."""


class RequestRefusedError(WorkerError):
    """The service refuses the request; a retry does not help."""


class ContentRefusedError(RequestRefusedError):
    """The service refuses what the request says; `why` is in its own words."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class AnswerUnreadableError(RequestRefusedError):
    """The answer does not follow the worker protocol: it is that of another program or a proxy."""


class CalibrationFailedError(WorkerError):
    """The machine's constants could not be measured."""


class AllocationMissingError(WorkerError):
    """The request works only inside a Slurm job."""


class SpoolInUseError(WorkerError):
    """Another worker process of the same name uses the spool directory."""


class SpoolUnusableError(WorkerError):
    """The spool directory can't be created, read or written."""


class ScenarioUnknownError(WorkerError):
    """No simulation has the requested name."""


class AllocationInvalidError(WorkerError, SearchSpaceError):
    """A requested allocation is impossible at its site; the message names the option."""


class SlurmUnavailableError(WorkerError):
    """Slurm is not installed here, or does not answer."""


class SlurmRefusedError(WorkerError):
    """Slurm refuses a request."""


class TopologyUnusableError(WorkerError):
    """A topology can't be read, or contradicts the nodes; probes are placed as without one."""


class JobNotOursError(WorkerError):
    """The job is not an allocation that this user submitted with layout-tuner."""
