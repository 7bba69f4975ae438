"""The pipeline schedule: what a stage does, and in which order, as a table made by a pure function.

1F1B (arXiv:2006.09503, arXiv:2104.04473): a stage first runs as many forward passes as there are
stages after it, then alternates, so that at most min(m, pp - stage) micro-batches are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Run the stage's forward pass."""

    microbatch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """Run the stage's backward pass."""

    microbatch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Exchange activations and their gradients with both neighbours, all of it at once.

    Each field is a micro-batch, or None. Activations go to and come from the stages on either
    side in the forward direction, gradients in the other.
    """

    send_activation: int | None = None
    receive_activation: int | None = None
    send_gradient: int | None = None
    receive_gradient: int | None = None


Action = Forward | Backward | Transfer


def one_forward_one_backward(stage: int, pp: int, num_microbatches: int) -> list[Action]:
    """The actions of one stage for one step.

    Neighbours' transfers pair up in the same order, so that ranks which block in each transfer
    cannot wait for each other in a circle.
    """
    num_warmup = min(pp - 1 - stage, num_microbatches)
    num_steady = num_microbatches - num_warmup
    actions: list[Action] = []
    for i in range(num_warmup):
        actions += [
            Transfer(receive_activation=i),
            Forward(microbatch=i),
            Transfer(send_activation=i),
        ]
    if num_steady:
        actions.append(Transfer(receive_activation=num_warmup))
    for i in range(num_steady):
        forward = num_warmup + i
        next_forward = forward + 1 if i + 1 < num_steady else None
        actions += [
            Forward(microbatch=forward),
            Transfer(send_activation=forward, receive_gradient=i),
            Backward(microbatch=i),
            Transfer(send_gradient=i, receive_activation=next_forward),
        ]
    for i in range(num_steady, num_microbatches):
        actions += [
            Transfer(receive_gradient=i),
            Backward(microbatch=i),
            Transfer(send_gradient=i),
        ]
    return [trimmed for action in actions if (trimmed := _without_ends(action, stage, pp))]


def _without_ends(action: Action, stage: int, pp: int) -> Action | None:
    """Drops what would cross the first or the last stage's outer edge."""
    if not isinstance(action, Transfer):
        return action
    trimmed = Transfer(
        send_activation=None if stage == pp - 1 else action.send_activation,
        receive_activation=None if stage == 0 else action.receive_activation,
        send_gradient=None if stage == 0 else action.send_gradient,
        receive_gradient=None if stage == pp - 1 else action.receive_gradient,
    )
    return None if trimmed == Transfer() else trimmed
