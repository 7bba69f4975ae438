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

zbv, v_half and v_min (arXiv:2405.15362) have two chunks a rank in the shape of a V: the first rank
has the first and the last stage, with the embedding and the loss. Weight gradients are left out as
in zero_bubble. Each rank repeats six passes, F and B and W of both chunks, one micro-batch after
the other; the ranks of a chunk start its passes some slots after each other. The slots decide how
long activations are held: those of at most 2 pp, pp + 2 and about 2 pp / 3 + 2 passes of a chunk,
where 1f1b holds those of 2 pp.

Two neighbours list their common transfers in the same order. Ranks that block in each transfer
until the peer has started it, as with NCCL, therefore cannot deadlock. V-shaped schedules list
their passes alone: the trainers that have them exchange tensors asynchronously.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple

Schedule = Literal["1f1b", "gpipe", "zero_bubble", "zbv", "v_half", "v_min"]

V_SLOTS: Final[dict[Schedule, tuple[int, int]]] = {"zbv": (4, 2), "v_half": (2, 1), "v_min": (1, 1)}
"""Of V-shaped schedules, the slots by which neighbours start a pass after each other: F of the
first chunk and B of the second one, which go to later ranks, and the other two, which go back."""
_SLOTS: Final = 6
"""Passes of a micro-batch on a rank: F, B and W of two chunks."""


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
_PassType = type[Forward] | type[Backward] | type[WeightGradients]


def pipeline_schedule(
    pp_rank: int, *, pp: int, vpp: int, num_microbatches: int, schedule: Schedule = "1f1b"
) -> list[Action]:
    """The actions of one rank for one step.

    With vpp > 1 the micro-batches go in groups of pp, so pp must divide their number. Another
    schedule than 1f1b has one chunk a rank; V-shaped ones have two, with any micro-batches.
    """
    if schedule in V_SLOTS:
        assert vpp == 2, f"{schedule} has two chunks a rank"
        return _v_shaped(pp_rank, pp, num_microbatches, schedule)
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


def splits_backward(schedule: Schedule) -> bool:
    """Whether backward passes leave out the products of weight gradients."""
    return schedule == "zero_bubble" or schedule in V_SLOTS


def stage_of(chunk: int, rank: int, pp: int, schedule: Schedule) -> int:
    """The stage that is a chunk of a rank."""
    is_back = schedule in V_SLOTS and chunk % 2
    return chunk * pp + (pp - 1 - rank if is_back else rank)


def _v_shaped(pp_rank: int, pp: int, num_microbatches: int, schedule: Schedule) -> list[Action]:
    """The passes by the slots of `_v_block`; those of each micro-batch begin six slots later.

    A pass has a later slot than all that it needs, on whatever rank, so that the order of slots has
    no deadlock.
    """
    block = [(ranks[pp_rank], of, chunk) for (of, chunk), ranks in _v_block(pp, schedule).items()]
    passes: list[tuple[int, Action]] = [
        (slot + _SLOTS * each, of(of=VirtualMicrobatch(chunk, each)))
        for slot, of, chunk in block
        for each in range(num_microbatches)
    ]
    return [action for _, action in sorted(passes, key=lambda each: each[0])]


@lru_cache(maxsize=256)
def _v_block(pp: int, schedule: Schedule) -> dict[tuple[_PassType, int], list[int]]:
    """The slots of a micro-batch's passes on every rank, by pass and chunk.

    Two passes of a rank differ modulo six. A chunk's passes begin as early as this allows.
    """
    later, back = V_SLOTS[schedule]
    there, return_ = [later * rank for rank in range(pp)], [back * (pp - 1 - r) for r in range(pp)]
    block: dict[tuple[_PassType, int], list[int]] = {}
    taken: list[set[int]] = [set() for _ in range(pp)]

    def is_taken(slots: Sequence[int]) -> bool:
        return any(slot % _SLOTS in of for slot, of in zip(slots, taken, strict=True))

    first = 0
    order: list[tuple[_PassType, int, list[int]]] = [
        (Forward, 0, there),
        (Forward, 1, return_),
        (Backward, 1, there),
        (Backward, 0, return_),
    ]
    for of, chunk, steps in order:
        while is_taken(slots := [first + step for step in steps]):
            first += 1
        block[of, chunk] = slots
        for slot, of_rank in zip(slots, taken, strict=True):
            of_rank.add(slot % _SLOTS)
        first = max(slots) + 1
    for chunk in (1, 0):
        slots = []
        for rank, after in enumerate(block[Backward, chunk]):
            free = (after + k for k in range(1, _SLOTS + 1))
            slots.append(next(slot for slot in free if slot % _SLOTS not in taken[rank]))
            taken[rank].add(slots[-1] % _SLOTS)
        block[WeightGradients, chunk] = slots
    return block


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
