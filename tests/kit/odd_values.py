"""Values that no reasonable client sends, as JSON and YAML; all fuzzers draw from them."""

from __future__ import annotations

import json
from typing import Any, Final

import yaml
from hypothesis import strategies as st

from tests.kit.hostile_texts import Place, changed, mappings, walk

ODD_TEXTS: Final = [
    *("\ud800", "half \udfff a pair", "a\0b", "bell\x07", "\x1b[31mred", "one\ntwo", "\u202eright"),
    *(
        "=1+1",
        "+1",
        "-1",
        "@SUM(A1)",
        "=HYPERLINK(1)",
        "\t=1",
        " x",
        "x ",
        "",
        "\ufeff",
        "9" * 5000,
    ),
    "x" * 300_000,
]
ODD_NUMBERS: Final = [
    *("1" * 5000, "-" + "9" * 4000, "9" * 400, "1e999", "-1e999", "NaN", "-Infinity"),
    *("9223372036854775808", "-9223372036854775809", "1e308", "1e-300", "-0.0", "0.5", "-1"),
]
"""As JSON spells them, or Python's reader of it takes them; `json.dumps` writes hardly any."""

DEPTHS: Final = [100, 101, 200, 300, 985, 2_000, 15_000, 100_000]

ODD_YAML: Final = [
    *(
        "1: b",
        "~: b",
        "2020-01-01: b",
        "1.5: b",
        "true: b",
        ".nan: b",
        "? [a, b]\n: c",
        "? {a: b}\n: c",
    ),
    *("seed: .nan", "seed: -.inf", "seed: 2020-01-01", "seed: !!binary aGk=", "seed: !!set {a}"),
    *("seed: &a [*a]", "seed: 1" + ":59" * 60_000, "seed: 1" + ":59" * 30, "seed: 0x" + "f" * 5000),
    *("seed: " + "1" * 5000, "1" * 5000 + ": b", "name: again", "<<: {a: b}", 'seed: "\\ud800"'),
    *('seed: "\\0"', "0x10: b\n16: c", "seed: 1.0e+999", "%TAG ! x", "seed: 0o" + "7" * 5000),
]
"""Lines to add to a mapping."""


def nested(depth: int, *, lists: bool = False) -> str:
    """A JSON text of so many levels."""
    return "[" * depth + "]" * depth if lists else '{"a":' * depth + "1" + "}" * depth


def one_of(values: list[Any]) -> st.SearchStrategy[Any]:
    """As `st.sampled_from`, which spells long values out in reprs."""
    return st.integers(0, len(values) - 1).map(lambda place: values[place])


odd_texts: Final = one_of(ODD_TEXTS) | st.text(
    st.characters(categories=("Cs", "Cc", "Cf", "Zs", "Lu", "Sm")), max_size=6
)
FREE: Final = frozenset(("health", "versions"))
"""Maps that are free in what they hold."""

odd_depths: Final = st.sampled_from(DEPTHS) | st.integers(90, 1_200)
odd_json: Final = (
    odd_texts.map(json.dumps)
    | one_of(ODD_NUMBERS)
    | st.builds(nested, odd_depths, lists=st.booleans())
    | st.builds(nested, one_of([101, 200, 300, 400]))  # read by parsers, and not by all writers
    | st.integers(0, 20_000).map(lambda size: json.dumps(dict.fromkeys(map(str, range(size)), 1)))
    | st.builds(lambda text: json.dumps({text: 1}), odd_texts)
    | st.just('{"a": 1, "a": 2}')
)
"""JSON texts of one value each."""


def places(document: dict[str, Any]) -> list[Place]:
    """Where a document has values, inner ones included."""
    return [place for place, _ in walk(document) if place]


def planted(document: dict[str, Any], place: Place, value: str) -> str:
    """The document as JSON, with this JSON text in a place."""
    return json.dumps(changed(document, place, _MARK)).replace(json.dumps(_MARK), value)


@st.composite
def odd_bodies(draw: st.DrawFn, document: dict[str, Any]) -> str:
    """JSON texts of a document with something odd in any place of it, or with one field more."""
    if draw(st.integers(0, 3)) == 0:
        place = (*draw(one_of(mappings(document))), draw(odd_texts))
        return json.dumps(changed(document, place, "text"))
    return planted(document, draw(one_of(places(document))), draw(odd_json))


def bodies_with_odd_maps(document: dict[str, Any]) -> st.SearchStrategy[str]:
    """As `odd_bodies`, but in a map that is free in what it holds, where the document has one."""
    free = [place for place in places(document) if place[-1] in FREE]
    odd = (
        st.builds(nested, one_of([101, 300, 400, 550]))
        | one_of([text for text in ODD_TEXTS if len(text) < 1000]).map(
            lambda text: json.dumps({"k": text})
        )
        | odd_json
    )
    if not free:
        return odd_bodies(document)
    return st.builds(planted, st.just(document), one_of(free), odd)


def odd_yaml_bodies(document: dict[str, Any]) -> st.SearchStrategy[str]:
    """YAML texts of a document with an odd line more."""
    text = yaml.safe_dump(document)
    return one_of(ODD_YAML).map(lambda line: f"{text}{line}\n")


_MARK: Final = "@odd@"
