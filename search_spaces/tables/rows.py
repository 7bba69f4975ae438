"""One line of a table as a row and the machine and model that it ran with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, cast

from layout_tuner.errors import TableInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster, detect_local_cpu
from layout_tuner.search_spaces.clusters.cluster_presets import (
    CLUSTER_PRESETS,
    LOCAL_CPU,
    resolve_cluster,
)
from layout_tuner.search_spaces.layouts.knobs import Knob
from layout_tuner.search_spaces.layouts.layout import DEGREES, KNOBS, Layout
from layout_tuner.search_spaces.models.model_shape import FAMILIES, Family, ModelShape
from layout_tuner.search_spaces.tables.columns import (
    COLUMNS,
    EXTRA_COLUMNS,
    EXTRA_MODEL_COLUMNS,
    STATUSES,
    UNSTATED_KNOBS,
)
from layout_tuner.search_spaces.tables.fields import Fields
from layout_tuner.search_spaces.tables.plausibility import (
    refuse_impossible_row,
    refuse_wrong_device_memory,
)
from layout_tuner.search_spaces.tables.table import CellKey, Status, TableRow
from layout_tuner.units import GIB

KNOWN_COLUMNS: Final = (*COLUMNS, *EXTRA_COLUMNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRow:
    """A row, and the values that all rows of its cell must share."""

    row: TableRow
    key: CellKey
    model: ModelShape
    cluster: Cluster
    num_nodes: int
    """Nodes that the layout takes, which the cluster has."""


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads rows; caches models and clusters, which repeat, and records its assumptions."""

    notes: dict[str, int] = field(default_factory=dict)
    """Assumptions, with the number of rows that needed each."""
    _models: dict[tuple[Any, ...], ModelShape] = field(default_factory=dict)
    _clusters: dict[tuple[Any, ...], Cluster] = field(default_factory=dict)

    def read(self, text: dict[str, str], *, number: int, line: int) -> ReadRow:
        """The row, its fields checked against each other; SearchSpaceError if one is wrong."""
        fields = Fields(text)
        model = self._model(fields)
        layout, unstated = self._layout(fields)
        cluster = self._cluster(fields, layout)
        row = self._row(fields, layout, unstated, model, number, line)
        for column in row.aside:
            fields.refuse_formula(column)
        refuse_impossible_row(row, model, cluster)
        key = CellKey(
            source=fields.word("source") if fields.has("source") else "",
            cluster=cluster.name,
            model=model.name,
            seq_length=model.seq_length,
            num_devices=layout.num_devices,
            global_batch_size=layout.global_batch_size,
        )
        return ReadRow(row=row, key=key, model=model, cluster=cluster, num_nodes=layout.num_nodes)

    def _note(self, sentence: str) -> None:
        self.notes[sentence] = self.notes.get(sentence, 0) + 1

    def _model(self, fields: Fields) -> ModelShape:
        hidden, ffn = fields.whole("hidden_size"), fields.whole("ffn_hidden_size")
        heads = fields.whole("num_heads")
        if fields.has("family"):
            family = fields.word("family", FAMILIES)
        else:
            family = inferred_family(hidden_size=hidden, ffn_hidden_size=ffn)
            self._note(f"family is not stated: {family}, by ffn_hidden_size beside hidden_size")
        values: dict[str, Any] = {
            "name": fields.word("model"),
            "family": family,
            "num_layers": fields.whole("num_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "num_heads": heads,
            "num_kv_heads": fields.whole("num_kv_heads") if fields.has("num_kv_heads") else heads,
            "seq_length": fields.whole("seq_length"),
            "vocab_size": fields.whole("vocab_size"),
            "tied_embeddings": fields.truth("tied_embeddings"),
        }
        for name in EXTRA_MODEL_COLUMNS:
            if fields.has(name):
                values[name] = fields.truth(name) if name == "qk_norm" else fields.whole(name)
        named = tuple(values.items())
        if named not in self._models:
            self._models[named] = ModelShape.from_mapping(values)
        return self._models[named]

    def _layout(self, fields: Fields) -> tuple[Layout, tuple[str, ...]]:
        degrees = {
            name: degree
            for name in DEGREES
            if (degree := _knob_value(fields, KNOBS[name])) > 1 or not KNOBS[name].is_new
        }
        num_devices, per_node = fields.whole("num_devices"), fields.whole("devices_per_node")
        product = math.prod(degrees.values())
        if product != num_devices:
            factors = "*".join(map(str, degrees.values()))
            raise TableInvalidError(
                f"{'*'.join(degrees)}={factors}={product} is not num_devices={num_devices}"
            )
        unstated = tuple(name for name in UNSTATED_KNOBS if not fields.has(name))
        for name in unstated:
            self._note(f"{name} is not stated: {int(KNOBS[name].default)} stands in")
        values = {
            name: _knob_value(fields, knob)
            for name, knob in KNOBS.items()
            if knob.table_column != "derived"
        }
        layout = Layout(num_nodes=-(-num_devices // per_node), **values)
        batch = fields.whole("global_batch_size")
        if layout.global_batch_size != batch:
            raise TableInvalidError(
                f"dp*micro_batch_size*num_microbatches={layout.dp}*{layout.micro_batch_size}*"
                f"{layout.num_microbatches}={layout.global_batch_size} is not "
                f"global_batch_size={batch}"
            )
        return layout, unstated

    def _cluster(self, fields: Fields, layout: Layout) -> Cluster:
        name, per_node = fields.word("cluster"), fields.whole("devices_per_node")
        gigabytes = fields.figure("device_memory_gb")
        named = (name, gigabytes, per_node, layout.num_nodes)
        if named not in self._clusters:
            refuse_wrong_device_memory(gigabytes)
            self._clusters[named] = _machine(
                {
                    "name": name,
                    "devices_per_node": per_node,
                    "device_memory_bytes": max(int(gigabytes * GIB), 1),
                    "num_nodes": layout.num_nodes,
                }
            )
        cluster = self._clusters[named]
        if name != LOCAL_CPU and name not in CLUSTER_PRESETS:
            self._note(
                f"cluster {name!r} is not a preset: generic constants stand in for its speeds"
            )
        return cluster

    @staticmethod
    def _row(
        fields: Fields,
        layout: Layout,
        unstated: tuple[str, ...],
        model: ModelShape,
        number: int,
        line: int,
    ) -> TableRow:
        status = cast("Status", fields.word("status", STATUSES))
        step_s = fields.figure("step_time_s") if fields.has("step_time_s") else None
        rate = fields.figure("tokens_per_s") if fields.has("tokens_per_s") else None
        peak = fields.figure("peak_memory_bytes") if fields.has("peak_memory_bytes") else None
        tokens = layout.global_batch_size * model.seq_length
        if status == "completed" and rate is None and step_s is not None:
            rate = tokens / step_s
        elif status == "completed" and step_s is None and rate is not None:
            step_s = tokens / rate
        return TableRow(
            layout=layout,
            status=status,
            tokens_per_s=rate,
            step_time_s=step_s,
            peak_memory_bytes=None if peak is None else round(peak),
            number=number,
            line=line,
            unstated=unstated,
            aside={name: value for name, value in fields.text.items() if name not in KNOWN_COLUMNS},
        )


def _knob_value(fields: Fields, knob: Knob) -> Any:
    """A knob as a row states it, or its default where a table need not have it."""
    if knob.table_column != "stated" and not fields.has(knob.name):
        return knob.default
    if knob.is_number:
        return fields.whole(knob.name, 1 if knob.is_count else 0)
    return fields.truth(knob.name) if knob.is_switch else fields.word(knob.name, knob.choices)


def inferred_family(*, hidden_size: int, ffn_hidden_size: int) -> Family:
    """The family of a shape without one: the feed-forward block of a GPT is 4 hidden sizes wide."""
    return "gpt" if ffn_hidden_size == 4 * hidden_size else "llama"


def _machine(stated: dict[str, Any]) -> Cluster:
    """The preset of that name, or generic constants, with the values that the table states."""
    name = stated["name"]
    if name == LOCAL_CPU:
        # The cores of another machine: of the detected values only the constants remain.
        return Cluster.from_mapping(detect_local_cpu(1).to_mapping() | stated)
    return resolve_cluster({"preset": name, **stated} if name in CLUSTER_PRESETS else stated)[0]
