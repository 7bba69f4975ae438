"""The one reader of JSON and YAML: files and bodies of requests; errors state the line."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from layout_tuner.documents.limits import (
    MAX_DEPTH,
    MAX_FIELDS,
    TextRule,
    document_problem,
    visible_text_problem,
)
from layout_tuner.documents.numbers import CORE_SCHEMA, core_value
from layout_tuner.documents.reading import shown, why_unreadable
from layout_tuner.errors import DocumentInvalidError, DocumentMalformedError

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # without libyaml: slower, same results
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

SAFE_LOADER: Final = _SafeLoader
"""PyYAML's loader of plain values."""

JSON_TYPE: Final = "application/json"
YAML_TYPES: Final = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")

_FILE_SUFFIXES: Final = (".json", ".yaml", ".yml")

MAX_NUMBER_LENGTH: Final = 400
"""Most characters of a number in YAML; the largest finite one has 309 digits."""

MAX_VALUES: Final = 50_000
"""Most values of a document, in YAML with its keys: 1,000 listed layouts have 40,000 with them."""


def described(named: object) -> Any:
    """The document of a file where this is a path, or a text that ends as the name of one does.

    Anything else, such as the name of a preset, is returned as it is.

    Raises:
        DocumentMalformedError: see `read_file`.
    """
    path = named if isinstance(named, Path) else file_named(named)
    return named if path is None else read_file(path)


def file_named(named: object) -> Path | None:
    """The path that a path or text is, by its end: that of JSON or YAML; None: it is no such."""
    path = Path(named) if isinstance(named, str | Path) else Path()
    return path if path.suffix in _FILE_SUFFIXES else None


def read_file(path: Path, *, text_rule: TextRule = visible_text_problem) -> Any:
    """The document in a file: JSON where its name ends in .json, YAML otherwise.

    Raises:
        DocumentMalformedError: it cannot be read, is empty, or is refused by `read_json` or
            `read_yaml`; the message begins with the file.
    """
    read = read_json if path.suffix.lower() == ".json" else read_yaml
    try:
        content = path.read_bytes()
        document = read(content, text_rule=text_rule) if content.strip() else None
    except DocumentMalformedError as error:
        raise DocumentMalformedError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise DocumentMalformedError(f"{path}: cannot be read: {why_unreadable(error)}") from error
    if document is None:
        raise DocumentMalformedError(f"{path}: is empty")
    return document


def read_json(
    body: bytes,
    max_values: int = MAX_VALUES,
    *,
    text_rule: TextRule = visible_text_problem,
    constants: Callable[[str], Any] | None = None,
) -> Any:
    """Parses a JSON document; by the rule its texts may have one line, as users write them.

    `constants` makes a value of NaN, Infinity or -Infinity, which are refused without it.

    Raises:
        DocumentMalformedError: it is not JSON, or has a field twice.
        DocumentInvalidError: it has more values, is nested too deeply, or no field accepts a number
            or text in it.
    """
    # Counted before they are made, by commas and brackets: empty ones twice.
    if _num_separators(body) >= max_values and (
        _num_separators(_STRING.sub(b"", body)) >= max_values
    ):
        raise DocumentInvalidError(f"it has more than {max_values} values")
    text = _text(body)
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=constants)
    except json.JSONDecodeError as error:
        raise DocumentMalformedError(
            f"malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except DocumentMalformedError:
        raise
    except ValueError as error:
        raise DocumentInvalidError(_TOO_MANY_DIGITS) from error
    except RecursionError as error:
        raise DocumentInvalidError(_TOO_DEEP) from error
    _refuse_invalid(document_problem(document, text_rule))
    return document


def _refuse_many_fields(number: int) -> None:
    if number > MAX_FIELDS:
        raise DocumentInvalidError(f"a mapping has more than {MAX_FIELDS} fields")


def _num_separators(body: bytes) -> int:
    return sum(body.count(separator) for separator in (b",", b"[", b"{"))


_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A JSON string, or the rest of a body that ends in one: the search is over in one pass."""


def read_yaml(body: bytes, *, text_rule: TextRule = visible_text_problem) -> Any:
    """Parses YAML that JSON can express: no tags, aliases, merge keys or repeated keys.

    Raises:
        DocumentMalformedError: it is not such YAML.
        DocumentInvalidError: it is nested too deeply, or JSON has no such value.
    """
    events = _accepted_events(_text(body))
    try:
        first = next(events, None)
        document = None if first is None else _value(first, events)
        next(events, None)  # a second document is refused
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at {_place(mark)}" if mark else ""
        raise DocumentMalformedError(f"malformed YAML{where}: {error.problem}") from error
    except DocumentMalformedError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML's own reader raises the last two for an escape that is no character.
        raise DocumentMalformedError(f"malformed YAML: {' '.join(str(error).split())}") from error
    _refuse_invalid(document_problem(document, text_rule))
    return document


def media_type_of(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def reader_of(content_type: str) -> Callable[[bytes], Any] | None:
    """The parser for a content type; None: there is none. An empty type is JSON."""
    essence = media_type_of(content_type)
    if essence in YAML_TYPES:
        return read_yaml
    if essence in ("", JSON_TYPE) or essence.endswith("+json"):
        return read_json
    return None


_TOO_DEEP: Final = f"it is nested too deeply, more than {MAX_DEPTH} levels"
_TOO_MANY_DIGITS: Final = "a whole number has thousands of digits, more than any field accepts"


def _refuse_invalid(problem: tuple[str, str] | None) -> None:
    if problem:
        field, why = problem
        raise DocumentInvalidError(why, field=field)


def _accepted_events(text: str) -> Iterator[yaml.NodeEvent | yaml.CollectionEndEvent]:
    """The parser's events about values, in order.

    Refuses aliases (a few can expand to gigabytes), tags, deep nesting and long numbers, and counts
    keys and values before they are made.
    """
    depth = num_nodes = 0
    for event in yaml.parse(text, Loader=SAFE_LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            yield event
        if isinstance(event, yaml.DocumentStartEvent) and num_nodes:
            _refuse("a second document begins; there must be one", event.start_mark)
        if not isinstance(event, yaml.NodeEvent):
            continue
        num_nodes += 1
        if num_nodes > MAX_VALUES:
            raise DocumentInvalidError(f"it has more than {MAX_VALUES} keys and values")
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
                raise DocumentInvalidError(f"{_place(event.start_mark)}: {_TOO_DEEP}")
        yield event


def _value(event: Any, events: Iterator[Any]) -> Any:
    """The value that begins with an event. No nodes are made: they are many times as large."""
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event)
    if isinstance(event, yaml.SequenceStartEvent):
        listed = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            listed.append(_value(event, events))
        return listed
    mapping: dict[Hashable, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _key(event)
        if key in mapping:
            _refuse(f"the key {shown(event.value)} is there twice", event.start_mark)
        mapping[key] = _value(next(events), events)
        _refuse_many_fields(len(mapping))
    return mapping


def _key(event: Any) -> Hashable:
    """A key in the form of JSON: a whole number becomes text. Others are refused later."""
    if not isinstance(event, yaml.ScalarEvent):
        _refuse("a key is a list or a mapping; it must be a word", event.start_mark)
    if event.value == "<<" and event.implicit[0]:
        _refuse("merge keys are not supported; write the fields out", event.start_mark)
    key: Hashable = _scalar(event)
    return str(key) if type(key) is int else key


def _scalar(event: yaml.ScalarEvent) -> Any:
    if not event.implicit[0]:  # in quotes
        return event.value
    if len(event.value) > MAX_NUMBER_LENGTH and _NUMBER.fullmatch(event.value):
        raise DocumentInvalidError(_TOO_MANY_DIGITS)
    return core_value(event.value)


_NUMBER: Final = re.compile(r"[-+]?[0-9.][0-9a-fA-FxX:_.]*")


class _Dumper(yaml.SafeDumper):
    """Puts into quotes what YAML 1.1 or 1.2 would read as another value than the text."""


for _resolver in CORE_SCHEMA:
    _Dumper.add_implicit_resolver(*_resolver)


def write_yaml(document: Any, **style: Any) -> str:
    """A document as YAML, in the order of its fields; `style` is of `yaml.dump`."""
    text: Any = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
    return str(text)


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _refuse(problem: str, mark: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise DocumentMalformedError(f"malformed JSON: the field {shown(twice)} is there twice")
    _refuse_many_fields(len(mapping))
    return mapping


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise DocumentMalformedError(f"the document is not UTF-8 at line {line}") from error
