"""Pipeline schedules: the actions of a rank in a step, in order, made by a pure function.

A rank holds vpp chunks of the model. Chunk c of rank r is stage c * pp + r of pp * vpp stages. m is
the number of micro-batches.

1f1b (arXiv:2006.09503): a stage first runs as many forward passes as there are stages after it,
then alternates one forward and one backward pass. At most min(m, pp - stage) micro-batches are in
flight.

1f1b with several chunks is interleaved (arXiv:2104.04473, section 2.2). The bubble shrinks by a
factor of vpp, with vpp times the transfers and more micro-batches in flight.

gpipe (arXiv:1811.06965): all forward passes, then all backward passes. The bubble is that of 1f1b,
and all m micro-batches are in flight.

zero_bubble (ZB-H1 of arXiv:2401.10241): 1f1b whose backward passes leave out the products of the
weight gradients. A stage runs these later, as many micro-batches later as there are stages before
it, so that no stage holds more micro-batches than the first one does. The bubble of (pp - 1) (F + B
+ W) becomes (pp - 1) (F + B - W), for a forward pass F, a backward pass B without the products, and
the products W. With m < pp micro-batches it is (pp - 1) (F + B) - (m - 1) W.

Two neighbours list their common transfers in the same order. Ranks that block in each transfer
until the peer has started it, as with NCCL, therefore cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Schedule = Literal["1f1b", "gpipe", "zero_bubble"]


class VirtualMicrobatch(NamedTuple):
    """A micro-batch in one chunk of the rank: one forward and one backward pass."""

    chunk: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class _Pass:
    of: VirtualMicrobatch


class Forward(_Pass):
    """Run a chunk's forward pass."""


class Backward(_Pass):
    """Run a chunk's backward pass."""


class WeightGradients(_Pass):
    """Run the products of the weight gradients that a chunk's backward pass left out."""


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


Action = Forward | Backward | WeightGradients | Transfer


def pipeline_schedule(
    pp_rank: int, *, pp: int, vpp: int, num_microbatches: int, schedule: Schedule = "1f1b"
) -> list[Action]:
    """The actions of one rank for one step.

    With vpp > 1 the micro-batches go in groups of pp, so pp must divide their number. Another
    schedule than 1f1b has one chunk a rank.
    """
    assert vpp == 1 or schedule == "1f1b", f"{schedule} is not interleaved"
    if schedule == "gpipe":
        actions = _passes_by_kind(pp, 1, num_microbatches, num_warmup=num_microbatches)
    elif vpp > 1:
        actions = _interleaved(pp_rank, pp, vpp, num_microbatches)
    else:
        actions = _one_forward_one_backward(pp_rank, pp, num_microbatches)
    if schedule == "zero_bubble":
        actions = list(_with_late_weight_gradients(actions, num_late=pp_rank))
    if 0 < pp_rank < pp - 1:  # only the first and the last rank hold the ends of the model
        return actions
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
    num_warmup = min(2 * (pp - 1 - pp_rank) + (vpp - 1) * pp, vpp * num_microbatches)
    return _passes_by_kind(pp, vpp, num_microbatches, num_warmup=num_warmup)


def _passes_by_kind(pp: int, vpp: int, num_microbatches: int, *, num_warmup: int) -> list[Action]:
    """Some forward passes first, then one forward and one backward pass in turn.

    Every pass is followed by one transfer of its kind.
    """
    forwards = _interleaved_order(pp, range(vpp), num_microbatches)
    backwards = _interleaved_order(pp, range(vpp)[::-1], num_microbatches)
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


def _with_late_weight_gradients(actions: list[Action], *, num_late: int) -> Iterator[Action]:
    """Adds the weight gradients of each backward pass, `num_late` micro-batches later.

    They run before the next pass, once the transfers in between have been started.
    """
    left_out: deque[VirtualMicrobatch] = deque()
    is_due = False
    for action in actions:
        if not isinstance(action, Transfer) and is_due:
            is_due = False
            if len(left_out) > num_late:
                yield WeightGradients(of=left_out.popleft())
        yield action
        if isinstance(action, Backward):
            left_out.append(action.of)
            is_due = True
    yield from (WeightGradients(of=each) for each in left_out)


def _interleaved_order(
    pp: int, chunks: Sequence[int], num_microbatches: int
) -> list[VirtualMicrobatch]:
    """Micro-batches in groups of pp; each group passes through all chunks before the next one."""
    return [
        VirtualMicrobatch(chunk, first + i)
        for first in range(0, num_microbatches, pp)
        for chunk in chunks
        for i in range(min(pp, num_microbatches - first))
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
