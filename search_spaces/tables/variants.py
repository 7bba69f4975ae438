"""How rows of one layout were run, beside its knobs: what columns outside the format say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.tables.columns import RESULT_COLUMNS

Variant = tuple[tuple[str, str], ...]
"""Names and values of columns, sorted by name."""

Identity = tuple[Layout, Variant]
"""Rows of a cell with the same identity are repeats of one measurement."""

_ROW_NUMBERS: Final = re.compile(r"(Unnamed: \d+)?")
"""The names that pandas gives to a column of row numbers when it writes and reads one."""
_NOT_IN_KEYS: Final = re.compile(r"[^A-Za-z0-9._=,+-]")
_MOST_OF_KEY: Final = 48


def variant_of(aside: Mapping[str, str]) -> Variant:
    """The filled columns of a row, less those of results and of row numbers."""
    return tuple(
        (name, value.strip())
        for name, value in sorted(aside.items())
        if value.strip() and name not in RESULT_COLUMNS and not _ROW_NUMBERS.fullmatch(name)
    )


def differences(identities: Iterable[Identity]) -> dict[Identity, Variant]:
    """By identity, its values of the columns in which the identities of its layout differ.

    A value may be empty. The only identity of a layout has no such columns.
    """
    of_layout: dict[Layout, list[Variant]] = {}
    for layout, variant in dict.fromkeys(identities):
        of_layout.setdefault(layout, []).append(variant)
    found: dict[Identity, Variant] = {}
    for layout, variants in of_layout.items():
        counts = Counter(pair for variant in variants for pair in variant)
        names = sorted({name for (name, _), times in counts.items() if times < len(variants)})
        for variant in variants:
            values = dict(variant)
            found[layout, variant] = tuple((name, values.get(name, "")) for name in names)
    return found


def variant_key(layout: Layout, differing: Variant) -> str:
    """The layout's key; then, in brackets, what parts the row from others of the layout, if any.

    The second part is cut, and holds no `~`, by which keys of cheap probes are known.
    """
    if not differing:
        return layout.key
    said = ",".join(f"{name}={value}" for name, value in differing)
    plain = _NOT_IN_KEYS.sub("_", said)
    if plain != said or len(plain) > _MOST_OF_KEY:
        plain = f"{plain[: _MOST_OF_KEY - 9]}_{sha256(said.encode()).hexdigest()[:8]}"
    return f"{layout.key}[{plain}]"


def variant_words(key: str) -> str:
    """What `variant_key` put in brackets; empty: nothing."""
    return key.partition("[")[2].removesuffix("]")
