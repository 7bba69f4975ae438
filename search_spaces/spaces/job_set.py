"""The jobs of a campaign: each legal layout with each of the settings that it may have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from layout_tuner.array_types import Ints
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.jobs.job_choices import JobChoices
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.layout_tiles import layout_tiles
from layout_tuner.search_spaces.spaces.search_space import EVERY_ROW, LegalSet


class JobSet:
    """All jobs, by position: the settings of the first layout, those of the second, and so on.

    It keeps two numbers a layout, whatever the number of settings.
    """

    def __init__(
        self,
        legal: LegalSet,
        choices: JobChoices,
        model: ModelShape,
        cluster: Cluster,
        *,
        listed: Collection[Layout] = (),
    ) -> None:
        """The jobs of `legal`; where some are listed, these alone."""
        self.legal = legal
        """The layouts, without settings."""
        self.choices = choices
        """The searched knobs."""
        self.model, self.cluster = model, cluster
        if listed:
            group_of, settings = _groups_of_listed(legal, listed)
        else:
            group_of, settings = _groups(legal, choices, model, cluster)
        self.settings: tuple[JobSettings, ...] = tuple(
            dict.fromkeys(each for group in settings for each in group)
        )
        """All settings that some layout may have."""
        places = {each: place for place, each in enumerate(self.settings)}
        self._group_of = group_of.astype(np.int32)
        self._settings_of = [np.array([places[each] for each in group]) for group in settings]
        self._num_of = np.array([len(group) for group in settings])
        self.ends: Ints = np.cumsum(self._num_of[self._group_of])
        """Position after the last job of each layout."""

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def layout_rows(self, positions: Ints) -> Ints:
        """The position among `legal` of the layout of each job."""
        return np.searchsorted(self.ends, positions, side="right")

    def setting_places(self, positions: Ints) -> Ints:
        """The place in `settings` of the settings of each job."""
        rows = self.layout_rows(positions)
        group_of = self._group_of[rows]
        at = positions - (self.ends[rows] - self._num_of[group_of])
        places = np.empty(len(positions), dtype=np.int64)
        for group in np.unique(group_of):
            here = group_of == group
            places[here] = self._settings_of[group][at[here]]
        return places

    def num_jobs(self, rows: Ints) -> Ints:
        """The number of jobs of some layouts of `legal`."""
        return self._num_of[self._group_of[rows]]

    def jobs_of(self, rows: Ints) -> Ints:
        """The positions of all jobs of some layouts of `legal`, in their order."""
        counts = self.num_jobs(rows)
        starts = self.ends[rows] - counts
        return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())

    def layout(self, position: int, /) -> Layout:
        """The layout at a position, with its settings."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is not in 0 to {len(self) - 1}")
        at = np.array([position])
        (row,), (place,) = self.layout_rows(at), self.setting_places(at)
        return replace(self.legal.layout(int(row)), job=self.settings[place])

    def index_of(self, layout: Layout, /) -> int | None:
        """The position of a layout with its settings, or None where it is not in the set."""
        row = self.legal.index_of(layout.without_job)
        if row is None:
            return None
        group = self._group_of[row]
        for at, place in enumerate(self._settings_of[group]):
            if self.settings[place] == layout.job:
                return int(self.ends[row] - self._num_of[group] + at)
        return None

    def jobs_like(self, row: int, settings: JobSettings) -> Iterator[Layout]:
        """The jobs of a layout of `legal`, those that differ from some settings in least first."""
        own = [self.settings[place] for place in self.setting_places(self.jobs_of(np.array([row])))]
        for each in sorted(own, key=lambda of: len(dict(of).items() ^ dict(settings).items())):
            yield replace(self.legal.layout(row), job=each)

    def column(self, knob: str, rows: slice | Ints = EVERY_ROW, /) -> Ints:
        """One field of the layouts of all jobs, or of some (see `code_of`)."""
        return self.legal.column(knob, self.layout_rows(self._positions(rows)))

    def columns(self, rows: slice | Ints = EVERY_ROW, /) -> LayoutColumns:
        """All jobs, or some of them."""
        positions = self._positions(rows)
        layouts = self.legal.columns(self.layout_rows(positions))
        return replace(layouts, job=self.setting_places(positions), jobs=self.settings)

    def _positions(self, rows: slice | Ints) -> Ints:
        return np.arange(len(self))[rows] if isinstance(rows, slice) else rows


def _groups_of_listed(
    legal: LegalSet, listed: Collection[Layout]
) -> tuple[Ints, list[tuple[JobSettings, ...]]]:
    """As `JobChoices.groups`: each layout is a group of its own."""
    of_layout: defaultdict[int | None, dict[JobSettings, None]] = defaultdict(dict)
    for each in listed:
        of_layout[legal.index_of(each.without_job)][each.job] = None
    return np.arange(len(legal)), [tuple(of_layout[row]) for row in range(len(legal))]


def _groups(
    legal: LegalSet, choices: JobChoices, model: ModelShape, cluster: Cluster
) -> tuple[Ints, list[tuple[JobSettings, ...]]]:
    """As `JobChoices.groups` of all layouts, whose columns are larger than the groups."""
    codes = np.empty(len(legal), dtype=np.int32)
    for rows, tile, cells in layout_tiles(legal):
        codes[rows] = choices.codes(tile, model, cluster).reshape(-1)[cells]
    found = np.flatnonzero(np.bincount(codes))
    some = legal.columns(slice(0, 1))
    settings = [tuple(choices.settings_of(int(code), some, model, cluster)) for code in found]
    return np.searchsorted(found, codes), settings
