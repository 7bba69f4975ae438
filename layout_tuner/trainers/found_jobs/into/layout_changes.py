"""What of a trainer's options and keys differs between two layouts, as its adapter writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from layout_tuner.documents.json_and_yaml import read_yaml
from layout_tuner.documents.reading import word_of
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob
from layout_tuner.trainers.megatron_bridge import MEGATRON_BRIDGE
from layout_tuner.trainers.megatron_lm import CONNECTIONS, MEGATRON_LM, SHARDING_STRATEGIES

GONE: Final = object()
"""Stands for the value of what has to go."""
_LABELS: Final = ("general.run", "general.project")
"""Keys of adapters that name a run, and are the user's own."""
_OVERRIDES: Final = {"torchtitan": "--", "megatron-bridge": ""}
"""How the command lines of trainers with configurations begin an override."""

Words = tuple[str, ...]

_VIRTUAL_STAGES: Final = "--num-virtual-stages-per-pipeline-rank"
_LAYERS_OF_STAGES: Final = "--num-layers-per-virtual-pipeline-stage"
"""Megatron's two spellings of virtual stages (`megatron/training/arguments.py`); adapters write the
first."""


def option_changes(
    adapter: TrainerAdapter, now: TrainerJob, then: TrainerJob
) -> dict[str, Words | object]:
    """Options by name that differ: their new values, or `GONE`."""
    return _changes(*(options_of_job(adapter, job) for job in (now, then)))


def options_of_job(adapter: TrainerAdapter, job: TrainerJob) -> dict[str, Words]:
    """The options and overrides of a job, as its adapter writes them; empty: it has none."""
    if _has_flags(adapter, job):
        return _options(adapter.arguments(job))
    prefix = _OVERRIDES.get(re.sub(r"-(?:\d[\d.]*|main)$", "", adapter.name))
    if prefix is None:
        return {}
    placed = _placed(adapter, job)
    if not prefix:
        return {path: (_override(value),) for path, value in placed.items()}
    # A switch has no value, and is left out where it is off.
    return {
        f"{prefix}{path}": () if value is True else (_override(value).strip("[]"),)
        for path, value in placed.items()
        if value is not False and value is not None
    }


def in_spelling_of(
    changes: Mapping[str, Words | object], written: Collection[str], job: TrainerJob
) -> dict[str, Words | object]:
    """Changes of options with virtual stages in the spelling of the command.

    Its other spelling counts layers, which change with the stages.
    """
    if _LAYERS_OF_STAGES not in written or _VIRTUAL_STAGES in written:
        return dict(changes)
    layout = job.layout
    layers = layout.counted_layers(job.model.num_layers) // (layout.pp * layout.vpp)
    is_told = layout.vpp > 1 and not layout.is_written_out
    stages = {_LAYERS_OF_STAGES: (str(layers),) if is_told else GONE}
    return {name: each for name, each in changes.items() if name != _VIRTUAL_STAGES} | stages


def key_changes(
    adapter: TrainerAdapter,
    now: TrainerJob,
    then: TrainerJob,
    *,
    like: Sequence[str],
    states_false: bool = False,
) -> dict[str, Any]:
    """Keys of a configuration by dotted path that differ: their new values, or `GONE`.

    Args:
        adapter: the trainer's.
        now: the job that the file has.
        then: the job that it is to have.
        like: paths at which the file states the layout. They show the section that holds the
            trainer's own sections, or the keys that stand for options.
        states_false: whether a switch that goes is false, as over a default of true.
    """
    if _has_flags(adapter, then):
        section, _, last = (like[0] if like else "").rpartition(".")
        prefix = f"{section}." if section else ""
        own = options_of_job(adapter, now)
        return {
            prefix + (name if last.startswith("--") else name[2:].replace("-", "_")): False
            if words is GONE and states_false and own[name] == ()
            else _plain(words)
            for name, words in option_changes(adapter, now, then).items()
        }
    known = [path for job in (now, then) for path, _ in _leaves(adapter.values(job))]
    found = [path.removesuffix(key) for path in like for key in known if path.endswith(key)]
    prefix = next((each for each in found if not each or each.endswith(".")), "")
    return {prefix + path: value for path, value in _value_changes(adapter, now, then).items()}


def environment_changes(
    adapter: TrainerAdapter, now: TrainerJob, then: TrainerJob
) -> dict[str, str | object]:
    """Variables that differ: their new values, or `GONE`."""
    environments = [_environment(adapter, job) for job in (now, then)]
    changes = _changes(*environments)
    # The one connection may stay where it is not asked for.
    if environments[0].get(CONNECTIONS) == "1" and CONNECTIONS not in environments[1]:
        del changes[CONNECTIONS]
    return changes


def _environment(adapter: TrainerAdapter, job: TrainerJob) -> dict[str, str | object]:
    found: dict[str, str | object] = dict(adapter.environment(job))
    if adapter.name in (MEGATRON_LM.name, MEGATRON_BRIDGE.name) and CONNECTIONS not in found:
        if job.layout.zero_stage in SHARDING_STRATEGIES:
            found[CONNECTIONS] = GONE
        elif job.layout.tp > 1 or job.layout.cp > 1:
            found[CONNECTIONS] = "1"
    return found


def options_of_words(words: Iterable[str]) -> dict[str, Words]:
    """Options of a command and overrides `key=value` by name, with their values."""
    found: dict[str, Words] = {}
    name = ""
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if word.startswith("--") or equals:
            name = key
            found[name] = (value,) if equals else ()
        else:
            found[name] = (*found.get(name, ()), word)
    return found


def _has_flags(adapter: TrainerAdapter, job: TrainerJob) -> bool:
    """Whether the trainer is configured by options of its own."""
    return bool(adapter.layout_arguments(job)) and not adapter.values_are_arguments


def _value_changes(adapter: TrainerAdapter, now: TrainerJob, then: TrainerJob) -> dict[str, Any]:
    return _changes(_placed(adapter, now), _placed(adapter, then))


def _placed(adapter: TrainerAdapter, job: TrainerJob) -> dict[str, Any]:
    return {path: each for path, each in _leaves(adapter.values(job)) if path not in _LABELS}


def plain_word(value: Any) -> str:
    """The one word of an option or a key; empty: it has several, or none."""
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else ""
    return "" if isinstance(value, (list, Mapping)) else word_of(value)


def option_of(said: str) -> str:
    """The option or key of what a file says: `--tp 4`, `--tp=4`, `++model.tp=4`."""
    return said.partition(" ")[0].partition("=")[0].lstrip("+")


def _changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """What differs, with the new values; `GONE` for what is no longer there."""
    return {
        name: then.get(name, GONE)
        for name in {**now, **then}
        if now.get(name, GONE) != then.get(name, GONE)
    }


def _options(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Options by name with their values."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            found[name] = ()
        else:
            found[name] = (*found.get(name, ()), word)
    return found


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield path + name, value


def _override(value: Any) -> str:
    """A value as an override of the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_override, value))}]"
    return "null" if value is None else word_of(value)


def _plain(words: Words | object) -> Any:
    """The values of an option as that of a key."""
    if not isinstance(words, tuple):
        return words
    read = [each if (value := read_yaml(each.encode())) is None else value for each in words]
    return True if not read else read[0] if len(read) == 1 else read
