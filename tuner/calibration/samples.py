"""What every calibration asks of a sample; `tuner.knowledge.Sample` answers all of it."""

from __future__ import annotations

from typing import Protocol

from search_spaces.cluster import Cluster
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape


class LayoutSample(Protocol):
    """One layout of some model on some machine."""

    @property
    def model(self) -> ModelShape:
        """What was trained."""
        ...

    @property
    def cluster(self) -> Cluster:
        """Where it ran."""
        ...

    @property
    def layout(self) -> Layout:
        """How it was laid out."""
        ...

    @property
    def software(self) -> str:
        """What ran it."""
        ...
