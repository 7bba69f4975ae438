"""Makes campaigns of a measurement table: selects cells, names and describes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from layout_tuner.api.campaigns.submission import numbered
from layout_tuner.documents.reading import MAX_NAME_LENGTH, MAX_TEXT_LENGTH
from layout_tuner.results_db.campaigns.imported_tables import NewImport
from layout_tuner.search_spaces.campaigns.campaign import MAX_WARNINGS, CampaignSpec
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.search_spaces.spaces.search_space import SearchSpace
from layout_tuner.search_spaces.tables import (
    MeasurementTable,
    TableCell,
    TableInvalidError,
    read_table,
)
from layout_tuner.search_spaces.tables.knob_columns import NO_TABLE_KNOBS, TableKnobs
from layout_tuner.search_spaces.tables.selection import CellFilter, select

MAX_IMPORTED_ROWS: Final = 5_000
"""Most rows of one import. An import is one transaction, of about 0.1 ms per row. On SQLite other
writers wait for it, and fail after 15 s."""

MAX_IMPORTED_CELLS: Final = 200

SIMULATED_NOTE: Final = "its source says that the table is simulated: nothing was measured, and it calibrates no campaign"


def read_import(
    body: bytes,
    *,
    name: str | None,
    cells: Sequence[str],
    knobs: TableKnobs = NO_TABLE_KNOBS,
) -> tuple[tuple[NewImport, ...], tuple[str, ...]]:
    """The campaigns that a table becomes, and the assumptions that were made to read it.

    Args:
        body: the table, CSV in UTF-8.
        name: of the campaign, or the beginning of the names of several; None: names are made of
            the model, the cluster and the batch.
        cells: selects cells, such as `model=GPT-3.6B,num_devices=64`; empty: all.
        knobs: the columns that are job knobs.

    Raises:
        TableInvalidError: the table or a row is invalid, or no cell is selected.
        CampaignInvalidError: the name is not a valid name of a campaign.
    """
    table = read_table(body, knobs)
    chosen = select(table, [CellFilter.read(text) for text in cells])
    num_rows = sum(len(cell.rows) for cell in chosen)
    if len(chosen) > MAX_IMPORTED_CELLS or num_rows > MAX_IMPORTED_ROWS:
        raise TableInvalidError(
            f"the table: {len(chosen)} cells of {num_rows} rows are more than {MAX_IMPORTED_CELLS} "
            f"cells or {MAX_IMPORTED_ROWS} rows, the most of one import; select some of them"
        )
    imports = tuple(
        NewImport(
            spec=_spec(cell, each, table).to_mapping(), cell=cell, aside_columns=table.aside_columns
        )
        for cell, each in zip(chosen, _names(name, chosen), strict=True)
    )
    return imports, table.notes


def _names(name: str | None, cells: Sequence[TableCell]) -> list[str]:
    if name is not None and len(cells) == 1:
        return [name]
    if name is not None:
        return [f"{name}-{number}" for number in range(1, len(cells) + 1)]
    names: list[str] = []
    for cell in cells:
        plain = _plain_name(cell)
        names.append(next(each for each in (plain, *numbered(plain)) if each not in names))
    return names


def _plain_name(cell: TableCell) -> str:
    key = cell.key
    name = f"{key.model}-{key.num_devices}x{key.cluster}-s{key.seq_length}-b{key.global_batch_size}"
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")
    return plain[:MAX_NAME_LENGTH] or "imported"


def _spec(cell: TableCell, name: str, table: MeasurementTable) -> CampaignSpec:
    """A campaign of the cell's model, cluster and knobs, which can be submitted again."""
    notes = [SIMULATED_NOTE] if cell.key.is_simulated else []
    warnings = [note[:MAX_TEXT_LENGTH] for note in (*notes, *table.notes)][:MAX_WARNINGS]
    return CampaignSpec(
        name=name,
        model=cell.model,
        cluster=cell.cluster,
        space=_space(cell),
        strategy="exhaustive",
        knowledge="none",
        warnings=tuple(warnings),
    )


def _space(cell: TableCell) -> SearchSpace:
    """The values of each knob that occur; not all combinations of them were run."""
    layouts = [row.layout for row in cell.rows]
    knobs: dict[str, Any] = {
        knob: list(dict.fromkeys(getattr(layout, knob) for layout in layouts))
        for knob in LAYOUT_FIELDS
        if knob != "num_microbatches"
    }
    per_node = cell.cluster.devices_per_node
    return SearchSpace(
        global_batch_size=cell.key.global_batch_size,
        allow_tp_across_nodes=any(layout.tp_ranks > per_node for layout in layouts),
        job=cell.job,
        **knobs,
    )
