"""Pipeline schedules: the actions of a rank in a step, in order, made by a pure function.

A rank holds vpp chunks of the model. Chunk c of rank r is stage c * pp + r of pp * vpp stages. m is
the number of micro-batches.

With one chunk the schedule is 1F1B (arXiv:2006.09503). A stage first runs as many forward passes as
there are stages after it, then alternates one forward and one backward pass. At most
min(m, pp - stage) micro-batches are in flight.

With several chunks the schedule is interleaved (arXiv:2104.04473, section 2.2). The bubble shrinks
by a factor of vpp, with vpp times the transfers and more micro-batches in flight.

Two neighbours list their common transfers in the same order. Ranks that block in each transfer
until the peer has started it, as with NCCL, therefore cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class VirtualMicrobatch(NamedTuple):
    """A micro-batch in one chunk of the rank: one forward and one backward pass."""

    chunk: int
    microbatch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Run a chunk's forward pass."""

    of: VirtualMicrobatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """Run a chunk's backward pass."""

    of: VirtualMicrobatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Exchange activations and their gradients with both neighbours, all at the same time.

    Each field names the pass of this rank that made the sent tensor or needs the received one;
    None: no message. Activations go from a stage to the next one, gradients to the previous one.
    Ranks form a ring: after chunk c of the last rank comes chunk c + 1 of the first rank.
    """

    send_activation: VirtualMicrobatch | None = None
    receive_activation: VirtualMicrobatch | None = None
    send_gradient: VirtualMicrobatch | None = None
    receive_gradient: VirtualMicrobatch | None = None


Action = Forward | Backward | Transfer


def pipeline_schedule(pp_rank: int, *, pp: int, vpp: int, num_microbatches: int) -> list[Action]:
    """The actions of one rank for one step.

    With vpp > 1 the micro-batches go in groups of pp, so pp must divide their number.
    """
    if vpp == 1:
        actions = _one_forward_one_backward(pp_rank, pp, num_microbatches)
    else:
        actions = _interleaved(pp_rank, pp, vpp, num_microbatches)
    last_stage = pp * vpp - 1
    return [
        trimmed
        for action in actions
        if (trimmed := _within_model(action, pp_rank, pp=pp, last_stage=last_stage))
    ]


def _one_forward_one_backward(stage: int, pp: int, num_microbatches: int) -> list[Action]:
    virtual = [VirtualMicrobatch(0, i) for i in range(num_microbatches)]
    num_warmup = min(pp - 1 - stage, num_microbatches)
    actions: list[Action] = []
    for each in virtual[:num_warmup]:
        actions += [
            Transfer(receive_activation=each),
            Forward(of=each),
            Transfer(send_activation=each),
        ]
    if num_warmup < num_microbatches:
        actions.append(Transfer(receive_activation=virtual[num_warmup]))
    for backward, forward in zip(virtual, virtual[num_warmup:], strict=False):
        actions += [
            Forward(of=forward),
            Transfer(send_activation=forward, receive_gradient=backward),
            Backward(of=backward),
            Transfer(
                send_gradient=backward, receive_activation=_after(virtual, forward.microbatch)
            ),
        ]
    for each in virtual[num_microbatches - num_warmup :]:
        actions += [
            Transfer(receive_gradient=each),
            Backward(of=each),
            Transfer(send_gradient=each),
        ]
    return actions


def _interleaved(pp_rank: int, pp: int, vpp: int, num_microbatches: int) -> list[Action]:
    """The interleaved schedule, in which every pass is followed by one transfer.

    The transfer sends the output of the pass and receives the input of the next pass of the same
    kind. It runs while a pass of the other kind is computed. For this the warm-up needs two more
    passes for each rank that follows.

    No deadlock: assign the transfer after the k-th forward pass of rank r to forward round k + r,
    and the transfer after its j-th backward pass to backward round j + pp - 1 - r. Both ends of
    every transfer are in the same round. With this warm-up the rounds have the same order on every
    rank: forward round x comes right before backward round x - vpp * pp + 1.
    """
    assert num_microbatches % pp == 0, f"{num_microbatches} micro-batches are not groups of {pp}"
    forwards = _interleaved_order(pp, range(vpp), num_microbatches)
    backwards = _interleaved_order(pp, range(vpp)[::-1], num_microbatches)
    num_warmup = min(2 * (pp - 1 - pp_rank) + (vpp - 1) * pp, len(forwards))
    actions: list[Action] = [Transfer(receive_activation=forwards[0])]
    for k, forward in enumerate(forwards):
        if k >= num_warmup:
            actions += _backward_round(backwards, k - num_warmup - 1)
        following = _after(forwards, k)
        actions.append(Forward(of=forward))
        actions.append(Transfer(send_activation=forward, receive_activation=following))
    for j in range(len(forwards) - num_warmup - 1, len(backwards)):
        actions += _backward_round(backwards, j)
    return actions


def _backward_round(backwards: list[VirtualMicrobatch], j: int) -> list[Action]:
    """The j-th backward pass and its transfer; for j < 0 the transfer before the first pass."""
    if j < 0:
        return [Transfer(receive_gradient=backwards[0])]
    backward = backwards[j]
    transfer = Transfer(send_gradient=backward, receive_gradient=_after(backwards, j))
    return [Backward(of=backward), transfer]


def _interleaved_order(
    pp: int, chunks: Sequence[int], num_microbatches: int
) -> list[VirtualMicrobatch]:
    """Micro-batches in groups of pp; each group passes through all chunks before the next one."""
    return [
        VirtualMicrobatch(chunk, first + i)
        for first in range(0, num_microbatches, pp)
        for chunk in chunks
        for i in range(pp)
    ]


def _after(order: list[VirtualMicrobatch], index: int) -> VirtualMicrobatch | None:
    return order[index + 1] if index + 1 < len(order) else None


def _within_model(action: Action, pp_rank: int, *, pp: int, last_stage: int) -> Action | None:
    """Removes messages before the first stage and after the last one; None if nothing is left."""
    if not isinstance(action, Transfer):
        return action

    def unless(edge: int, virtual: VirtualMicrobatch | None) -> VirtualMicrobatch | None:
        is_edge = virtual is not None and virtual.chunk * pp + pp_rank == edge
        return None if is_edge else virtual

    trimmed = Transfer(
        send_activation=unless(last_stage, action.send_activation),
        receive_activation=unless(0, action.receive_activation),
        send_gradient=unless(0, action.send_gradient),
        receive_gradient=unless(last_stage, action.receive_gradient),
    )
    return None if trimmed == Transfer() else trimmed
