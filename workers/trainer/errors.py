"""Errors of the trainer, with one base class that distinguishes them from torch's."""


class TrainerError(RuntimeError):
    """Base class of the trainer's errors."""


class MemoryLimitExceededError(TrainerError):
    """A rank needs more memory than its limit, the memory of one device."""


class LossDivergedError(TrainerError):
    """The loss or the gradient norm is not a finite number."""


class ResultImplausibleError(TrainerError):
    """The counted FLOP/s are above the peak of the device."""


class CompilerMissingError(TrainerError):
    """Compilation was requested, and torch finds no compiler."""


class TrainerOptionInvalidError(TrainerError):
    """An option of the trainer is unknown, has a wrong value, or cannot be used here."""


class LayoutUnsupportedError(TrainerError):
    """The trainer cannot run this layout or model."""


class RankContextInvalidError(TrainerError):
    """The started ranks do not match the layout, or the machine has no such device."""


class TrainJobInvalidError(TrainerError):
    """A job file is malformed; the message names the field."""


class TrainingTokensInvalidError(TrainerError):
    """A token file cannot be used; the message names the file and what to do."""


class CheckpointInvalidError(TrainerError):
    """This job cannot use a checkpoint, or the directory of checkpoints."""


class CheckpointFailedError(TrainerError):
    """A checkpoint could not be saved or loaded; the message has the reason of the first rank."""


class MessageInvalidError(TrainerError):
    """A document from another rank cannot be read; the message names the rank."""


class PeerLostError(TrainerError):
    """A rank that this one waits for has ended or made no progress; its error is the cause."""
