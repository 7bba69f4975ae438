"""Errors of the trainer; one base, so that a rank can tell them from torch's."""


class TrainerError(RuntimeError):
    """Base of everything that the trainer raises on its own account."""


class MemoryLimitExceededError(TrainerError):
    """A rank needs more memory than the device it stands for has."""


class LossDivergedError(TrainerError):
    """The loss or the gradient norm is not a finite number."""


class ResultImplausibleError(TrainerError):
    """More work a second was counted than the device can do."""


class CompilerMissingError(TrainerError):
    """Compilation was asked for where torch has nothing to compile with."""


class LayoutUnsupportedError(TrainerError):
    """The layout or the model asks for something that this trainer cannot do."""


class RankContextInvalidError(TrainerError):
    """The ranks that were started do not fit the layout."""


class TrainJobInvalidError(TrainerError):
    """A job file is malformed; the message names the field."""


class TokenFileInvalidError(TrainerError):
    """A token file cannot be trained on; the message names the file, and what to do."""


class CheckpointInvalidError(TrainerError):
    """A checkpoint, or the directory for them, is none that this job can use."""


class CheckpointFailedError(TrainerError):
    """A checkpoint could not be saved or loaded; the message has the first rank's reason."""


class PeerLostError(TrainerError):
    """A rank that this one waits for has ended, or does not come; its own error is the cause."""
