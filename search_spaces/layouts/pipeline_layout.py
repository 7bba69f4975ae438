"""Pipelines written out: which layers each stage of a pipeline has, in Megatron-LM's letters.

`E` is the embedding, `t` a transformer layer, `L` the output layer and its loss, `|` the boundary
of two stages; `x*n` is a letter n times, `(...)*n` a group n times, commas count for nothing. The
stages are in the order of the layers, pp * vpp of them (Megatron-LM's
`core/transformer/pipeline_parallel_layer_layout.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final

from layout_tuner.documents.reading import shown

SPLIT: Final = "split"
"""The word for a pipeline that is not written out: `pipeline_split` says how layers are split."""
MAX_TEXT: Final = 160
"""Most characters of a canonical text: a column of the database has this length."""
MAX_STAGES: Final = 1024
"""Most stages, and most layers, of a text: it bounds what a short text can unfold to."""

_GROUP: Final = re.compile(r"\(([^()]+)\)\*(\d{1,4})", re.ASCII)
_LETTER: Final = re.compile(r"([A-Za-z])\*(\d{1,4})", re.ASCII)


def canonical_layout(value: object) -> str:
    """The canonical text of a pipeline that is written out, or `SPLIT`.

    Raises:
        ValueError: it is none.
    """
    if value == SPLIT:
        return SPLIT
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a text such as Et*3|(tt|)*2tL, or {SPLIT}")
    return _canonical(value)


@lru_cache(maxsize=4096)
def _canonical(text: str) -> str:
    canonical = layout_text(_read_stages(text))
    if len(canonical) > MAX_TEXT:
        raise ValueError(f"{shown(text)} takes {len(canonical)} characters, more than {MAX_TEXT}")
    return canonical


@lru_cache(maxsize=4096)
def stage_layers(text: str) -> tuple[int, ...]:
    """Transformer layers of each stage of a canonical text."""
    return tuple(stage.count("t") for stage in unfolded(text).split("|"))


def layout_text(layers: Sequence[int]) -> str:
    """The canonical text of stages with these layers, such as `Et*3|(tt|)*28t|L`."""
    runs = [(n, len(list(same))) for n, same in groupby(layers[1:-1])]
    inner = "".join(f"({_run(n)}|)*{r}" if r > 1 else f"{_run(n)}|" for n, r in runs)
    last = f"|{inner}{_run(layers[-1])}" if len(layers) > 1 else ""
    return f"E{_run(layers[0])}{last}L"


def layout_key(text: str) -> str:
    """The text in the characters of a key, such as `3.2x28.1.0`: layers, and how often."""
    runs = [(n, len(list(same))) for n, same in groupby(stage_layers(text))]
    return ".".join(f"{n}x{r}" if r > 1 else str(n) for n, r in runs)


def layout_of_key(key: str) -> str:
    """The text of `layout_key`; ValueError where it is none."""
    runs = [[*map(int, run.split("x")), 1][:2] for run in key.split(".")]
    if sum(times for _, times in runs) > MAX_STAGES:
        raise ValueError(f"{shown(key)} has more than {MAX_STAGES} stages")
    return canonical_layout(layout_text([n for n, times in runs for _ in range(times)]))


def _run(n: int) -> str:
    return f"t*{n}" if n > 2 else "t" * n


def unfolded(text: str) -> str:
    """Each letter as often as it stands for; ValueError where they are too many."""
    if len(text) > 4 * MAX_STAGES:
        raise ValueError(f"a text of {len(text)} characters is longer than {4 * MAX_STAGES}")
    text = re.sub(r"[,\s]", "", text)
    for pattern in (_GROUP, _LETTER):
        # The limits of both patterns together: 4 digits of groups of a short text, and of letters.
        if sum(len(m[1]) * int(m[2]) for m in pattern.finditer(text)) > 4 * MAX_STAGES:
            raise ValueError(f"{shown(text)} has more than {MAX_STAGES} layers or stages")
        text = pattern.sub(lambda m: m[1] * int(m[2]), text)
    return text


def _read_stages(text: str) -> list[int]:
    """Transformer layers of each stage, of any text that Megatron-LM reads."""
    letters = re.sub("m+L$", "L", unfolded(text))  # models say their depths (num_mtp_layers)
    if "m" in letters:
        raise ValueError(
            f"{shown(text)} has a depth of multi-token prediction (m) elsewhere than before the last L"
        )
    if wrong := re.search(r"[^EtL|]", letters):
        raise ValueError(
            f"{shown(text)} has {shown(wrong[0])}, which is none of E (embedding), t (transformer "
            "layer), L (loss), | (next stage), x*n and (...)*n"
        )
    if re.fullmatch(r"Et*(\|t*)*L", letters) is None:
        raise ValueError(
            f"{shown(text)} does not begin with its only E (embedding) and end with its only L "
            "(loss)"
        )
    stages = [stage.count("t") for stage in letters.split("|")]
    if len(stages) > MAX_STAGES or sum(stages) > MAX_STAGES:
        raise ValueError(f"{shown(text)} has more than {MAX_STAGES} layers or stages")
    if not all(stages[1:-1]):
        empty = stages.index(0, 1)
        raise ValueError(f"{shown(text)} has no layer in stage {empty + 1} of {len(stages)}")
    if not any(stages):
        raise ValueError(f"{shown(text)} has no transformer layer t")
    return stages
