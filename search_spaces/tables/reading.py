"""Reads measurement tables from CSV into cells; errors name the row."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from layout_tuner.documents.not_covered import our_name
from layout_tuner.documents.reading import shown
from layout_tuner.errors import SearchSpaceError, TableInvalidError
from layout_tuner.search_spaces.models.foreign_words import OUR_FIELDS
from layout_tuner.search_spaces.models.model_fields import ATTENTION_FIELDS
from layout_tuner.search_spaces.tables.columns import COLUMNS, OPTIONAL_COLUMNS
from layout_tuner.search_spaces.tables.fields import Fields
from layout_tuner.search_spaces.tables.knob_columns import NO_TABLE_KNOBS, KnobReader, TableKnobs
from layout_tuner.search_spaces.tables.rows import KNOWN_COLUMNS, ReadRow, RowReader
from layout_tuner.search_spaces.tables.table import CellKey, MeasurementTable, TableCell
from layout_tuner.search_spaces.tables.unit_mistakes import refuse_impossible_cell
from layout_tuner.terminal.plurals import counted, listed

MAX_TABLE_BYTES: Final = 32 << 20
"""The largest file that is read: about 150,000 rows, more than any known table."""

_REQUIRED: Final = tuple(name for name in COLUMNS if name not in OPTIONAL_COLUMNS)


def read_table(
    path_or_text: Path | str | bytes, knobs: TableKnobs = NO_TABLE_KNOBS
) -> MeasurementTable:
    """Reads a measurement table.

    Bytes, or a string that holds a line break (or nothing), are the table itself; any other string
    names a file. Columns that `knobs` declares, and those called `job.NAME`, are job knobs: the
    layouts of the rows have their values as settings.

    Raises:
        TableInvalidError: the file cannot be read, is no measurement table, or a row is wrong; the
            message names the file and the row.
    """
    name, text = "the table", path_or_text
    if isinstance(text, Path) or (isinstance(text, str) and text.strip() and "\n" not in text):
        name, text = str(text), _content(Path(text))
    try:
        return _parsed(_decoded(text) if isinstance(text, bytes) else text, knobs)
    except SearchSpaceError as error:
        raise TableInvalidError(f"{name}: {error}") from error


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TABLE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TableInvalidError(f"{path}: cannot be read: {reason}") from error
    if len(content) > MAX_TABLE_BYTES:
        raise TableInvalidError(
            f"{path}: is larger than {MAX_TABLE_BYTES >> 20} MiB, the most that is read; cut it to "
            "the cells that are meant"
        )
    return content


def _decoded(content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TableInvalidError(
            f"line {line} is not UTF-8 (byte {content[error.start]:#04x}); save the table as CSV in "
            "UTF-8"
        ) from error
    if "\0" in text:
        raise TableInvalidError("holds zero bytes; save the table as CSV in UTF-8")
    return text


def _parsed(text: str, knobs: TableKnobs) -> MeasurementTable:
    lines = _lines(text)
    _, header = next(lines, (0, []))
    _refuse_wrong_header(header)
    rows = list(lines)
    job = KnobReader.of(knobs, header, rows)
    reader, cells = RowReader(job), _Cells(job)
    for number, (line, values) in enumerate(rows, 1):
        try:
            if len(values) != len(header):
                raise TableInvalidError(
                    f"has {len(values)} fields, and the header has {len(header)} columns"
                )
            read = reader.read(dict(zip(header, values, strict=True)), number=number, line=line)
            cells.add(read)
        except SearchSpaceError as error:
            raise TableInvalidError(f"row {number} (line {line}): {error}") from error
    built = cells.built()
    notes = reader.notes | Counter(note for cell in built for note in _kept_apart(cell))
    return MeasurementTable(
        cells=built,
        notes=tuple(f"{note} ({counted(rows, 'row')})" for note, rows in notes.items()),
        aside_columns=tuple(
            name for name in header if name not in KNOWN_COLUMNS and name not in job.columns
        ),
    )


def _kept_apart(cell: TableCell) -> Iterator[str]:
    """A note for each row that unknown columns part from others of its layout."""
    differences = cell.differences()
    values: dict[tuple[str, ...], dict[str, None]] = {}
    for pairs in differences.values():
        seen = values.setdefault(tuple(name for name, _ in pairs), {})
        seen.update(dict.fromkeys(shown(value) for _, value in pairs))
    for row in cell.rows:
        names = tuple(name for name, _ in differences[row.identity])
        if names:
            those = f" ({listed(values[names], 3)})" if len(names) == 1 else ""
            yield (
                f"rows of one layout differ in {listed(map(shown, names), 3)}{those}, which the "
                "format does not know: they are kept apart"
            )


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Number of the line and fields of every row that is not blank, the header first.

    Lines may end in any of the three ways, also in one file.
    """
    # Without newline="" a return alone would stand within a line, where csv refuses it.
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    first = 1
    try:
        for values in rows:
            if any(value.strip() for value in values):
                yield rows.line_num, values
            first = rows.line_num + 1
    except csv.Error as error:
        raise TableInvalidError(f"line {first}: is not CSV: {_why_no_csv(error)}") from error


def _why_no_csv(error: csv.Error) -> str:
    """The error in words that help the author of the table."""
    said = str(error)
    if "unexpected end of data" in said:
        return "a quote opens a field there, and none closes it"
    if "expected after" in said:
        return "text follows the quote that closes a field; a quote within one is written twice"
    if "field larger than" in said:
        return f"a field is longer than {csv.field_size_limit()} characters; is a quote not closed?"
    return said


def _refuse_wrong_header(header: list[str]) -> None:
    if not header:
        raise TableInvalidError("is empty; a measurement table begins with a header of columns")
    spaced = [name for name in header if name.strip() != name]
    if spaced:
        raise TableInvalidError(f"the header holds spaces around {shown(spaced[0])}")
    for name in header:
        if name:
            Fields({"the name of a column": name}).word("the name of a column")
    twice = [name for name, times in Counter(header).items() if times > 1]
    if twice:
        raise TableInvalidError(f"the header has the column {shown(twice[0])} more than once")
    missing = [name for name in _REQUIRED if name not in header]
    if len(header) == 1 and missing:
        raise TableInvalidError(
            f"the header is one column, {shown(header[0])}; columns are separated by commas"
        )
    if missing:
        raise TableInvalidError(f"the columns {', '.join(missing)} are missing from the header")
    for name in header:
        ours = OUR_FIELDS.get(name.lower()) or our_name(name, KNOWN_COLUMNS)
        if ours in KNOWN_COLUMNS and not {name, ours} & {*KNOWN_COLUMNS} & {*header}:
            raise TableInvalidError(
                f"the column {shown(name)} is called {ours!r} here: rename it, or give another name to "
                "a column that says something else"
            )


class _Cells:
    """Rows by cell; a name must mean the same model or machine everywhere in a source."""

    def __init__(self, knobs: KnobReader) -> None:
        self._knobs = knobs
        self._rows: dict[CellKey, list[ReadRow]] = {}
        self._facts: dict[tuple[str, ...], tuple[str, dict[str, object]]] = {}
        """By source and kind of name: the first row with the name, and what it says of it."""

    def add(self, read: ReadRow) -> None:
        shape = asdict(read.model)
        for name in ("seq_length", *ATTENTION_FIELDS):
            del shape[name]  # it is part of a cell's key, and not of the named model
        self._refuse_other(read, "model", read.model.name, shape)
        columns = ("device_memory_bytes", "devices_per_node", "device")
        machine = {column: getattr(read.cluster, column) for column in columns}
        self._refuse_other(read, "cluster", read.cluster.name, machine)
        self._rows.setdefault(read.key, []).append(read)

    def built(self) -> tuple[TableCell, ...]:
        """The cells, checked across their rows; TableInvalidError if rows contradict each other."""
        cells = tuple(
            TableCell(
                key=key,
                model=reads[0].model,
                cluster=reads[0].cluster,
                rows=tuple(read.row for read in reads),
                job=self._knobs.choices(key.source, [read.row.layout for read in reads]),
            )
            for key, reads in self._rows.items()
        )
        if not any(cell.num_completed for cell in cells):
            raise TableInvalidError(
                f"no row is completed, of {sum(len(cell.rows) for cell in cells)}; there is nothing "
                "to learn from the table"
            )
        for cell in cells:
            refuse_impossible_cell(cell)
        return cells

    def _refuse_other(self, read: ReadRow, kind: str, name: str, here: dict[str, object]) -> None:
        key = (read.key.source, kind, name)
        first, there = self._facts.setdefault(key, (read.row.name, here))
        for column, value in there.items():
            if value != here[column]:
                raise TableInvalidError(
                    f"contradicts {first}: {name!r} has {column}={here[column]} here and {value} there"
                )
