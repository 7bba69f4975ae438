"""Saves and loads the state of a training job with torch.distributed.checkpoint.

Every tensor is stored under a canonical name, in the shape of the logical parameter, divided into
the rectangles that the ranks own. A rank that loads requests the rectangles of its own layout.
Importing this module takes a second, so only jobs that save or load import it.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from layout_tuner.workers.trainer.errors import CheckpointFailedError
from layout_tuner.workers.trainer.parallel.flat_buffers import Rectangle, rectangles
from layout_tuner.workers.trainer.training import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A rectangle of a stored tensor, and this rank's memory that holds it."""

    path: tuple[str, ...]
    """Keys of the tensor in the stored state; joined by dots, they are its name."""
    rectangle: Rectangle
    value: Tensor
    """A view of the rank's fp32 state, in the shape of the rectangle."""
    bucket: int
    """The bucket of the flat buffers that contains it."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Offsets and sizes in the stored tensor."""
        return ChunkStorageMetadata(
            offsets=torch.Size(self.rectangle.offsets), sizes=torch.Size(self.rectangle.sizes)
        )

    def write_item(self) -> WriteItem:
        return WriteItem(
            index=MetadataIndex(self.name, self.rectangle.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=self.chunk,
                properties=TensorProperties(dtype=self.value.dtype),
                size=torch.Size(self.rectangle.part.shape),
            ),
        )


def save_state(training: Training, folder: Path) -> None:
    """Writes every rank's part of weights and moments to a folder, and syncs it to disk.

    Weights are stored in fp32: the master weights, in bf16 and fp16. All ranks call it.

    Communicates: plans and results, over all ranks.

    Raises:
        CheckpointFailedError: on every rank, if any rank could not write.
    """
    pieces = [piece for piece in state_pieces(training) if _is_written(training, piece)]
    _on_all_ranks(
        "saved",
        folder,
        lambda: save({}, storage_writer=FileSystemWriter(folder), planner=_SavePieces(pieces)),
    )


def load_state(training: Training, folder: Path) -> None:
    """Loads weights and moments from a folder that any layout saved. All ranks call it.

    Communicates: plans and results over all ranks; then weights over the shard group (ZeRO-1).

    Raises:
        CheckpointFailedError: on every rank, if any rank could not read.
    """
    pieces = list(state_pieces(training))
    with torch.no_grad():
        _on_all_ranks(
            "loaded",
            folder,
            lambda: load({}, storage_reader=FileSystemReader(folder), planner=_LoadPieces(pieces)),
        )
        training.optimizer.publish_weights()


def state_pieces(training: Training) -> Iterator[Piece]:
    """All state of this rank's optimizer: fp32 weights, and AdamW's moments."""
    optimizer = training.optimizer
    for index, span in enumerate(optimizer.spans):
        states: dict[tuple[str, ...], Tensor] = {("model",): optimizer.masters[index]}
        if optimizer.first_moments:
            states["optimizer", "exp_avg"] = optimizer.first_moments[index]
            states["optimizer", "exp_avg_sq"] = optimizer.second_moments[index]
        for rectangle in rectangles(training.flat.slots, span):
            for keys, state in states.items():
                value = state[rectangle.start - span.start : rectangle.end - span.start]
                yield Piece(
                    path=(*keys, rectangle.part.name),
                    rectangle=rectangle,
                    value=value.detach().view(rectangle.sizes),
                    bucket=index,
                )


def _is_written(training: Training, piece: Piece) -> bool:
    """Whether this rank, of all ranks that hold the same values, writes the piece.

    The replicas of a shard take turns by bucket, so that all of them write.
    """
    if not piece.rectangle.parameter.counted:
        return False
    copies = training.flat.copies[piece.bucket]
    return piece.bucket % copies.num_replicas == copies.replica_rank


class _SavePieces(DefaultSavePlanner):
    """Plans what this rank stores. The base class checks that pieces cover every tensor once."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        self._pieces = {MetadataIndex(p.name, p.rectangle.offsets): p for p in pieces}

    def create_local_plan(self) -> SavePlan:
        pieces = self._pieces.values()
        self.plan = SavePlan(
            [piece.write_item() for piece in pieces],
            planner_data={piece.name: piece.path for piece in pieces},
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._pieces[write_item.index].value


class _LoadPieces(DefaultLoadPlanner):
    """Plans how this rank's pieces are filled from the stored rectangles."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        self._pieces = {MetadataIndex(p.name, p.rectangle.offsets): p for p in pieces}

    def create_local_plan(self) -> LoadPlan:
        metadata = cast("Metadata", self.metadata)
        by_name: dict[str, list[Piece]] = {}
        for piece in self._pieces.values():
            by_name.setdefault(piece.name, []).append(piece)
        items: list[ReadItem] = []
        for name, pieces in by_name.items():
            stored = metadata.state_dict_metadata.get(name)
            shape = torch.Size(pieces[0].rectangle.part.shape)
            if not isinstance(stored, TensorStorageMetadata) or stored.size != shape:
                found = "nothing" if stored is None else tuple(getattr(stored, "size", ()))
                raise CheckpointFailedError(
                    f"it holds {found} for {name}, which is {tuple(shape)} in this model"
                )
            items += create_read_items_for_chunk_list(name, stored, [p.chunk for p in pieces])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        value = self._pieces[read_item.dest_index].value
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            value = value.narrow(dim, start, length)
        return value


def _on_all_ranks(what: str, folder: Path, act: Callable[[], Any]) -> None:
    """Runs an action of all ranks; if it fails, every rank raises the reason of the first one."""
    try:
        act()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        text = str(cause).strip().splitlines()
        reason = ": ".join([type(cause).__name__, *text[:1]])
        # torch's writer does not always report a full disk, so the message has the free space.
        free_gib = shutil.disk_usage(folder.parent).free / 2**30
        raise CheckpointFailedError(
            f"the checkpoint {folder} could not be {what}: rank {rank}: {reason} "
            f"({free_gib:.1f} GiB are free there)"
        ) from error
