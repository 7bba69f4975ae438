"""What is wrong with a campaign's document, and how many layouts its space has, before submission.

Submission itself refuses for the same reasons: both use `api.campaigns.submission` and the legal
set of the campaign.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final

from layout_tuner.api.campaigns.submission import Submission
from layout_tuner.documents.reading import Problems, is_name
from layout_tuner.errors import CampaignInvalidError, SearchSpaceError
from layout_tuner.predictions.estimates.fitting import FittingCount, count_fitting
from layout_tuner.results_db.errors import CampaignDuplicateError
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.spaces.search_space import LegalSet, enumerate_legal

COUNTED_WITHIN_S: Final = 1.0
"""Seconds for which the layouts of a space are enumerated while a user types."""

_OF_SPACE: Final = ("model", "cluster", "space", "constraints", "probe")
"""Fields of the document that decide which layouts are legal and fit."""


class CountingSlowError(Exception):
    """The layouts of a space were not counted within the time limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCounts:
    """The layouts of a document's space."""

    spec: CampaignSpec
    """A campaign of the document's model, cluster, space and constraints."""
    legal: LegalSet
    fitting: FittingCount
    """How many legal layouts are likely to fit into the memory of a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmissionCheck:
    """The result of a check of a campaign's document."""

    problems: tuple[SearchSpaceError, ...]
    """Everything that is wrong; empty: it can be submitted."""
    warnings: tuple[str, ...]
    counts: LayoutCounts | None
    """None: model, cluster or space is missing or wrong, or counting took too long."""
    too_slow: int | None = None
    """Combinations of a space that could not be counted within the time limit."""


def check_submission(
    submission: Submission, document: Any, *, within_s: float = COUNTED_WITHIN_S
) -> SubmissionCheck:
    """Checks a document without storing anything.

    Layouts are enumerated for `within_s` seconds.
    """
    problems = Problems()
    spec = None
    with problems.collecting():
        spec = submission.resolve(document)
    counted = spec or _part_of_space(submission, document)
    with problems.collecting():
        _refuse_taken(submission, document)
    if spec is not None:
        with problems.collecting():
            submission.refuse_unknown_sources(spec)
    counts, too_slow = None, None
    if counted is not None:
        try:
            with problems.collecting():
                counts = _counts(counted, problems, within_s)
        except CountingSlowError:
            too_slow = counted.space.num_combinations
    if counts is not None and len(counts.legal):
        with problems.collecting():
            warned = counts.spec.warned_of_space(counts.legal)
            spec = None if spec is None else replace(spec, warnings=warned.warnings)
    return SubmissionCheck(
        problems=_parts(problems),
        warnings=_warnings(spec) if spec else (),
        counts=counts,
        too_slow=too_slow,
    )


def _warnings(spec: CampaignSpec) -> tuple[str, ...]:
    if not spec.baseline_is_outside:
        return spec.warnings
    return (
        *spec.warnings,
        "the baseline is not among the layouts of the space; it is measured too",
    )


def _part_of_space(submission: Submission, document: Any) -> CampaignSpec | None:
    """A campaign of the fields that decide on layouts; None: one of these is wrong."""
    if not isinstance(document, Mapping):
        return None
    part = {name: document[name] for name in _OF_SPACE if name in document}
    try:
        return submission.resolve({**part, "name": "unnamed", "budget": {"trials": 1}})
    except SearchSpaceError:
        return None


def _refuse_taken(submission: Submission, document: Any) -> None:
    name = document.get("name") if isinstance(document, Mapping) else None
    if not isinstance(name, str) or not is_name(name):
        return
    try:
        submission.refuse_taken(name)
    except CampaignDuplicateError as error:
        raise CampaignInvalidError(str(error), field="name") from error


def _counts(spec: CampaignSpec, problems: Problems, within_s: float) -> LayoutCounts:
    until = monotonic() + within_s

    def refuse_if_late() -> None:
        if monotonic() > until:
            raise CountingSlowError

    legal = enumerate_legal(
        spec.space,
        spec.model,
        spec.cluster,
        scopes=spec.rule_scopes,
        before_each_rule=refuse_if_late,
    )
    refuse_if_late()
    with problems.collecting("space"), suppress(CountingSlowError):
        legal.refuse_if_empty()
        legal = spec.listed(legal)
        spec.refuse_if_too_large(legal, before_each_part=refuse_if_late)
    fitting = count_fitting(legal, spec.model, spec.allowed_memory_bytes)
    return LayoutCounts(spec=spec, legal=legal, fitting=fitting)


def _parts(problems: Problems) -> tuple[SearchSpaceError, ...]:
    try:
        problems.refuse()
    except SearchSpaceError as error:
        return error.parts
    return ()
