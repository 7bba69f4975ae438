"""Reads the stored document of a campaign: into a campaign, or into what keeps it from being one.

No other module looks into such a document by the names of its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.campaigns.campaign_settings import (
    Budget,
    Constraints,
    ProbeSettings,
    SimulationSettings,
)
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.knobs import auto_words, searched_words
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER, software_named

if TYPE_CHECKING:
    from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
    from layout_tuner.search_spaces.jobs.job_knob import JobKnob

MOST_READ: Final = 1024
"""Campaigns that a process keeps as they were read: reading one takes as long as a lease."""

OBJECTIVES_FIELD: Final = "objective"
"""The field of the objectives, by which queries find campaigns."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damaged:
    """A stored document that is no campaign of this version, such as one of a newer version."""

    document: object
    """As it is stored, for display."""
    error: SearchSpaceError
    """What is wrong with it."""


_kept: Final[dict[str, tuple[object, CampaignSpec | Damaged]]] = {}
"""What was read last, by the name in the document, with that document."""


def _part(
    name: str, read: Callable[[Any], T], unstated: object = None
) -> cached_property[T | None]:
    """A section of a document; None where it is missing, or cannot be read."""

    def found(stored: StoredCampaign) -> T | None:
        described = stored.fields.get(name, unstated)
        try:
            return None if described is None else read(described)
        except SearchSpaceError:
            return None

    return cached_property(found)


def _listed(name: str) -> cached_property[tuple[str, ...]]:
    return cached_property(lambda stored: _texts(stored.fields.get(name)))


def _texts(value: object) -> tuple[str, ...]:
    """A text, or those of a list; without what is no text."""
    found = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(each for each in found if isinstance(each, str))


@dataclass(frozen=True, kw_only=True)
class StoredCampaign:
    """A stored document, of which each part is read once, when it is first asked for.

    Some parts are read without the others: a list shows a thousand campaigns, and what a part says
    may be known of a damaged document. Such a part is None or empty where it cannot be read itself.
    """

    document: object

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The document as it is shown; empty where it is no mapping."""
        return self.document if isinstance(self.document, Mapping) else {}

    @cached_property
    def read(self) -> CampaignSpec | Damaged:
        """The whole of it."""
        known = _kept.get(self.name)
        if known is not None and known[0] == self.document:
            return known[1]
        # Imported here since it imports numpy, which a list of campaigns does without.
        from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec

        found: CampaignSpec | Damaged
        try:
            found = CampaignSpec.from_mapping(cast("Any", self.document))
        except SearchSpaceError as error:
            found = Damaged(document=self.document, error=error)
        if len(_kept) >= MOST_READ:
            _kept.clear()
        _kept[self.name] = self.document, found
        return found

    @property
    def spec(self) -> CampaignSpec:
        """The campaign; SearchSpaceError if the document is damaged."""
        if isinstance(self.read, Damaged):
            # Without the places where it was raised before: those of many requests would add up.
            raise self.read.error.with_traceback(None)
        return self.read

    @property
    def damage(self) -> str:
        """Why it cannot be read, as a sentence; empty: it can."""
        return str(self.read.error) if isinstance(self.read, Damaged) else ""

    @property
    def name(self) -> str:
        return str(self.fields.get("name", ""))

    model = _part("model", ModelShape.from_mapping)
    cluster = _part("cluster", Cluster.from_mapping)
    baseline = _part("baseline", Layout.from_mapping)
    simulated = _part("simulated", SimulationSettings.read)
    """By what it is simulated; None: it is measured."""
    probe = _part("probe", ProbeSettings.from_mapping, {})
    objectives = _listed(OBJECTIVES_FIELD)
    """The first one ranks."""
    warnings = _listed("warnings")
    start_from = _listed("start_from")
    """The names of campaigns whose measurements calibrate the search."""
    _budget = _part("budget", Budget.from_mapping)
    _constraints = _part("constraints", Constraints.from_mapping)

    @property
    def budget(self) -> Budget:
        return self._budget or Budget()

    @property
    def software(self) -> str:
        """See `CampaignSpec.software`."""
        return software_named(self.probe.trainer if self.probe else EMBEDDED_TRAINER)

    @property
    def knows_earlier(self) -> bool:
        """Whether all that was measured on the same cluster calibrates the search."""
        return bool(self.fields.get("knowledge") != "none")

    @property
    def device_memory_bytes(self) -> int | None:
        """Memory of a device of the cluster."""
        found = self._section("cluster").get("device_memory_bytes")
        return found if isinstance(found, int) else None

    @property
    def node_hour_price(self) -> str:
        """What an hour of a node of the cluster costs, as "1.20 EUR"; empty: not stated."""
        return str(self._section("cluster").get("node_hour_price", ""))

    @property
    def hardware(self) -> tuple[object, object]:
        """The device of the cluster, and the number of them on a node."""
        cluster = self._section("cluster")
        return cluster.get("device"), cluster.get("devices_per_node")

    @property
    def precisions(self) -> tuple[str, ...]:
        return _texts(self._section("space").get("precision"))

    @cached_property
    def searched_knobs(self) -> Mapping[str, JobKnob]:
        """The job knobs of the space by name."""
        described = self._section("space").get("job")
        if not described:
            return {}
        from layout_tuner.search_spaces.jobs.job_choices import JobChoices  # it imports numpy

        try:
            return JobChoices.of(described, {}, "").knobs
        except SearchSpaceError:
            return {}

    @property
    def counted_noun(self) -> str:
        """What is counted of its space: jobs where it searches job knobs."""
        return "legal job" if self._section("space").get("job") else "legal layout"

    @cached_property
    def job_knobs(self) -> Mapping[str, JobKnob]:
        """The job knobs of the space, and others that the trainer has, by name."""
        from layout_tuner.trainers.registry import adapter_named  # slow: all trainers

        adapter = adapter_named(self.probe.trainer) if self.probe else None
        return {**(adapter.job_knobs if adapter else {}), **self.searched_knobs}

    @property
    def searched_words(self) -> str:
        """The job knobs of the space with their values, in a line; empty: there are none."""
        return searched_words(self._section("space"))

    @property
    def shown_knobs(self) -> Mapping[str, JobKnob]:
        """The job knobs that the space searches, or the baseline sets."""
        stated = self.baseline.job if self.baseline else {}
        if not stated:
            return self.searched_knobs
        of_baseline = {name: knob for name, knob in self.job_knobs.items() if name in stated}
        return {**of_baseline, **self.searched_knobs}

    @property
    def auto_words(self) -> str:
        """The choices that the service made for the space, in a line; empty: it made none."""
        space = self._section("space")
        return auto_words({**space, "auto": _texts(space.get("auto"))})

    def columns(self) -> dict[str, Any]:
        """The columns of a new campaign's row that follow from its document."""
        constraints = self._constraints or Constraints()
        memory_bytes = constraints.allowed_memory_bytes(self.device_memory_bytes or 0)
        probe = self._section("probe")
        trainer, deadline_s = probe.get("trainer", EMBEDDED_TRAINER), probe.get("deadline_s")
        return {
            "name": self.name,
            "spec": dict(self.fields),
            "model_name": self._section("model").get("name"),
            "cluster_name": self._section("cluster").get("name"),
            "trainer": trainer if self.simulated is None else self.simulated.trainer,
            "objective": self.objectives[0],
            "strategy": self.fields.get("strategy"),
            "max_peak_memory_bytes": int(memory_bytes) if constraints.memory_headroom else None,
            "probe_deadline_s": None if deadline_s is None else float(deadline_s),
        }

    def _section(self, name: str) -> Mapping[str, Any]:
        """The fields of a section; empty where it is missing, or is no mapping."""
        section = self.fields.get(name)
        return section if isinstance(section, Mapping) else {}
