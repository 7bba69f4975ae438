"""Runs schedule tables without processes: ranks compute, start transfers, and wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from layout_tuner.search_spaces.layouts.schedules import (
    Action,
    Backward,
    Forward,
    Schedule,
    Transfer,
    WeightGradients,
    pipeline_schedule,
)


class Message(NamedTuple):
    """What one stage makes of a micro-batch, and a neighbour needs."""

    kind: str
    from_stage: int
    to_stage: int
    microbatch: int


def tables(
    pp: int, vpp: int, num_microbatches: int, schedule: Schedule = "1f1b"
) -> list[list[Action]]:
    """The actions of every rank."""
    sizes = {"pp": pp, "vpp": vpp, "num_microbatches": num_microbatches}
    return [pipeline_schedule(rank, **sizes, schedule=schedule) for rank in range(pp)]


def sent_by(transfer: Transfer, rank: int, pp: int) -> list[Message]:
    """What a rank's transfer sends."""
    sent = ("activation", 1, transfer.send_activation), ("gradient", -1, transfer.send_gradient)
    return [
        Message(kind, of.chunk * pp + rank, of.chunk * pp + rank + step, of.microbatch)
        for kind, step, of in sent
        if of is not None
    ]


def received_by(transfer: Transfer, rank: int, pp: int) -> list[Message]:
    """What a rank's transfer receives."""
    received = (
        ("activation", 1, transfer.receive_activation),
        ("gradient", -1, transfer.receive_gradient),
    )
    return [
        Message(kind, of.chunk * pp + rank - step, of.chunk * pp + rank, of.microbatch)
        for kind, step, of in received
        if of is not None
    ]


@dataclass
class SimulatedRanks:
    """A message passes once both ends have started its transfers: nothing is buffered.

    A blocking rank waits in a transfer until all of it has passed, as a stream does on NCCL. A rank
    that does not block computes on, as the trainer does: it waits for the inputs that it needs, and
    for its last transfer before it starts the next one.
    """

    pp: int
    vpp: int
    num_microbatches: int
    blocking: bool = True
    forward_time: float = 1.0
    backward_time: float = 2.0
    """With the products of the weight gradients."""
    weight_time: float = 1.0
    transfer_time: float = 0.0
    schedule: Schedule = "1f1b"
    started: dict[tuple[int, Message], float] = field(default_factory=dict)
    """When a rank started the transfer that a message belongs to."""

    def run(self) -> float:
        """The time at which the last rank has ended.

        Raises:
            AssertionError: ranks wait for each other in a circle, or something is computed or sent
                before it can be.
        """
        ends = [0.0] * self.pp
        ranks = {
            rank: self._run_rank(rank, actions, ends)
            for rank, actions in enumerate(
                tables(self.pp, self.vpp, self.num_microbatches, self.schedule)
            )
        }
        while ranks:
            before, running = len(self.started), len(ranks)
            for rank in list(ranks):
                if next(ranks[rank], None) is None:
                    del ranks[rank]
            moved = len(self.started) > before or len(ranks) < running
            assert moved, f"ranks {list(ranks)} wait for each other"
        return max(ends)

    def _run_rank(self, rank: int, actions: list[Action], ends: list[float]) -> Iterator[str]:
        """Yields whenever the rank has to wait for one that has not come so far."""
        made: set[Message] = set()
        posted: set[Message] = set()
        under_way: list[Message] = []
        for action in actions:
            if isinstance(action, Transfer):
                yield from self._await(rank, under_way, ends)
                sent, received = sent_by(action, rank, self.pp), received_by(action, rank, self.pp)
                assert made.issuperset(sent), "sent before it was made"
                under_way = sent + received
                posted.update(received)
                self.started.update({(rank, message): ends[rank] for message in under_way})
                if self.blocking:
                    yield from self._await(rank, under_way, ends)
            elif isinstance(action, WeightGradients):
                assert Message("gradient", rank, rank - 1, action.of.microbatch) in made
                ends[rank] += self.weight_time
            else:
                needs, makes = self._needs_and_makes(rank, action)
                assert posted.issuperset(needs), f"rank {rank} lacks the input of {action}"
                yield from self._await(rank, needs, ends)
                late = self.weight_time if self.schedule == "zero_bubble" else 0.0
                is_forward = isinstance(action, Forward)
                ends[rank] += self.forward_time if is_forward else self.backward_time - late
                made.add(makes)
        yield from self._await(rank, under_way, ends)

    def _await(self, rank: int, needed: list[Message], ends: list[float]) -> Iterator[str]:
        for message in needed:
            peers = [stage % self.pp for stage in (message.from_stage, message.to_stage)]
            while not all((peer, message) in self.started for peer in peers):
                yield "waiting"
            start = max(self.started[peer, message] for peer in peers)
            ends[rank] = max(ends[rank], start + self.transfer_time)

    def _needs_and_makes(
        self, rank: int, action: Forward | Backward
    ) -> tuple[list[Message], Message]:
        stage, microbatch = action.of.chunk * self.pp + rank, action.of.microbatch
        if isinstance(action, Forward):
            needs = [Message("activation", stage - 1, stage, microbatch)] if stage > 0 else []
            return needs, Message("activation", stage, stage + 1, microbatch)
        is_last = stage == self.pp * self.vpp - 1
        needs = [] if is_last else [Message("gradient", stage + 1, stage, microbatch)]
        return needs, Message("gradient", stage, stage - 1, microbatch)
