"""Job knobs as hyperparameters of DeepHyper's problem, with their conditions as ConfigSpace's.

A hyperparameter's values are ranks. So each comparison of a condition is the list of the ranks of
one parent for which it holds, whatever its operator, and its negation the list of the others; what
depends on the model, the device or a field that does not vary is known. A job knob stays without a
condition, as one that may always be chosen, where its condition compares two fields, or a field
that follows from others; or where a knob on which it depends has a condition of its own and would
be inactive where this one is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ConfigSpace import AndConjunction, InCondition, OrConjunction
from numpy.typing import NDArray

from layout_tuner.search_spaces.jobs.condition import (
    DERIVED_NAMES,
    AllOf,
    AnyOf,
    Comparison,
    Facts,
    Name,
    Node,
    Not,
)
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.search_spaces.spaces.job_set import JobSet


@dataclass(frozen=True, slots=True)
class In:
    """That a parent has one of some ranks."""

    parent: str
    ranks: tuple[int, ...]

    def of(self, child: Any, parameters: Mapping[str, Any]) -> Any:
        """ConfigSpace's condition of a child."""
        return InCondition(child, parameters[self.parent], list(self.ranks))


@dataclass(frozen=True, slots=True)
class Joined:
    """That all of some conditions hold, or any of them."""

    all: bool
    parts: tuple[In | Joined, ...]

    def of(self, child: Any, parameters: Mapping[str, Any]) -> Any:
        conjunction = AndConjunction if self.all else OrConjunction
        return conjunction(*(part.of(child, parameters) for part in self.parts))


Expressed = In | Joined | bool
"""A condition; a switch: it always holds, or never."""


class _UnexpressedError(Exception):
    """ConfigSpace has no such condition."""


class JobParameters:
    """The job knobs that vary, their ranks, and their conditions as ConfigSpace states them."""

    def __init__(
        self, jobs: JobSet, layout_ranks: Mapping[str, NDArray[np.signedinteger[Any]]]
    ) -> None:
        """`layout_ranks` has the rank of each layout's value, for each field that varies."""
        self._jobs = jobs
        self._layout_ranks = layout_ranks
        self._values: dict[str, list[JobValue]] = {}
        """The values of each knob, its default first."""
        columns = []
        for name, knob in jobs.choices.knobs.items():
            chosen = map(knob.value_of, jobs.settings)
            of_settings = [value for value in chosen if value is not None]
            values = _ordered(knob, of_settings)
            if len(values) > 1:
                self._values[name] = values
                columns.append([values.index(value) for value in of_settings])
        self.names = tuple(self._values)
        self.counts = tuple(len(values) for values in self._values.values())
        self.ranks = np.array(columns, np.int32).reshape(-1, len(jobs.settings)).T
        """Shape [settings, knobs]."""
        self.conditions = {
            name: condition
            for name in self.names
            if (condition := self._condition(jobs.choices.knobs[name])) is not None
        }

    def _condition(self, knob: JobKnob) -> In | Joined | None:
        """None: its hyperparameter is always active."""
        if knob.when is None or knob.default is None:
            return None
        try:
            expressed = self._expressed(knob.when.root, True)
        except _UnexpressedError:
            return None
        return None if isinstance(expressed, bool) else expressed

    def _expressed(self, node: Node, wanted: bool) -> Expressed:
        """The condition that a part of a condition holds, or (not wanted) that it does not."""
        match node:
            case Comparison():
                return self._compared(node, wanted)
            case Not():
                return self._expressed(node.part, not wanted)
            case AllOf() | AnyOf():
                is_all = isinstance(node, AllOf) is wanted
                parts = [self._expressed(part, wanted) for part in node.parts]
                if (not is_all) in parts:
                    return not is_all
                left = tuple(part for part in parts if not isinstance(part, bool))
                if len(left) < 2:
                    return left[0] if left else is_all
                return Joined(is_all, left)

    def _compared(self, node: Comparison, wanted: bool) -> Expressed:
        jobs, name = self._jobs, node.name
        named = {name, node.value.name} if isinstance(node.value, Name) else {name}
        known = {each: values[0] for each, values in self._values.items()}
        if name in self._values:
            values = self._values[name]
            facts = [self._facts(np.zeros(1, np.int64), known | {name: each}) for each in values]
            holds = [bool(np.all(each.compared(node))) is wanted for each in facts]
            # An inactive parent has its default, and ConfigSpace lets nothing depend on it.
            if jobs.choices.knobs[name].when is not None and holds[0]:
                raise _UnexpressedError
            return _one_of(name, holds)
        varying = named & self._layout_ranks.keys()
        if (len(named) > 1 and varying) or named & set(DERIVED_NAMES):
            raise _UnexpressedError
        if not varying:
            fixed = {each: knob.default for each, knob in jobs.choices.knobs.items()}
            one = self._facts(np.zeros(1, np.int64), fixed | known)
            return bool(np.all(one.compared(node))) is wanted
        _, first = np.unique(self._layout_ranks[name], return_index=True)
        answers = np.broadcast_to(self._facts(first, {}).compared(node), len(first))
        return _one_of(name, [bool(each) is wanted for each in answers])

    def _facts(self, rows: NDArray[np.int64], job: Mapping[str, Any]) -> Facts:
        """What conditions ask about, of some layouts."""
        jobs = self._jobs
        columns = jobs.columns(jobs.ends[rows] - 1)
        return Facts(columns, jobs.model, jobs.cluster, job)


def _one_of(parent: str, holds: list[bool]) -> Expressed:
    if all(holds) or not any(holds):
        return holds[0]
    return In(parent, tuple(rank for rank, each in enumerate(holds) if each))


def _ordered(knob: JobKnob, values: list[JobValue]) -> list[JobValue]:
    """The values, the default first: CBO gives an inactive hyperparameter the first one."""
    distinct = dict.fromkeys(values)
    in_order = sorted(distinct) if knob.kind == "count" else list(distinct)
    return sorted(in_order, key=lambda each: not knob.is_default(each))
