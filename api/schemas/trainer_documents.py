"""The documents of trainers and their job knobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from layout_tuner.api.schemas.campaigns_and_trials import Document
from layout_tuner.documents.reading import word_of
from layout_tuner.search_spaces.jobs.condition import joined_text
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect
from layout_tuner.trainers.adapter import TrainerAdapter
from layout_tuner.trainers.trainer_knob import TrainerKnob, Writing
from layout_tuner.units import GIB


class KnobEffectRead(Document):
    """What a value of a knob is expected to do, compared with the default."""

    value: bool | int | str
    touches: list[str]
    """The terms of the step that it scales, as far as they are exposed."""
    factor: float
    low: float
    """The factor is above this one with 90 %."""
    high: float
    """The factor is below this one with 90 %."""
    memory_bytes: float
    """Bytes a device, added to the peak."""
    memory_of: str
    """The part of the peak that memory_factor scales."""
    memory_factor: float
    source: str
    """Where it was published; empty: nothing is known, so that no effect is expected."""

    @property
    def words(self) -> str:
        """The effect in a line of text."""
        parts = []
        if self.touches:
            spread = f"({self.low:.2g} to {self.high:.2g} times)"
            what = f"what is exposed of {', '.join(self.touches)}"
            times = "time" if self.factor == 1 else "times"
            parts.append(f"{self.factor:.2g} {times} {spread} {what}")
        if self.memory_bytes:
            parts.append(f"memory {self.memory_bytes / GIB:+.1f} GiB")
        if self.memory_factor != 1:
            part = "" if self.memory_of == "all" else f" of {self.memory_of}"
            parts.append(f"memory{part} {self.memory_factor - 1:+.0%}")
        if parts and not self.source:
            parts.append("nothing is published")
        return "; ".join(parts) or "nothing is known"

    @classmethod
    def of_value(cls, knob: JobKnob, value: bool | int | str) -> Self:
        effect = knob.effect(value) or KnobEffect()
        low, high = effect.interval
        touches = list(effect.touches or knob.touches)
        return cls.of(effect, value=value, touches=touches, low=low, high=high)


class TrainerKnobRead(Document):
    """A job knob of a trainer."""

    name: str
    kind: str
    """switch, word or count."""
    values: list[bool | int | str]
    """Its values; of a count those that are worth trying, from `minimum` to `maximum`."""
    default: bool | int | str | None
    """The trainer's own value, which no job states."""
    minimum: int | None
    maximum: int | None
    when: str
    """When the trainer has it; empty: always."""
    needs: dict[str, str]
    """When it has one of the values."""
    effects: list[KnobEffectRead]
    """Of all values but the default."""
    losses: str
    """What it does to losses: same, rounding or other."""
    written: list[str]
    """How its values are written; empty: in the document of the layout."""
    source: str
    help: str

    @classmethod
    def of_knob(cls, knob: JobKnob, trainer_knob: TrainerKnob | None = None) -> Self:
        is_count = knob.kind == "count"
        writings = () if trainer_knob is None else trainer_knob.writings
        return cls.of(
            knob,
            values=list(knob.values),
            minimum=knob.minimum if is_count else None,
            maximum=knob.maximum if is_count else None,
            when="" if knob.when is None else knob.when.text,
            needs={
                word_of(value): joined_text([each for of, each in knob.needs if of == value])
                for value, _ in knob.needs
            },
            effects=[
                KnobEffectRead.of_value(knob, value)
                for value in knob.values
                if not knob.is_default(value)
            ],
            written=[_words(each) for each in writings],
            source="" if trainer_knob is None else trainer_knob.source,
        )


class TrainerRead(Document):
    """A trainer and the job knobs that campaigns can search."""

    name: str
    target_version: str
    knobs: list[TrainerKnobRead]

    @classmethod
    def of_adapter(cls, adapter: TrainerAdapter) -> Self:
        knobs = [TrainerKnobRead.of_knob(each.knob, each) for each in adapter.knobs]
        return cls(name=adapter.name, target_version=adapter.target_version, knobs=knobs)

    @classmethod
    def of_worker(
        cls, name: str, version: str, knobs: Iterable[JobKnob], adapter: TrainerAdapter | None
    ) -> Self:
        """A trainer of a worker, which tells the service the knobs without how they are written."""
        known = {} if adapter is None else {each.knob.name: each for each in adapter.knobs}
        read = [TrainerKnobRead.of_knob(each, known.get(each.name)) for each in knobs]
        return cls(name=name, target_version=version, knobs=read)


class TrainerPage(Document):
    """All trainers that the service knows."""

    trainers: list[TrainerRead]

    @classmethod
    def of_adapters(cls) -> Self:
        from layout_tuner.trainers.registry import ADAPTERS  # slow, and no client needs it

        return cls(trainers=[TrainerRead.of_adapter(each) for each in ADAPTERS.values()])


def _words(writing: Writing) -> str:
    """A writing in a line, such as `deepep: --moe-token-dispatcher-type flex (before 0.17)`."""
    environment: dict[str, Any] = dict(writing.environment)
    parts = [
        " ".join(writing.arguments),
        *(f"without {each}" for each in writing.without),
        *(f"{key}: {word_of(each)}" for key, each in dict(writing.keys).items()),
        *(f"{name}={each}" for name, each in environment.items()),
    ]
    stated = (("since", writing.since), ("before", writing.before))
    versions = ", ".join(f"{word} {version}" for word, version in stated if version)
    which = "" if writing.value is None else f"{word_of(writing.value)}: "
    return which + ", ".join(filter(None, parts)) + (f" ({versions})" if versions else "")
