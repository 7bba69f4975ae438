"""Reading documents that people write, JSON or YAML: strict, and with the line of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, NoReturn

import yaml

from api.errors import DocumentMalformedError
from search_spaces.reading import shown

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML was built without libyaml; this one is slower and reads the same
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

JSON_TYPE: Final = "application/json"
YAML_TYPES: Final = (
    "application/yaml",
    "application/x-yaml",
    "text/yaml",
    "text/x-yaml",
)
MAX_DEPTH: Final = 100
"""Deepest nesting of YAML; a campaign needs five."""


def read_json(body: bytes) -> Any:
    """Parses JSON.

    Raises:
        DocumentMalformedError: it is not JSON, names a field twice, holds NaN or infinity, or text
            that cannot be shown.
    """
    try:
        document = json.loads(
            _text(body), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise DocumentMalformedError(
            f"malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise DocumentMalformedError(f"malformed JSON: {error}") from error
    except RecursionError as error:
        raise DocumentMalformedError("malformed JSON: it is nested too deeply") from error
    _refuse_unprintable(document, "JSON")
    return document


def read_yaml(body: bytes) -> Any:
    """Parses YAML without tags, aliases, merge keys and repeated keys.

    Raises:
        DocumentMalformedError: it is not such YAML, or holds text that cannot be shown.
    """
    text = _text(body)
    try:
        _refuse_surprises(text)
        # A safe loader: it makes plain values only.
        document = yaml.load(text, Loader=_StrictLoader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise DocumentMalformedError(f"malformed YAML{where}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise DocumentMalformedError(f"malformed YAML: {_one_line(error)}") from error
    _refuse_unprintable(document, "YAML")
    return document


def reader_of(content_type: str) -> Callable[[bytes], Any] | None:
    """The reader for a content type; None when there is none. No type at all is JSON."""
    essence = content_type.partition(";")[0].strip().lower()
    if essence in YAML_TYPES:
        return read_yaml
    if essence in ("", JSON_TYPE) or essence.endswith("+json"):
        return read_json
    return None


def texts_of(document: Any) -> Iterator[str]:
    """Every string of a document, those that are keys included."""
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value


def _refuse_unprintable(document: Any, kind: str) -> None:
    """Refuses control characters, and halves of surrogate pairs, which are no text at all."""
    for text in texts_of(document):
        if not text.isprintable():
            raise DocumentMalformedError(
                f"malformed {kind}: the text {shown(text)} has characters that cannot be shown"
            )


def _refuse_surprises(text: str) -> None:
    """Refuses aliases (a few of them can stand for gigabytes), tags, and bottomless nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            _refuse("aliases are not supported; write the value out", event.start_mark)
        tag = getattr(event, "tag", None)
        if tag is not None:
            _refuse(
                f"the tag {shown(tag)} is not supported; write the plain value", event.start_mark
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                _refuse("it is nested too deeply", event.start_mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _StrictKeys:
    """Refuses keys that a reader of the file would not expect; mixed into a loader."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                _refuse("a key is a list or a mapping; it must be a word", key_node.start_mark)
            if key_node.tag == _MERGE_TAG:
                _refuse("merge keys are not supported; write the fields out", key_node.start_mark)
            key = self.construct_object(key_node)  # type: ignore[attr-defined]
            if key in seen:
                _refuse(f"the key {shown(key_node.value)} is there twice", key_node.start_mark)
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)  # type: ignore[misc]
        return mapping


class _StrictLoader(_StrictKeys, _SafeLoader):
    pass


_MERGE_TAG: Final = "tag:yaml.org,2002:merge"


def _refuse(problem: str, mark: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for name, _value in pairs:
            if name in seen:
                raise DocumentMalformedError(
                    f"malformed JSON: the field {shown(name)} is there twice"
                )
            seen.add(name)
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise DocumentMalformedError(f"malformed JSON: {name} is not a JSON number")


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise DocumentMalformedError(f"the document is not UTF-8 at line {line}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
