"""Runs a stage's schedule: passes over micro-batches, and transfers between stages.

Shapes: M micro-batches, T tokens of one, L tokens that a rank sends (T / tp under sequence
parallelism, else T), H hidden.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import P2POp, Work

from workers.trainer.backward import run_backward
from workers.trainer.data import Batch
from workers.trainer.mesh import Mesh
from workers.trainer.model import Stage
from workers.trainer.schedule import Backward, Forward, Transfer, one_forward_one_backward
from workers.trainer.stopwatch import part

_ACTIVATION_TAG: Final = 1
_GRADIENT_TAG: Final = 2


@dataclass(slots=True)
class _InFlight:
    """What a stage holds of the micro-batches that it has begun and not ended."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    """Activations from the previous stage, whose gradient goes back to it."""
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    """Where each backward pass starts: the graph without its output, which is freed once sent."""
    outbox: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    sending: list[tuple[Work, Tensor | None]] = field(default_factory=list)
    """Sends under way, with the tensors that must live until they have ended."""


class Pipeline:
    """One stage of the pipeline, and its part of the schedule.

    Forward: sends activations to the next stage. Backward: sends their gradients to the previous
    one. Both over the pp axis; an axis of one communicates nothing.
    """

    def __init__(self, stage: Stage, mesh: Mesh, *, hidden_size: int, dtype: torch.dtype) -> None:
        layout = mesh.layout
        self.stage, self.mesh, self.dtype, self.hidden_size = stage, mesh, dtype, hidden_size
        self.schedule = one_forward_one_backward(
            mesh.place.pp_rank, layout.pp, layout.num_microbatches
        )
        self.token_shares = layout.tp if mesh.cuts_tokens else 1
        self.loss_scale = 1.0 / (layout.num_microbatches * layout.dp)

    def run(self, batch: Batch) -> tuple[Tensor, int]:
        """Runs forward and backward of every micro-batch; gradients add up in the flat buffer.

        Returns:
            This replica's share of the global batch's mean loss (0 on all but the last stage), and
            the tokens that this stage has embedded (0 on all but the first).
        """
        flight, losses, num_tokens = _InFlight(), [], 0
        for action in self.schedule:
            match action:
                case Forward(microbatch=index):
                    with part("compute"):
                        loss = self._forward(index, batch, flight)
                    losses += [] if loss is None else [loss]
                    num_tokens += batch.ids_MT[index].numel() if self.mesh.is_first_stage else 0
                case Backward(microbatch=index):
                    with part("compute"):
                        self._backward(index, flight)
                case Transfer():
                    with part("pp"):  # waiting for a neighbour is the pipeline's bubble
                        self._transfer(action, batch, flight)
        with part("pp"):
            _await_sends(flight)
        device = batch.ids_MT.device
        total = torch.stack(losses).double().sum() if losses else torch.zeros((), device=device)
        return total * self.loss_scale, num_tokens

    def _forward(self, index: int, batch: Batch, flight: _InFlight) -> Tensor | None:
        first = self.mesh.is_first_stage
        x = batch.ids_MT[index] if first else flight.inputs[index]
        output = self.stage(x, batch.targets_MT[index])
        flight.edges[index] = get_gradient_edge(output)
        if self.mesh.is_last_stage:
            flight.gradients[index] = torch.full_like(output, self.loss_scale)
            return output.detach()  # type: ignore[no-any-return]
        flight.outbox[index] = output.detach()
        return None

    def _backward(self, index: int, flight: _InFlight) -> None:
        run_backward(flight.edges.pop(index), flight.gradients.pop(index))
        if not self.mesh.is_first_stage:
            gradient_LH = flight.inputs.pop(index).grad
            assert gradient_LH is not None
            flight.outbox[index] = gradient_LH.contiguous()

    def _transfer(self, action: Transfer, batch: Batch, flight: _InFlight) -> None:
        """Starts all of it, and waits for what is received; what is sent, until the next time."""
        _await_sends(flight)
        shape = (batch.ids_MT.shape[1] // self.token_shares, self.hidden_size)
        place, operations, received = self.mesh.place.pp_rank, [], []
        for index, peer, tag in (
            (action.receive_activation, place - 1, _ACTIVATION_TAG),
            (action.receive_gradient, place + 1, _GRADIENT_TAG),
        ):
            if index is not None:
                x_LH = torch.empty(shape, dtype=self.dtype, device=batch.ids_MT.device)
                operations.append(self._operation(dist.irecv, x_LH, peer, tag))
                received.append((index, tag, x_LH))
        for index, peer, tag in (
            (action.send_activation, place + 1, _ACTIVATION_TAG),
            (action.send_gradient, place - 1, _GRADIENT_TAG),
        ):
            if index is not None:
                sent_LH = flight.outbox.pop(index)
                operations.append(self._operation(dist.isend, sent_LH, peer, tag))
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # NCCL coalesces the batch into one work
            _wait_all(works)
        else:
            _wait_all(works[: len(received)])
            sends = zip(works, operations, strict=True)
            flight.sending = [(w, op.tensor) for w, op in list(sends)[len(received) :]]
        for index, tag, x_LH in received:
            if tag == _ACTIVATION_TAG:
                flight.inputs[index] = x_LH.requires_grad_()
            else:
                flight.gradients[index] = x_LH

    def _operation(self, kind: object, x_LH: Tensor, pp_rank: int, tag: int) -> P2POp:
        peer = self.mesh.stage_rank(pp_rank)
        return P2POp(kind, x_LH, peer, self.mesh.pp_group, tag)  # type: ignore[arg-type]


def _await_sends(flight: _InFlight) -> None:
    _wait_all([work for work, _ in flight.sending])
    flight.sending = []


def _wait_all(works: list[Work]) -> None:
    for work in works:
        work.wait()
