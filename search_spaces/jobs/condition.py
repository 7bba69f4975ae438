"""Conditions of job knobs: when a trainer has a knob at all, such as `ep > 1 and not compile`.

A condition is `and`, `or`, `not` and brackets over comparisons: `==`, `!=`, `<`, `<=`, `>`, `>=`,
and `in` with a list. Left of a comparison is a name: a field of the layout, a number of the model,
`device`, or another knob; right is a number, `true`, `false`, a word, or the name of another
number. A switch may stand alone. Python's parser reads it; nothing of it is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import and_, eq, ge, gt, le, lt, ne, or_
from typing import TYPE_CHECKING, Any, Final, Literal

from layout_tuner.documents.reading import nearest, shown, word_of
from layout_tuner.errors import SpaceInvalidError
from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.search_spaces.layouts.layout import KNOBS, LAYOUT_FIELDS

if TYPE_CHECKING:  # the catalogues of trainers load no numpy
    from layout_tuner.array_types import Bools
    from layout_tuner.search_spaces.clusters.cluster import Cluster
    from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
    from layout_tuner.search_spaces.models.model_shape import ModelShape

MAX_CONDITION_LENGTH: Final = 300

DERIVED_NAMES: Final = ("dp_cp", "edp", "tp_ranks", "num_devices", "global_batch_size")
"""Properties of `Layout` that conditions may name besides its fields."""
MODEL_NAMES: Final = (
    "family",
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "seq_length",
    "num_experts",
    "experts_per_token",
    "num_dense_layers",
    "shared_expert_ffn_hidden_size",
    "num_mtp_layers",
)
"""Fields of the model that conditions may name; family is a word, the others are numbers."""
DEVICE: Final = "device"
"""The name of the cluster's device: it equals each word that its description has."""

Operator = Literal["==", "!=", "<", "<=", ">", ">="]
_OPERATORS: Final[Mapping[type[ast.cmpop], Operator]] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_COMPARE: Final[Mapping[Operator, Callable[[Any, Any], Any]]] = {
    "==": eq,
    "!=": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}


@dataclass(frozen=True, slots=True)
class Name:
    """The name of another number, on the right of a comparison."""

    name: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A name compared with a value."""

    name: str
    operator: Operator
    value: JobValue | Name


@dataclass(frozen=True, slots=True)
class Not:
    part: Node


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: tuple[Node, ...]


Node = Comparison | Not | AllOf | AnyOf


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition; `Condition.read` makes it of its text."""

    text: str
    root: Node

    @classmethod
    def read(cls, text: object) -> Condition:
        """The condition of a text; SpaceInvalidError where it is none, with what is wrong."""
        if not isinstance(text, str) or len(text) > MAX_CONDITION_LENGTH:
            raise SpaceInvalidError(
                f"{shown(text)} is not a condition of at most {MAX_CONDITION_LENGTH} characters, "
                "such as tp > 1 and recompute != full"
            )
        try:
            root = _node(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SpaceInvalidError(
                f"{shown(text)} is not a condition: write comparisons such as tp > 1 or "
                f"recompute in [none, full], joined by and, or, not ({error})"
            ) from error
        return cls(text.strip(), root)

    @property
    def names(self) -> frozenset[str]:
        """All names that it asks about."""
        found = {each.name for each in _comparisons(self.root)}
        others = (each.value for each in _comparisons(self.root))
        return frozenset(found | {each.name for each in others if isinstance(each, Name)})

    def unknown_name(self, knobs: Collection[str]) -> str | None:
        """A sentence about a name that is neither of a layout nor of a model nor among `knobs`."""
        known = (*LAYOUT_FIELDS, *DERIVED_NAMES, *MODEL_NAMES, DEVICE, *knobs)
        for name in sorted(self.names):
            if name not in known:
                return f"{shown(name)} in {shown(self.text)} is unknown{nearest(name, known)}"
        return None

    def holds(self, facts: Facts) -> bool | Bools:
        """Whether it holds: one answer, or one of each layout.

        `facts.job` has the values of all knobs that it names. The shape is that of the columns that
        it asks about, broadcast against each other.
        """
        answer: bool | Bools = _value(self.root, facts)
        return answer

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """All of its comparisons."""
        return tuple(_comparisons(self.root))

    @property
    def of_layouts(self) -> frozenset[Comparison]:
        """Its comparisons that depend on the layout."""
        return frozenset(
            each
            for each in _comparisons(self.root)
            if each.name in _OF_LAYOUTS
            or (isinstance(each.value, Name) and each.value.name in _OF_LAYOUTS)
        )


def joined_text(conditions: Sequence[Condition]) -> str:
    """The text of the condition that all of some conditions hold."""
    if len(conditions) == 1:
        return conditions[0].text
    return " and ".join(
        f"({each.text})" if isinstance(each.root, AnyOf) else each.text for each in conditions
    )


_OF_LAYOUTS: Final = frozenset((*LAYOUT_FIELDS, *DERIVED_NAMES))
_WORDS: Final = (DEVICE, "family")
"""Names of words that are no knobs."""
_NUMBERS: Final = frozenset(
    name
    for name in (*LAYOUT_FIELDS, *DERIVED_NAMES, *MODEL_NAMES)
    if name not in _WORDS and (name not in KNOBS or KNOBS[name].is_number)
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a condition is asked about."""

    layouts: LayoutColumns
    model: ModelShape
    cluster: Cluster
    job: Mapping[str, JobValue]
    known: Mapping[Comparison, bool] = field(default_factory=dict)
    """Comparisons whose answer is known already."""

    def value(self, name: str) -> Any:
        """The value of a name: a number for each layout, or one value."""
        if name in self.job:
            return self.job[name]
        if name in MODEL_NAMES:
            return getattr(self.model, name)
        return getattr(self.layouts, name)

    def compared(self, node: Comparison) -> Any:
        """Whether a comparison holds: one answer, or one of each layout."""
        if node in self.known:
            return self.known[node]
        if node.name == DEVICE:
            is_it = _words(str(node.value)) <= _words(self.cluster.device)
            return is_it if node.operator == "==" else not is_it
        left, right = self.value(node.name), node.value
        if isinstance(right, Name):
            right = self.value(right.name)
        elif node.name not in self.job and node.name in KNOBS:
            right = KNOBS[node.name].code(right)
        elif isinstance(left, (bool, str)) or isinstance(right, (bool, str)):
            # Words and switches: 1 is not true, and numpy would compare other types by element.
            is_it = type(left) is type(right) and left == right
            return is_it if node.operator == "==" else not is_it
        return _COMPARE[node.operator](left, right)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.split(r"[^a-z0-9]+", text.lower()))


def _value(node: Node, facts: Facts) -> Any:
    match node:
        case Comparison():
            return facts.compared(node)
        case Not():
            return eq(_value(node.part, facts), False)
        case AllOf():
            return _joined(and_, node.parts, facts)
        case AnyOf():
            return _joined(or_, node.parts, facts)


def _joined(join: Any, parts: tuple[Node, ...], facts: Facts) -> Any:
    joined = _value(parts[0], facts)
    for part in parts[1:]:
        joined = join(joined, _value(part, facts))
    return joined


def _comparisons(node: Node) -> Iterator[Comparison]:
    match node:
        case Comparison():
            yield node
        case Not():
            yield from _comparisons(node.part)
        case _:
            for part in node.parts:
                yield from _comparisons(part)


def _node(tree: ast.expr) -> Node:
    match tree:
        case ast.BoolOp(op=ast.And(), values=values):
            return AllOf(tuple(map(_node, values)))
        case ast.BoolOp(op=ast.Or(), values=values):
            return AnyOf(tuple(map(_node, values)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return Not(_node(operand))
        case ast.Name(id=name):
            return _checked(name, "==", True)
        case ast.Compare(left=ast.Name(id=name), ops=[operator], comparators=[right]):
            return _comparison(name, operator, right)
    raise ValueError(f"{ast.unparse(tree)!r} is no comparison of a name with a value")


def _comparison(name: str, operator: ast.cmpop, right: ast.expr) -> Node:
    match operator, right:
        case (ast.In() | ast.NotIn(), ast.List(elts=[_, *_] as elements)):
            parts = tuple(_checked(name, "==", _literal(name, each)) for each in elements)
            listed = AnyOf(parts)
            return listed if isinstance(operator, ast.In) else Not(listed)
        case (ast.In() | ast.NotIn() | ast.Is() | ast.IsNot(), _):
            raise ValueError("after `in` stands a list, such as [none, full]")
    return _checked(name, _OPERATORS[type(operator)], _literal(name, right))


def _literal(name: str, right: ast.expr) -> JobValue | Name:
    match right:
        case ast.Constant(value=bool() | int() as number):
            return number
        case ast.Constant(value=str() as word):
            return word
        case ast.Name(id="true" | "false" as word):
            return word == "true"
        case ast.Name(id=word):
            return Name(word) if name in _NUMBERS and word in _NUMBERS else word
    raise ValueError(f"{ast.unparse(right)!r} is not a number, a switch or a word")


def _checked(name: str, operator: Operator, value: JobValue | Name) -> Comparison:
    """A comparison; ValueError where its value is none that the name can have."""
    if isinstance(value, Name):
        pass
    elif name in _WORDS or isinstance(value, (bool, str)):
        if operator not in ("==", "!="):
            raise ValueError(f"{name} {operator} {value}: words and switches are == or != only")
        if name in _WORDS and not isinstance(value, str):
            raise ValueError(f"{name} is compared with a word, such as h100 or llama")
        if name in _NUMBERS and name not in KNOBS:
            raise ValueError(f"{name} is a number, and {word_of(value)} is none")
    if name in KNOBS and not isinstance(value, Name):
        knob = KNOBS[name]
        if operator in ("==", "!=") or not knob.is_number:
            problem = knob.problem(value)
        else:
            problem = None if type(value) is int else f"{shown(value)} is not a whole number"
        if problem:
            raise ValueError(f"{name}: {problem}")
    return Comparison(name, operator, value)
