"""The kinds of a model's layers from the options of Megatron's family.

Windows, experts and linear attention each say in which layers they are; the pattern of a hybrid
names every layer. Sources at d98e8a64: megatron/core/transformer/utils.py,
megatron/core/models/gpt/experimental_attention_variant_module_specs.py and
megatron/core/models/hybrid/hybrid_layer_allocation.py.
"""

from __future__ import annotations

import re
from itertools import cycle, islice
from typing import Final

from layout_tuner.search_spaces.models.layer_kinds import (
    SYMBOLS,
    shortest_pattern,
    stated_kinds,
    write_layer_kinds,
)
from layout_tuner.trainers.found_jobs.found_job import MODEL
from layout_tuner.trainers.found_jobs.megatron.megatron_options import Arguments

PATTERN_FLAGS: Final = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
KINDS: Final = f"{MODEL}layer_kinds"
OTHER_KINDS: Final = "layers of a kind that no shape of a model says"
DELTA_NETS: Final = ("gdn", "gated_delta_net")

_WINDOWS: Final = "--window-attn-skip-freq"
_EXPERTS: Final = "--moe-layer-freq"
_LINEAR: Final = "--linear-attention-freq"
_VARIANT: Final = "--experimental-attention-variant"
_LETTERS: Final = {**SYMBOLS, "+": "full"}
"""Kinds by the letters of a pattern; `+` is latent attention."""
_MOST_LAYERS: Final = 1 << 14
_LIST: Final = r"\[([01,]*)\]"


def read_kinds(arguments: Arguments) -> tuple[str, ...]:
    """Notes and returns the kinds of the layers; empty: they are not understood."""
    _read_window(arguments)
    arguments.is_given(_WINDOWS, _EXPERTS, _LINEAR, _VARIANT)
    return (_kinds_of_pattern if pattern_of(arguments) else _kinds_of_lists)(arguments)


def pattern_of(arguments: Arguments) -> str:
    """The pattern of a hybrid; empty: there is none."""
    return arguments.text(KINDS, *PATTERN_FLAGS) or ""


def _kinds_of_pattern(arguments: Arguments) -> tuple[str, ...]:
    layers, *depths = pattern_of(arguments).replace("|", "").split("/")
    option = arguments.options[next(each for each in PATTERN_FLAGS if each in arguments.options)]
    if not layers or {*layers, *"".join(depths)} - {*_LETTERS}:
        arguments.miss(option, f"{OTHER_KINDS}; known are {' '.join(_LETTERS)}", KINDS)
        return ()
    arguments.findings.note(f"{MODEL}num_layers", len(layers), option.said)
    has_window = bool(arguments.findings.value(f"{MODEL}attention_window"))
    windows = _in_layers(arguments, f"{MODEL}full_attention_every", _WINDOWS, has_window)
    names = [_LETTERS[each] for each in layers]
    kinds = tuple(
        "window" if is_window and name == "full" else name
        for name, is_window in zip(names, cycle(windows or [0]), strict=False)
    )
    arguments.note(KINDS, write_layer_kinds(shortest_pattern(kinds)), option)
    of_depth = re.sub("[^*+]", "", layers)[-1:] + re.sub("[^-E]", "", layers)[-1:]
    if {*depths} - {of_depth}:
        why = f"a depth of multi-token prediction here is {of_depth}"
        arguments.miss(option, why, f"{MODEL}num_mtp_layers")
    elif depths:
        arguments.note(f"{MODEL}num_mtp_layers", len(depths), option)
    return kinds


def _kinds_of_lists(arguments: Arguments) -> tuple[str, ...]:
    """The layers with windows, experts and linear attention."""
    value = arguments.findings.value
    parts = {
        _WINDOWS: ("full_attention_every", value(f"{MODEL}attention_window")),
        _EXPERTS: ("num_dense_layers", value(f"{MODEL}num_experts")),
        _LINEAR: ("layer_kinds", arguments.text(KINDS, _VARIANT)),
    }
    if (arguments.text(KINDS, _VARIANT) or DELTA_NETS[0]) not in DELTA_NETS:
        arguments.miss(arguments.options[_VARIANT], OTHER_KINDS, KINDS)
    lists = [
        _in_layers(arguments, f"{MODEL}{ours}", flag, bool(is_there))
        for flag, (ours, is_there) in parts.items()
    ]
    if not all(lists):
        return ()
    number = value(f"{MODEL}num_layers") or max(map(len, lists))
    layers = zip(*(islice(cycle(each), number) for each in lists), strict=True)
    kinds = tuple(
        f"{'gated_delta_net' if is_delta else 'window' if has_window else 'full'}"
        f"+{'experts' if has_experts else 'dense'}"
        for has_window, has_experts, is_delta in layers
    )
    if value(f"{MODEL}attention_window") and not any("window" in kind for kind in kinds):
        arguments.findings.forget(f"{MODEL}attention_window")
    said = " ".join(arguments.options[flag].said for flag in parts if flag in arguments.options)
    stated = stated_kinds(kinds)
    if len(lists[0]) > number and "layer_kinds" not in stated:
        stated["full_attention_every"] = len(lists[0])  # in none of the layers
    for name, each in stated.items():
        arguments.findings.note(f"{MODEL}{name}", each, said)
    return kinds


def _in_layers(arguments: Arguments, ours: str, flag: str, is_there: bool) -> list[int]:
    """1 for the layers that have something and 0 for others, repeated; empty: not understood.

    Of every n-th with experts the first one is layer 0; the n-th is the first without a window, or
    without linear attention.
    """
    words = arguments.texts(ours, flag)
    if arguments.findings.is_open(ours) and is_there:
        return []
    if words is None or not is_there:
        return [int(is_there)]
    option, text = arguments.options[flag], ",".join(words)
    number, found = arguments.findings.value(f"{MODEL}num_layers"), layers_of_text(text)
    if re.fullmatch(r"0*[1-9]\d{0,4}", text):
        others = [int(flag != _EXPERTS)] * (int(text) - 1)
        return [1, *others] if flag == _EXPERTS else [*others, 0]
    if found is None:
        why = "only whole numbers, and lists of 0 and 1 with + and * are read"
        arguments.miss(option, why, ours)
    elif len(found) != (number or len(found)):
        arguments.miss(option, f"it has {len(found)} layers, and the model other ones", ours)
        return []
    return found or []


def _read_window(arguments: Arguments) -> None:
    name, flag = f"{MODEL}attention_window", "--window-size"
    words = arguments.texts(name, flag)
    if words is None:
        return
    option = arguments.options[flag]
    ends = re.fullmatch(r"\(?(-?\d{1,9}),(-?\d{1,9})\)?", ",".join(words).replace(" ", ""))
    if ends is None or int(ends[2]) > 0:
        arguments.miss(option, "it is not a number of tokens before, and 0", name)
    elif int(ends[1]) >= 0:
        # Megatron counts the positions before a token's own.
        arguments.note(name, int(ends[1]) + 1, option)


def layers_of_text(text: str) -> list[int] | None:
    """What a text such as `([0]*3+[1]*58)` lists, without running it; None: it is of another form.

    No more is written out than a model can have layers.
    """
    text, before = text.replace(" ", ""), ""
    while text != before and len(text) <= 2 * _MOST_LAYERS:
        before = text
        text = re.sub(rf"\({_LIST}\)", r"[\1]", text)
        text = re.sub(rf"{_LIST}\*(\d{{1,9}})", _repeated, text)
        text = re.sub(rf"{_LIST}\+{_LIST}(?!\*)", _joined, text)
    is_list = re.fullmatch(r"\[[01](,[01])*\]", text) and len(text) <= 2 * _MOST_LAYERS + 1
    return [int(each) for each in text[1:-1:2]] if is_list else None


def _repeated(found: re.Match[str]) -> str:
    most = 2 * _MOST_LAYERS // (len(found[1]) + 1) + 1  # one too many is seen at the end
    return f"[{','.join([found[1]] * min(int(found[2]), most)) if found[1] else ''}]"


def _joined(found: re.Match[str]) -> str:
    return f"[{','.join(filter(None, found.groups()))}]"
