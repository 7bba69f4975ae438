"""Executes a rank's schedule: passes over micro-batches, and transfers between stages.

Shapes: M micro-batches, T tokens of one, L tokens that a rank sends (T / tp under sequence
parallelism, else T), H hidden.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import P2POp

from layout_tuner.search_spaces.layouts.schedules import (
    Backward,
    Forward,
    Transfer,
    VirtualMicrobatch,
    WeightGradients,
    pipeline_schedule,
)
from layout_tuner.workers.trainer.batches import Batch
from layout_tuner.workers.trainer.comm.collectives import Pending
from layout_tuner.workers.trainer.comm.host_lanes import MESSAGE_BYTES
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.backward import run_backward
from layout_tuner.workers.trainer.model.model import Stage
from layout_tuner.workers.trainer.stopwatch import part

_ACTIVATION_TAG: Final = 0
_GRADIENT_TAG: Final = 1


@dataclass(slots=True)
class _InFlight:
    """State of the micro-batches whose backward pass has not ended, and of the current transfer."""

    gradient_scale: float
    inputs: dict[VirtualMicrobatch, Tensor] = field(default_factory=dict)
    """Activations from the previous stage. Their gradients are sent back to it."""
    edges: dict[VirtualMicrobatch, GradientEdge] = field(default_factory=dict)
    """Start of each backward pass in the autograd graph. The output itself is freed once sent."""
    gradients: dict[VirtualMicrobatch, Tensor] = field(default_factory=dict)
    """Gradients of outputs, from the next stage or of the loss."""
    left_out: dict[VirtualMicrobatch, list[Callable[[], None]]] = field(default_factory=dict)
    """The gradients of weights that a backward pass left out."""
    outbox: dict[VirtualMicrobatch, Tensor] = field(default_factory=dict)
    """Activations and gradients that are still to be sent."""
    works: list[Pending] = field(default_factory=list)
    """The messages of the current transfer."""
    received: list[Tensor] = field(default_factory=list)
    """Tensors that the current transfer fills; not to be read before it ends."""
    sent: list[Tensor] = field(default_factory=list)
    """Tensors that the current transfer sends; they must live until it ends."""

    def arrived(self, x_LH: Tensor) -> Tensor:
        """Returns the tensor, after ending the current transfer if that fills it.

        The whole transfer ends: in plain 1F1B the sent tensor goes to the same neighbour at the
        same time, and it is freed before the pass that needs most memory.
        """
        if any(x_LH is received_LH for received_LH in self.received):
            self.end_transfer()
        return x_LH

    def end_transfer(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.received, self.sent = [], [], []


class Pipeline:
    """A rank's stages of the pipeline, and its part of the schedule.

    Forward: sends activations to the next stage over pp. Backward: sends their gradients to the
    previous stage over pp. With pp = 1 nothing is communicated.
    """

    def __init__(
        self, stages: Sequence[Stage], mesh: Mesh, *, hidden_size: int, dtype: torch.dtype
    ) -> None:
        layout = mesh.layout
        self.stages, self.mesh, self.dtype, self.hidden_size = stages, mesh, dtype, hidden_size
        self.schedule = pipeline_schedule(
            mesh.place.pp_rank,
            pp=layout.pp,
            vpp=layout.vpp,
            num_microbatches=layout.num_microbatches,
            schedule=layout.schedule,
        )
        leaves_out = layout.schedule == "zero_bubble"
        self._left_out = [stage.put_off_gradients() for stage in stages] if leaves_out else []
        self.token_shares = layout.tp if mesh.cuts_tokens else 1
        self.loss_scale = 1.0 / (layout.num_microbatches * layout.dp_cp)

    def run(self, batch: Batch, *, gradient_scale: float = 1.0) -> tuple[Tensor, int]:
        """Runs forward and backward of every micro-batch; gradients accumulate in the flat buffer.

        Gradients are multiplied by `gradient_scale`; the returned loss is not.

        Returns:
            This rank's share of the global batch's mean loss (0 on all but the last stage), and
            the number of tokens that this rank embedded (0 on all but the first stage).
        """
        flight, losses, num_tokens = _InFlight(gradient_scale), [], 0
        for action in self.schedule:
            match action:
                case Forward(of=virtual):
                    loss = self._forward(virtual, batch, flight)
                    losses += [] if loss is None else [loss]
                    if self.stages[virtual.chunk].is_first:
                        num_tokens += batch.ids_MT[virtual.microbatch].numel()
                case Backward(of=virtual):
                    self._backward(virtual, flight)
                case WeightGradients(of=virtual):
                    with part("compute"):
                        self._add_gradients(flight.left_out.pop(virtual))
                case Transfer():
                    with part("pp"):
                        self._start(action, batch, flight)
        with part("pp"):
            flight.end_transfer()
        device = batch.ids_MT.device
        total = torch.stack(losses).double().sum() if losses else torch.zeros((), device=device)
        return total * self.loss_scale, num_tokens

    def _forward(
        self, virtual: VirtualMicrobatch, batch: Batch, flight: _InFlight
    ) -> Tensor | None:
        stage = self.stages[virtual.chunk]
        if stage.is_first:
            x = batch.ids_MT[virtual.microbatch]
        else:
            with part("pp"):  # the wait for a neighbour is the pipeline's bubble
                x = flight.arrived(flight.inputs[virtual]).requires_grad_()
        with part("compute"):
            output = stage(x, batch.targets_MT[virtual.microbatch])
            flight.edges[virtual] = get_gradient_edge(output)
        if stage.is_last:
            scale = self.loss_scale * flight.gradient_scale
            flight.gradients[virtual] = torch.full_like(output, scale)
            return output.detach()  # type: ignore[no-any-return]
        flight.outbox[virtual] = output.detach()
        return None

    def _backward(self, virtual: VirtualMicrobatch, flight: _InFlight) -> None:
        with part("pp"):
            gradient = flight.arrived(flight.gradients.pop(virtual))
        with part("compute"):
            run_backward(flight.edges.pop(virtual), gradient)
        if self._left_out:
            waiting = self._left_out[virtual.chunk]
            flight.left_out[virtual] = waiting.copy()
            waiting.clear()
        if not self.stages[virtual.chunk].is_first:
            gradient_LH = flight.inputs.pop(virtual).grad
            assert gradient_LH is not None
            flight.outbox[virtual] = gradient_LH.contiguous()

    @torch.no_grad()
    def _add_gradients(self, left_out: list[Callable[[], None]]) -> None:
        """Adds the gradients of weights; the factors of each product are freed after it."""
        left_out.reverse()
        while left_out:
            left_out.pop()()

    def _start(self, transfer: Transfer, batch: Batch, flight: _InFlight) -> None:
        """Starts a transfer over pp; the pass that needs what it receives waits for it.

        One transfer is in flight at a time. The sent tensors are freed when the next one starts,
        so that memory does not depend on the speed of the peers.
        """
        flight.end_transfer()
        shape = (batch.ids_MT.shape[1] // self.token_shares, self.hidden_size)
        place, messages = self.mesh.place.pp_rank, list[Message]()
        for virtual, peer, tag, expected in (
            (transfer.receive_activation, place - 1, _ACTIVATION_TAG, flight.inputs),
            (transfer.receive_gradient, place + 1, _GRADIENT_TAG, flight.gradients),
        ):
            if virtual is not None:
                x_LH = torch.empty(shape, dtype=self.dtype, device=batch.ids_MT.device)
                messages.append(Message(x_LH, peer % self.mesh.layout.pp, tag, is_sent=False))
                expected[virtual] = x_LH
                flight.received.append(x_LH)
        for virtual, peer, tag in (
            (transfer.send_activation, place + 1, _ACTIVATION_TAG),
            (transfer.send_gradient, place - 1, _GRADIENT_TAG),
        ):
            if virtual is not None:
                x_LH = flight.outbox.pop(virtual)
                messages.append(Message(x_LH, peer % self.mesh.layout.pp, tag, is_sent=True))
                flight.sent.append(x_LH)
        flight.works = start_messages(messages, self.mesh)


class Message(NamedTuple):
    """A tensor that is sent to, or received from, another stage."""

    value: Tensor
    stage: int
    tag: int
    is_sent: bool


def start_messages(messages: Sequence[Message], mesh: Mesh) -> list[Pending]:
    """Starts sends and receives over pp.

    They use shared memory where all of each message fits into it at once. A larger message would
    make no progress while its sender computes.
    """
    assert mesh.pp_group is not None
    lane = mesh.pp_group.lane
    if lane is not None and all(m.value.nbytes <= MESSAGE_BYTES for m in messages):
        return [
            (lane.start_send if m.is_sent else lane.start_receive)(m.value, m.stage, m.tag)
            for m in messages
        ]
    group = mesh.pp_group.process_group
    operations = [
        P2POp(
            dist.isend if m.is_sent else dist.irecv, m.value, mesh.stage_rank(m.stage), group, m.tag
        )
        for m in messages
    ]
    return list(dist.batch_isend_irecv(operations))
