"""Saves and loads the state of a training job with torch.distributed.checkpoint.

Every tensor is stored whole under a canonical name, in the shape of the logical parameter, and cut
into the rectangles that the ranks own; whatever layout reads it asks for other rectangles of the
same tensors. Importing this module takes a second: only jobs that save or load do.
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

from workers.trainer.errors import CheckpointFailedError
from workers.trainer.logical import Rectangle, rectangles
from workers.trainer.training import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A rectangle of a stored tensor, and the memory of this rank that it is saved from."""

    path: tuple[str, ...]
    """Keys that lead to the tensor in the state that is stored; joined, they are its name."""
    rectangle: Rectangle
    value: Tensor
    """A view of the rank's fp32 state, in the rectangle's sizes."""
    bucket: int
    """Bucket of the flat buffers that it lies in."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies in the tensor."""
        return ChunkStorageMetadata(
            offsets=torch.Size(self.rectangle.offsets), sizes=torch.Size(self.rectangle.sizes)
        )

    def write_item(self) -> WriteItem:
        """The order to store it."""
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

    Weights are stored in fp32: the masters, where a layout computes in less. All ranks call it.

    Raises:
        CheckpointFailedError: on every rank, if any of them could not write.
    """
    pieces = [piece for piece in state_pieces(training) if _is_written(training, piece)]
    _together(
        "saved",
        folder,
        lambda: save({}, storage_writer=FileSystemWriter(folder), planner=_SavePieces(pieces)),
    )


def load_state(training: Training, folder: Path) -> None:
    """Fills weights and moments from a folder, saved under whatever layout. All ranks call it.

    Raises:
        CheckpointFailedError: on every rank, if any of them could not read.
    """
    pieces = list(state_pieces(training))
    with torch.no_grad():
        _together(
            "loaded",
            folder,
            lambda: load({}, storage_reader=FileSystemReader(folder), planner=_LoadPieces(pieces)),
        )
        training.optimizer.publish_weights()


def state_pieces(training: Training) -> Iterator[Piece]:
    """Everything that this rank's optimizer holds: fp32 weights, and the moments if there are any."""
    optimizer, mesh = training.optimizer, training.mesh
    for index, span in enumerate(optimizer.spans):
        states: dict[tuple[str, ...], Tensor] = {("model",): optimizer.masters[index]}
        if optimizer.first_moments:
            states["optimizer", "exp_avg"] = optimizer.first_moments[index]
            states["optimizer", "exp_avg_sq"] = optimizer.second_moments[index]
        for rectangle in rectangles(
            training.flat.slots, span, tp=mesh.layout.tp, tp_rank=mesh.place.tp_rank
        ):
            for keys, state in states.items():
                value = state[rectangle.start - span.start : rectangle.end - span.start]
                yield Piece(
                    path=(*keys, rectangle.part.name),
                    rectangle=rectangle,
                    value=value.detach().view(rectangle.sizes),
                    bucket=index,
                )


def _is_written(training: Training, piece: Piece) -> bool:
    """Whether this rank is the one of those that hold the same numbers which stores them.

    Buckets go round the replicas that hold the same shard, so that all of them write.
    """
    mesh, parameter = training.mesh, piece.rectangle.parameter
    if not parameter.counted or (parameter.replicated and mesh.place.tp_rank > 0):
        return False
    return piece.bucket % (mesh.layout.dp // mesh.num_shards) == mesh.replica_rank


class _SavePieces(DefaultSavePlanner):
    """Plans to store pieces; the default's global plan checks that they cover every tensor once."""

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
    """Plans to fill pieces from whatever rectangles are stored."""

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


def _together(what: str, folder: Path, act: Callable[[], Any]) -> None:
    """Runs what all ranks do together; the first rank's reason is raised on each of them."""
    try:
        act()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        # torch's writer does not always pass on that the disk was full; how full it is says so.
        free_gib = shutil.disk_usage(folder.parent).free / 2**30
        raise CheckpointFailedError(
            f"the checkpoint {folder} could not be {what}: rank {rank}: {_reason(cause)} "
            f"({free_gib:.1f} GiB are free there)"
        ) from error


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
