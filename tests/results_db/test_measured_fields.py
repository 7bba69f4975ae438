"""The fields of a measurement are written once: its record and its columns follow."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Final, get_args, get_type_hints

import pytest

import layout_tuner
from layout_tuner.protocol.measurement import (
    LONGEST,
    Breakdown,
    Environment,
    MeasuredFigures,
    Measurement,
)
from layout_tuner.results_db.models.table_base import Base
from layout_tuner.results_db.models.tables import BreakdownRow, EnvironmentRow, MeasurementRow
from layout_tuner.results_db.records import MeasurementRecord
from layout_tuner.results_db.rows import PLAIN_MEASUREMENT_FIELDS

OF_THE_STORE: Final = {"trial_id", "campaign_id", "same_losses_as"}
"""Columns that no measurement tells."""
IN_OTHER_TABLES: Final = {
    "breakdown",
    "peak_memory_bytes_by_stage",
    "peak_reserved_bytes_by_stage",
    "iterations",
}
COLUMNS: Final = MeasurementRow.__table__.columns


def names(kind: type) -> set[str]:
    return {each.name for each in fields(kind)}  # type: ignore[arg-type]


def test_record_and_table_have_every_field_of_a_measurement() -> None:
    assert names(MeasurementRecord) == names(MeasuredFigures) == names(Measurement) - {"iterations"}
    assert set(COLUMNS.keys()) - OF_THE_STORE == names(Measurement) - IN_OTHER_TABLES
    assert set(PLAIN_MEASUREMENT_FIELDS) == names(Measurement) - IN_OTHER_TABLES


@pytest.mark.parametrize(
    ("kind", "row"), [(Breakdown, BreakdownRow), (Environment, EnvironmentRow)]
)
def test_the_tables_beside_it_have_every_field_of_their_dataclass(
    kind: type, row: type[Base]
) -> None:
    columns = row.__table__.columns
    assert set(columns.keys()) - {"trial_id"} == names(kind)
    assert not any(column.nullable for column in columns)


def test_a_column_may_be_null_where_the_record_may_have_none() -> None:
    hints = get_type_hints(MeasurementRecord)
    for name in PLAIN_MEASUREMENT_FIELDS:
        of_column = {COLUMNS[name].type.python_type}
        if COLUMNS[name].nullable:
            of_column.add(type(None))
        assert set(get_args(hints[name]) or (hints[name],)) == of_column, name


def test_a_measurement_may_have_none_only_where_its_record_may() -> None:
    of_probe, of_record = get_type_hints(Measurement), get_type_hints(MeasurementRecord)
    for each in fields(MeasuredFigures):
        was_lacking = "Lacking" in str(each.type)
        expected = of_probe[each.name] | None if was_lacking else of_probe[each.name]
        assert of_record[each.name] == expected, each.name


def test_a_text_has_the_room_that_the_protocol_gives_it() -> None:
    lengths = {each.name: each.metadata.get(LONGEST) for each in fields(Measurement)}
    for name in PLAIN_MEASUREMENT_FIELDS:
        if COLUMNS[name].type.python_type is str:
            assert COLUMNS[name].type.length == (lengths[name] or 16), name  # type: ignore[attr-defined]


def test_the_types_that_statements_rely_on_are_those_of_the_columns() -> None:
    """mypy reads them where SQLAlchemy does not."""
    (body,) = ast.parse(inspect.getsource(MeasurementRow)).body
    assert isinstance(body, ast.ClassDef)
    (block,) = [each for each in body.body if isinstance(each, ast.If)]
    of_record = {each.name: each.type for each in fields(MeasurementRecord)}
    for each in block.body:
        assert isinstance(each, ast.AnnAssign)
        assert isinstance(each.target, ast.Name)
        assert ast.unparse(each.annotation) == f"Mapped[{of_record[each.target.id]}]"


def test_a_line_in_the_dataclass_is_a_field_a_column_and_a_metric(
    tmp_path: Path,
) -> None:
    """The example of the recipe, in a copy of the product."""
    product = Path(layout_tuner.__file__).parent
    copy = tmp_path / "layout_tuner"
    shutil.copytree(product, copy, ignore=shutil.ignore_patterns("__pycache__"))
    recipe = (product.parent / "docs/recipes/add-a-measured-column.md").read_text()
    line = recipe.split("```python\n")[1].split("```")[0]
    assert "mean_power_watts" in line
    protocol = copy / "protocol/measurement.py"
    before, last = protocol.read_text().split("    @property\n    def is_disturbed")
    added = "".join(f"    {each.strip()}\n" for each in line.strip().splitlines())
    protocol.write_text(f"{before}{added}\n    @property\n    def is_disturbed{last}")
    program = """
from dataclasses import fields
from layout_tuner.protocol.measurement import Measurement
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.models.tables import MeasurementRow
from layout_tuner.results_db.records import MeasurementRecord
for kind in (Measurement, MeasurementRecord):
    print({each.name: each.type for each in fields(kind)}["mean_power_watts"])
column = MeasurementRow.__table__.c.mean_power_watts
print(column.type, column.nullable, "mean_power_watts" in METRICS)
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == ["float | None", "float | None", "DOUBLE True True"]
