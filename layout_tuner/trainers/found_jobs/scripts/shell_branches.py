"""What variables hold behind a branch of a script of which it is not known whether it is taken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from layout_tuner.trainers.found_jobs.scripts.shell_values import (
    UNSET,
    FieldsBuilder,
    Pieces,
    Value,
    known_text,
    said_text,
    spaced,
    uncertain,
    unknown,
)

_OPTION: Final = re.compile(r"(?:^|\s)--?[A-Za-z]")


def joined_variables(alternatives: Sequence[Mapping[str, Value]], why: str) -> dict[str, Value]:
    """The variables behind a branch, of which each alternative gives others.

    Where a list of options differs, the options that all alternatives have stay, and the others
    are kept as uncertain; any other value that differs is not known.
    """
    if len(alternatives) == 1:
        return dict(alternatives[0])
    names = dict.fromkeys(name for each in alternatives for name in each)
    found: dict[str, Value] = {}
    for name in names:
        values = [each.get(name) for each in alternatives]
        first = values[0]
        if first is not None and all(each is first or each == first for each in values):
            found[name] = first
        else:
            found[name] = _joined(name, values, why)
    return found


def _joined(name: str, values: Sequence[Value | None], why: str) -> Value:
    given = [each for each in values if each is not None and each is not UNSET]
    differs = Value((unknown(f"${name}", why),), is_array=any(each.is_array for each in given))
    if differs.is_array:
        if not all(each.is_array for each in given):
            return differs
        same, words = _common([each.elements if each else () for each in values], why)
        return Value((*same, *words), is_array=True)
    texts = [each.elements[0] if each and each.elements else () for each in values]
    known = {known_text(each) for each in texts}
    if len(known) == 1 and None not in known and len(given) == len(values):
        return Value((tuple(replace(each, start=None) for each in texts[0]),))
    if not any(_OPTION.search(said_text(each)) for each in texts):
        return differs
    same, words = _common([_words(each) for each in texts], why)
    return Value((spaced((*same, *words)),))


def _words(pieces: Pieces) -> tuple[Pieces, ...]:
    builder = FieldsBuilder()
    builder.add_split(pieces)
    builder.end()
    return tuple(builder.words)


def _common(lists: Sequence[Sequence[Pieces]], why: str) -> tuple[list[Pieces], list[Pieces]]:
    """Words with which all lists begin and options that all have; and, uncertain, the others.

    The uncertain ones come last: whatever their order in the script was, they may override.
    """
    number = _num_same(lists)
    options = [list(_options(each[number:])) for each in lists]
    said = [
        [tuple((said_text(w), all(p.is_certain for p in w)) for w in option) for option in each]
        for each in options
    ]
    shared = set(said[0]).intersection(*said[1:])
    same = list(lists[0][:number])
    others: list[Pieces] = []
    for at, each in enumerate(options):
        for option, text in zip(each, said[at], strict=True):
            if text not in shared:
                others += (uncertain(word, why) for word in option)
            elif at == 0:
                same += (tuple(replace(piece, start=None) for piece in word) for word in option)
    return same, others


def _options(words: Sequence[Pieces]) -> Iterator[list[Pieces]]:
    """Each option with the words up to the next."""
    option: list[Pieces] = []
    for word in words:
        if option and said_text(word).startswith("-"):
            yield option
            option = []
        option.append(word)
    if option:
        yield option


def _num_same(lists: Sequence[Sequence[object]]) -> int:
    """The number of items with which all lists begin."""
    number = 0
    for items in zip(*lists, strict=False):
        if any(each != items[0] for each in items):
            break
        number += 1
    return number


def doubted_variables(variables: Mapping[str, Value], why: str) -> dict[str, Value]:
    """The variables behind code that may set each; options are kept as uncertain.

    Programs and what Slurm sets stay as they are.
    """
    found: dict[str, Value] = {}
    for name, value in variables.items():
        said = " ".join(map(said_text, value.elements))
        if name.startswith("SLURM_") or not name.isidentifier() or said.endswith(".py"):
            found[name] = value
        elif value.is_array or _OPTION.search(said):
            elements = tuple(uncertain(each, why) for each in value.elements)
            found[name] = replace(value, elements=elements)
        else:
            found[name] = Value((unknown(f"${name}", why),))
    return found
