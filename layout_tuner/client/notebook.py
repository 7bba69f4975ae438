"""Results as notebooks show them: frames of pandas and figures of plotly.

The extra `notebook` installs both packages; they are imported when a frame or figure is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from layout_tuner.api.schemas.campaigns_and_trials import (
    LeaderboardPage,
    PlotRead,
    RankedTrial,
    TrialRead,
)
from layout_tuner.client.errors import PackageMissingError
from layout_tuner.version import missing_packages

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

_FIRST: Final = (
    "rank",
    "number",
    "state",
    "reason",
    "layout_key",
    "value",
    "value_low",
    "value_high",
)
_LAST: Final = ("num_runs", "tied_with_first", "shortened", "disturbed", "on_front", "is_baseline")
_COSTS: Final = ("node_seconds", "attempt", "started_at", "ended_at")


class RankedTrials(LeaderboardPage):
    """A page of a leaderboard, the best layout first unless it is sorted otherwise."""

    @property
    def best(self) -> RankedTrial | None:
        """The layout of the best rank on this page; None: it has none."""
        return min(self.trials, key=attrgetter("rank"), default=None)

    def to_frame(self) -> DataFrame:
        """The page as a frame of pandas; see `to_frame`."""
        return to_frame(self.trials)


def to_frame(trials: Iterable[RankedTrial | TrialRead]) -> DataFrame:
    """Trials, or layouts of a leaderboard, as a frame of pandas with one row each.

    The columns are the number of the trial, its state, the knobs of its layout, and its figures
    under the names of filters, in their units. Figures of a ranked layout are at the median step
    time of all of its runs, as in the CSV; `value_low` and `value_high` are the 95 % interval of
    `value`, the objective. Of trials, `is_cheap` says whether a part of the layout was run.

    Raises:
        PackageMissingError: pandas is not installed.
    """
    refuse_missing("to_frame", "pandas")
    from pandas import DataFrame

    from layout_tuner.api.ranked_columns import COLUMNS
    from layout_tuner.protocol.metrics import METRICS
    from layout_tuner.search_spaces.layouts.layout import KNOBS

    found = list(trials)
    kind = type(found[0]) if found else RankedTrial
    figures = (*KNOBS, "global_batch_size", "num_devices", *METRICS)
    values: dict[str, Any] = {
        name: COLUMNS[name].value if name in figures else attrgetter(name)
        for name in (*_FIRST, *figures, *_LAST, *_COSTS)
        if name in figures or name in kind.model_fields
    }
    if kind is TrialRead:
        values["is_cheap"] = lambda trial: trial.cheap_probe is not None
    values = {"trial" if name == "number" else name: value for name, value in values.items()}
    rows = [{name: value(trial) for name, value in values.items()} for trial in found]
    return DataFrame(rows, columns=list(values))


def figure_of(plot: PlotRead) -> Figure:
    """A plot as a figure of plotly; see `Client.plot`."""
    from plotly.graph_objects import Figure

    meta = {**plot.layout.get("meta", {}), "says": plot.says}
    title = {"text": "" if plot.data else " ".join(plot.says)}
    frame = {"template": "plotly_white", "title": title, "height": meta.get("height")}
    return Figure(data=plot.data, layout={**frame, **plot.layout, "meta": meta})


def refuse_missing(what: str, package: str) -> None:
    """Raises PackageMissingError where a package of the extra `notebook` is not installed."""
    if lacks := missing_packages(what, [package], extra="notebook"):
        raise PackageMissingError(lacks)
