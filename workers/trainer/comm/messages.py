"""Small JSON documents that ranks exchange. Nothing that comes over the network is unpickled.

The rendezvous store of the ranks has no password. A process that reaches it could take a rank's
place, and a pickle that it sends could run any code in the other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from layout_tuner.errors import SearchSpaceError
from layout_tuner.workers.trainer.errors import MessageInvalidError, TrainerError

MAX_BYTES: Final = 1 << 20
"""Largest size of one rank's document: those of a thousand ranks fit into a host's memory."""


def gather_documents(document: Any, device: torch.device) -> list[Any]:
    """Every rank's document, in the order of the ranks.

    Communicates: an all-gather of the lengths over all ranks of the job, then one of the documents.

    Raises:
        MessageInvalidError: on every rank, where a document is too long or is not JSON.
    """
    own = _encoded(document, device)
    num_ranks = dist.get_world_size()
    length = torch.tensor([own.numel()], device=device)
    lengths = [torch.zeros_like(length) for _ in range(num_ranks)]
    dist.all_gather(lengths, length)
    sizes = [_checked(int(one.item()), rank) for rank, one in enumerate(lengths)]
    padded = own.new_zeros(max(sizes))
    padded[: own.numel()] = own
    found = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(found, padded)
    return [
        _decoded(one[:size], rank)
        for rank, (one, size) in enumerate(zip(found, sizes, strict=True))
    ]


def broadcast_document(document: Any, *, source: int, device: torch.device) -> Any:
    """The document of rank `source`, on every rank; those of the others are ignored.

    Communicates: a broadcast of the length over all ranks of the job, then one of the document.

    Raises:
        MessageInvalidError: on every rank, where the document is too long or is not JSON.
    """
    is_source = dist.get_rank() == source
    own = _encoded(document, device) if is_source else None
    length = torch.tensor([0 if own is None else own.numel()], device=device)
    dist.broadcast(length, src=source)
    size = _checked(int(length.item()), source)
    sent = torch.empty(size, dtype=torch.uint8, device=device) if own is None else own
    dist.broadcast(sent, src=source)
    return _decoded(sent, source)


@contextmanager
def reading_from(rank: int) -> Iterator[None]:
    """Turns errors of a document's missing fields, types and values into MessageInvalidError."""
    try:
        yield
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        TrainerError,
        SearchSpaceError,
    ) as error:
        raise _invalid(rank, f"has no readable fields: {error!r}") from error


def _encoded(document: Any, device: torch.device) -> Tensor:
    content = bytearray(json.dumps(document).encode())
    return torch.frombuffer(content, dtype=torch.uint8).to(device)


def _checked(size: int, rank: int) -> int:
    if not 0 < size <= MAX_BYTES:
        raise _invalid(rank, f"is {size} bytes long, and 1 to {MAX_BYTES} are read")
    return size


def _decoded(sent: Tensor, rank: int) -> Any:
    try:
        return json.loads(sent.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise _invalid(rank, f"is no JSON: {error}") from error


def _invalid(rank: int, why: str) -> MessageInvalidError:
    return MessageInvalidError(
        f"what rank {rank} sent {why}; all ranks must be of the same version, and no other process "
        "may take part in their rendezvous"
    )
