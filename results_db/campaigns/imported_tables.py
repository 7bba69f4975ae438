"""Imports: cells of a measurement table become ended campaigns, and can be exported again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Insert, bindparam, insert, select
from sqlalchemy.orm import Session

from layout_tuner.protocol.measurement import IMPORTED_TRAINER
from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.access.owners_and_groups import DEFAULT_SHARING, Sharing
from layout_tuner.results_db.access.tokens import note_owner
from layout_tuner.results_db.campaigns.campaigns import add_campaign
from layout_tuner.results_db.database.events import emit
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import CampaignNotFoundError
from layout_tuner.results_db.models.table_base import insert_many
from layout_tuner.results_db.models.tables import (
    Campaign,
    Import,
    ImportedRow,
    MeasurementRow,
    Trial,
)
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.rows import campaign_record, layout_columns, trial_layout
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.search_spaces.tables import CellKey, MeasurementTable, TableCell, TableRow
from layout_tuner.search_spaces.tables.table import Status
from layout_tuner.search_spaces.tables.variants import variant_key
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.terminal.plurals import counted

IMPORTED: Final = "imported"
"""The reason and the strategy of imported campaigns."""

_ENDS: Final[Mapping[Status, tuple[TrialState, str | None, str]]] = {
    "completed": ("COMPLETED", None, ""),
    "out_of_memory": ("INFEASIBLE", "out_of_memory", ""),
    "failed": ("FAILED", "unstated", "the imported table says that it failed, and not why"),
}
"""By the status of a row, the state, the reason and the message of its trial."""
_STATUSES: Final[Mapping[str, Status]] = {state: row for row, (state, *_) in _ENDS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class NewImport:
    """A cell that becomes a campaign."""

    spec: Mapping[str, Any]
    """`CampaignSpec.to_mapping()` around the cell's model, machine and layouts."""
    cell: TableCell
    aside_columns: tuple[str, ...] = ()
    """Names of the table's columns that the format does not define."""


class Imports(StoreSection):
    """The store's methods for imports."""

    def add(
        self, imports: Sequence[NewImport], sharing: Sharing = DEFAULT_SHARING
    ) -> list[CampaignRecord]:
        """Stores all cells as ended campaigns, or none.

        Raises:
            CampaignDuplicateError: a name is taken.
            CampaignInvalidError: their owner is not in their group.
        """
        now, owner = self._clock(), self._actor.owner
        with self._db.write() as session:
            note_owner(session, owner, now, self._actor.name)
            campaigns = [_import(session, new, now, owner, sharing) for new in imports]
            for campaign in campaigns:
                self._audit(session, "campaign.import", "campaign", campaign.name)
            return campaigns

    def source(self, campaign_id: int) -> str | None:
        """Where the rows of an imported campaign come from; None: it ran here."""
        return self._scalar(select(Import.source).where(Import.campaign_id == campaign_id))

    def table(self, campaign_id: int) -> MeasurementTable:
        """An imported campaign's table, one cell; CampaignNotFoundError if there is none."""
        with self._db.read() as session:
            row = session.get(Import, campaign_id)
            campaign = session.get(Campaign, campaign_id)
            if row is None or campaign is None:
                raise CampaignNotFoundError(f"there is no imported campaign {campaign_id}")
            rows = tuple(_table_rows(session, campaign_id))
            spec = campaign.stored.spec
        cluster, model = spec.cluster, spec.model
        key = CellKey.of(row.source, cluster, model, rows[0].layout)
        cell = TableCell(key=key, model=model, cluster=cluster, rows=rows)
        return MeasurementTable(cells=(cell,), aside_columns=tuple(row.aside_columns))


def _import(
    session: Session, new: NewImport, now: datetime, created_by: str, sharing: Sharing
) -> CampaignRecord:
    stored, cell = StoredCampaign(document=new.spec), new.cell
    where = f" from {cell.key.source}" if cell.key.source else ""
    campaign = Campaign(
        **stored.columns() | {"trainer": IMPORTED_TRAINER, "strategy": IMPORTED},
        state="COMPLETED",
        reason=IMPORTED,
        message=f"{counted(len(cell.rows), 'row')} of a measurement table{where}",
        num_legal_layouts=len({row.identity for row in cell.rows}),
        last_number=len(cell.rows),
        last_ended_seq=len(cell.rows),
        created_at=now,
        created_by=created_by,
        ended_at=now,
    )
    add_campaign(session, campaign, sharing)
    emit(session, campaign.id, "campaign.created", now=now, state=campaign.state)
    session.add(
        Import(
            campaign_id=campaign.id, source=cell.key.source, aside_columns=list(new.aside_columns)
        )
    )
    _add_trials(session, campaign.id, cell, now)
    return campaign_record(campaign, now)


def _add_trials(session: Session, campaign_id: int, cell: TableCell, now: datetime) -> None:
    """Adds the rows of each table with one statement, since other writers wait."""
    first_number: dict[str, int] = {}
    num_runs: Counter[str] = Counter()
    trials: list[dict[str, Any]] = []
    differences = cell.differences()
    for number, row in enumerate(cell.rows, 1):
        key = variant_key(row.layout, differences[row.identity])
        state, reason, message = _ENDS[row.status]
        trial = {
            "campaign_id": campaign_id,
            "number": number,
            "state": state,
            "reason": reason,
            "message": message,
            "created_at": now,
            "ended_at": now,
            "ended_seq": number,
            "repeat_index": num_runs[key],
            "first_number": first_number.get(key),
        }
        trials.append(trial | layout_columns(row.layout) | {"layout_key": key})
        first_number.setdefault(key, number)
        num_runs[key] += 1
    session.connection().execute(_insert_trial(campaign_id, trials[0]), trials)
    query = select(Trial.number, Trial.id).where(Trial.campaign_id == campaign_id)
    ids = {row.number: row.id for row in session.execute(query)}
    numbered = [(ids[number], row) for number, row in enumerate(cell.rows, 1)]
    insert_many(session, ImportedRow, [_imported_row(id_, row) for id_, row in numbered])
    completed = [(id_, row) for id_, row in numbered if row.status == "completed"]
    measured = [_measurement(id_, campaign_id, row, cell) for id_, row in completed]
    insert_many(session, MeasurementRow, measured)


def _insert_trial(campaign_id: int, example: Mapping[str, Any]) -> Insert:
    """Inserts a trial; a repeat refers to the earlier trial with the number `first_number`."""
    first = select(Trial.id).where(
        Trial.campaign_id == campaign_id, Trial.number == bindparam("first_number")
    )
    values: dict[str, Any] = {name: bindparam(name) for name in example if name != "first_number"}
    return insert(Trial).values(**values, repeat_of=first.scalar_subquery())


def _imported_row(trial_id: int, row: TableRow) -> dict[str, Any]:
    return {
        "trial_id": trial_id,
        "number": row.number,
        "line": row.line,
        "unstated": list(row.unstated),
        "aside": dict(row.aside),
        "peak_memory_bytes": None if row.status == "completed" else row.peak_memory_bytes,
    }


def _measurement(trial_id: int, campaign_id: int, row: TableRow, cell: TableCell) -> dict[str, Any]:
    """The figures of the table, and those that follow from them; the rest is NULL."""
    assert row.tokens_per_s is not None, "the row is completed"
    assert row.step_time_s is not None, "the row is completed"
    peak = cell.cluster.peak_flops_per_s.get(row.layout.precision)
    rate = Throughput(
        model=cell.model,
        layout=row.layout,
        tokens_per_s=row.tokens_per_s,
        peak_tflops_per_device=(peak or 0.0) / 1e12,
    )
    # A utilisation above 1 means that the preset's peak is not that of the table's device.
    is_usable = peak is not None and rate.hardware_tflops_per_device * 1e12 <= peak
    device = f"table ({cell.cluster.device}, {row.layout.precision})"[:200]
    return {
        "trial_id": trial_id,
        "campaign_id": campaign_id,
        "step_time_s": row.step_time_s,
        "tokens_per_step": row.layout.global_batch_size * cell.model.seq_length,
        "tokens_per_s": row.tokens_per_s,
        "tokens_per_s_per_device": rate.tokens_per_s_per_device,
        "model_tflops_per_device": rate.model_tflops_per_device,
        "hardware_tflops_per_device": rate.hardware_tflops_per_device,
        "peak_tflops_per_device": rate.peak_tflops_per_device if is_usable else None,
        "peak_source": device if is_usable else None,
        "mfu": rate.mfu if is_usable else None,
        "hfu": rate.hfu if is_usable else None,
        "peak_memory_bytes": row.peak_memory_bytes,
        "oversubscribed": False,
        "trainer": IMPORTED_TRAINER,
    }


def _table_rows(session: Session, campaign_id: int) -> Iterator[TableRow]:
    query = (
        select(Trial, ImportedRow, MeasurementRow)
        .join(ImportedRow, ImportedRow.trial_id == Trial.id)
        .outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(Trial.campaign_id == campaign_id)
        .order_by(Trial.number)
    )
    for trial, row, measured in session.execute(query):
        completed = measured is not None
        yield TableRow(
            layout=trial_layout(trial),
            status=_STATUSES[trial.state],
            tokens_per_s=measured.tokens_per_s if completed else None,
            step_time_s=measured.step_time_s if completed else None,
            peak_memory_bytes=measured.peak_memory_bytes if completed else row.peak_memory_bytes,
            number=row.number,
            line=row.line,
            unstated=tuple(row.unstated),
            aside=row.aside,
        )
