"""How long a training job takes on nodes that fail, with checkpoints at their best interval.

Failures come at random (Poisson). The time of the job and the interval are those of Daly 2006 ("A
higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22), which refine Young's first-order interval (1974).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from layout_tuner.documents.reading import Problems, shown, whole_number_problem
from layout_tuner.errors import TrainingJobInvalidError
from layout_tuner.search_spaces.physical_ranges import Range
from layout_tuner.units import SECONDS_PER_HOUR

NODE_MTBF_HOURS: Final = 6000.0
"""The training of Llama 3 reports 419 unexpected interruptions in 54 days on 2,048 nodes
(arXiv:2407.21783, section 3.3.4): one in 6,300 hours of a node."""
CHECKPOINT_S: Final = 60.0
RESTART_S: Final = 600.0

_TOKENS: Final = Range(1, 10**18, "tokens")
_HOURS: Final = Range(1e-3, 1e12, "hours")
_SECONDS: Final = Range(1e-3, 1e9, "seconds")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_WRITTEN: Final = re.compile(
    r"(\d{1,19}(?:\.\d{1,9})?(?:e\+?\d{1,2})?)\s*([kmbt]?)", re.ASCII | re.IGNORECASE
)
_MOST_FAILURES: Final = 10.0
"""Most failures that may be expected while one interval, its checkpoint and a restart last: beyond
it the job hardly advances."""
_DAY_S: Final = 86400.0

JOB_OPTIONS: Final[Mapping[str, tuple[type[str | int | float], str]]] = {
    "tokens": (str, "Tokens of the training job, such as 1.4T or 300B: adds its days."),
    "nodes": (int, "Nodes of that job; by default those of the layout."),
    "mtbf_hours": (
        float,
        f"Mean time between failures of one of its nodes.  [default: {NODE_MTBF_HOURS:g}]",
    ),
    "checkpoint_s": (
        float,
        f"Seconds in which it writes a checkpoint.  [default: {CHECKPOINT_S:g}]",
    ),
    "restart_s": (float, f"Seconds from a failure to the next step.  [default: {RESTART_S:g}]"),
}
"""The options about a training job of every command and route that has them: types and texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A training job, and how often its nodes fail.

    Raises:
        TrainingJobInvalidError: at construction, when a number is out of range.
    """

    tokens: int
    """Tokens to train on."""
    num_nodes: int | None = None
    """Nodes of the job; None: those of the layout."""
    mtbf_hours: float = NODE_MTBF_HOURS
    """Mean time between failures of one node."""
    checkpoint_s: float = CHECKPOINT_S
    """Seconds in which a checkpoint is written; training stands still."""
    restart_s: float = RESTART_S
    """Seconds from a failure to the next step."""

    def __post_init__(self) -> None:
        problems = Problems(TrainingJobInvalidError)
        nodes = None if self.num_nodes is None else whole_number_problem(self.num_nodes)
        for name, problem in (
            ("tokens", _TOKENS.problem(self.tokens)),
            ("nodes", nodes),
            ("mtbf_hours", _HOURS.problem(self.mtbf_hours)),
            ("checkpoint_s", _SECONDS.problem(self.checkpoint_s)),
            ("restart_s", _SECONDS.problem(self.restart_s)),
        ):
            problems.note(problem, field=name)
        problems.refuse()

    @classmethod
    def read(
        cls,
        *,
        tokens: str | None,
        nodes: int | None = None,
        **assumed: float | None,
    ) -> TrainingJob | None:
        """The job of `JOB_OPTIONS`; None: none given. TrainingJobInvalidError if one is wrong."""
        given = {name: value for name, value in assumed.items() if value is not None}
        if tokens is not None:
            return cls(tokens=read_tokens(tokens), num_nodes=nodes, **given)
        if nodes is not None:
            given["nodes"] = nodes
        if given:
            raise TrainingJobInvalidError(
                f"{', '.join(given)} describe a training job; say its tokens too, such as 300B",
                field="tokens",
            )
        return None

    def duration(self, step: StepInterval, *, tokens_per_step: int, num_nodes: int) -> JobDuration:
        """How long it takes on so many nodes; TrainingJobInvalidError if it never ends."""
        mtbf_s = self.mtbf_hours * SECONDS_PER_HOUR / num_nodes
        interval_s = checkpoint_interval_s(mtbf_s, self.checkpoint_s)
        if interval_s + self.checkpoint_s + self.restart_s > _MOST_FAILURES * mtbf_s:
            raise TrainingJobInvalidError(
                f"{num_nodes} nodes with a failure every {self.mtbf_hours:g} hours each fail every "
                f"{mtbf_s:.3g} s together, too often for checkpoints of {self.checkpoint_s:g} s and "
                f"restarts of {self.restart_s:g} s",
                field="mtbf_hours",
            )
        num_steps = -(-self.tokens // tokens_per_step)
        slower = expected_slowdown(interval_s, mtbf_s, self.checkpoint_s, self.restart_s)
        days = num_steps * slower / _DAY_S
        node_hours = 24.0 * days * num_nodes
        return JobDuration(
            num_nodes=num_nodes,
            num_steps=num_steps,
            mtbf_hours=mtbf_s / SECONDS_PER_HOUR,
            checkpoint_interval_s=interval_s,
            lost_share=1.0 - 1.0 / slower,
            days=days * step.expected_s,
            days_low=days * step.low_s,
            days_high=days * step.high_s,
            node_hours=node_hours * step.expected_s,
            node_hours_low=node_hours * step.low_s,
            node_hours_high=node_hours * step.high_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInterval:
    """A step time with its 95 % interval."""

    expected_s: float
    """Seconds of a step."""
    low_s: float
    """Lower end of the interval."""
    high_s: float
    """Upper end of the interval."""

    def times(self, factor: float) -> StepInterval:
        """The interval of steps that are so many times longer."""
        return StepInterval(
            expected_s=factor * self.expected_s,
            low_s=factor * self.low_s,
            high_s=factor * self.high_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDuration:
    """How long a training job takes, failures and checkpoints included."""

    num_nodes: int
    """Nodes that it holds."""
    num_steps: int
    """Optimizer steps."""
    mtbf_hours: float
    """Mean time between failures of all its nodes together."""
    checkpoint_interval_s: float
    """Seconds of training between two checkpoints."""
    lost_share: float
    """Share of the time that goes into checkpoints, failures and restarts."""
    days: float
    """Expected days."""
    days_low: float
    """Lower end of the 95 % interval, which is that of the step time."""
    days_high: float
    """Upper end of it."""
    node_hours: float
    """Expected node-hours."""
    node_hours_low: float
    """Lower end of their interval."""
    node_hours_high: float
    """Upper end of it."""


def checkpoint_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Seconds of training between two checkpoints that make a job shortest (Daly 2006).

    Young's sqrt(2 checkpoint MTBF) is its first term. Where writing a checkpoint takes longer than
    twice the time between failures, the interval is that time.
    """
    if checkpoint_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2.0 * mtbf_s)
    young_s = math.sqrt(2.0 * checkpoint_s * mtbf_s)
    return young_s * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - checkpoint_s


def expected_slowdown(
    interval_s: float, mtbf_s: float, checkpoint_s: float, restart_s: float
) -> float:
    """Expected time of a job over its time without failures and checkpoints (Daly 2006).

    M exp(R / M) (exp((t + c) / M) - 1) / t, where t is the interval, M the mean time between
    failures, c the time of a checkpoint and R that of a restart.
    """
    segment = math.expm1((interval_s + checkpoint_s) / mtbf_s)
    return mtbf_s * math.exp(restart_s / mtbf_s) * segment / interval_s


def read_tokens(text: str) -> int:
    """A number such as "300B" or "1.4T" (k, M, B, T: 10^3 to 10^12), or TrainingJobInvalidError."""
    written = _WRITTEN.fullmatch(text.strip())
    if written is None:
        raise TrainingJobInvalidError(
            f"{shown(text)} is not a number of tokens, such as 1.4T, 300B or 2e9", field="tokens"
        )
    return round(float(written[1]) * _UNITS[written[2].lower()])
