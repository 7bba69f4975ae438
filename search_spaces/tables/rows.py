"""One line of a table as a row and the machine and model that it ran with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from layout_tuner.documents.numbers import core_value
from layout_tuner.documents.reading import nearest, shown
from layout_tuner.errors import TableInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster, detect_local_cpu
from layout_tuner.search_spaces.clusters.cluster_presets import (
    CLUSTER_PRESETS,
    LOCAL_CPU,
    resolve_cluster,
    with_speeds_of,
)
from layout_tuner.search_spaces.layouts.knobs import Knob
from layout_tuner.search_spaces.layouts.layout import DEGREES, KNOBS, Layout
from layout_tuner.search_spaces.models.foreign_words import MEGATRON_COLUMNS
from layout_tuner.search_spaces.models.model_fields import (
    ATTENTION_FIELDS,
    FAMILIES,
    MODEL_RANGES,
    SWITCHES,
    Family,
)
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables.columns import (
    COLUMNS,
    EXTRA_COLUMNS,
    EXTRA_MODEL_COLUMNS,
    LATER_MODEL_COLUMNS,
    STATUSES,
    UNSTATED_KNOBS,
)
from layout_tuner.search_spaces.tables.fields import Fields
from layout_tuner.search_spaces.tables.knob_columns import KnobReader
from layout_tuner.search_spaces.tables.table import CellKey, Status, TableRow
from layout_tuner.search_spaces.tables.unit_mistakes import (
    refuse_impossible_row,
    refuse_wrong_device_memory,
)
from layout_tuner.units import GIB

DEVICE: Final = "device"
"""An unknown column that is read too: a machine's device, where it is another than its preset's."""

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

    knobs: KnobReader
    notes: dict[str, int] = field(default_factory=dict)
    """Assumptions, with the number of rows that needed each."""
    _models: dict[str, ModelShape] = field(default_factory=dict)
    _clusters: dict[tuple[Any, ...], tuple[Cluster, list[str]]] = field(default_factory=dict)

    def read(self, text: dict[str, str], *, number: int, line: int) -> ReadRow:
        """The row, its fields checked against each other; SearchSpaceError if one is wrong."""
        fields = Fields(text)
        model = self._model(fields)
        layout, unstated = self._layout(fields)
        cluster = self._cluster(fields, layout)
        source = fields.word("source") if fields.has("source") else ""
        if self.knobs.columns:
            settings, notes = self.knobs.settings(fields, source, layout, model, cluster)
            layout = replace(layout, job=settings)
            for note in notes:
                self._note(note)
        row = self._row(fields, layout, unstated, model, number, line)
        for column in row.aside:
            fields.refuse_formula(column)
        refuse_impossible_row(row, model, cluster)
        key = CellKey.of(source, cluster, model, layout)
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
                values[name] = _READ.get(name, Fields.whole)(fields, name)
        for column, name in LATER_MODEL_COLUMNS.items():
            if fields.has(column):
                values[name] = _later_value(fields, column, name)
        values |= self._megatron_words(fields, values)
        named = repr(values)
        if named not in self._models:
            self._models[named] = ModelShape.from_mapping(values)
        return self._models[named]

    def _megatron_words(self, fields: Fields, stated: Mapping[str, Any]) -> dict[str, Any]:
        """What columns of Megatron-LM's options say of attention; see `MEGATRON_COLUMNS`."""
        found: dict[str, Any] = {}
        for column, words in MEGATRON_COLUMNS.items():
            if fields.has(column):
                word = fields.word(column, words)
                found |= {"attention": words[word]} if words[word] else {}
        if fields.has("dropout"):
            first, slash, second = fields.word("dropout").partition("/")
            halves = first, second if slash else first
            for name, half in zip(ATTENTION_FIELDS[1:], halves, strict=True):
                said = f"{name} in the column dropout, one number or ATTENTION/HIDDEN as 0.1/0.1,"
                found[name] = Fields({said: half}).number(said)
        for name, value in found.items():
            if stated.get(name, value) != value:
                raise TableInvalidError(
                    f"{name}={stated[name]} contradicts the columns of Megatron-LM's options, which "
                    f"say {name}={value}; leave one of them out"
                )
        if found:
            self._note("attention and dropout follow from columns of Megatron-LM's options")
        return found

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
        gigabytes, device = fields.figure("device_memory_gb"), fields.text.get(DEVICE, "").strip()
        named = (name, gigabytes, per_node, layout.num_nodes, device)
        if named not in self._clusters:
            refuse_wrong_device_memory(gigabytes)
            self._clusters[named] = _machine(
                {
                    "name": name,
                    "devices_per_node": per_node,
                    "device_memory_bytes": max(int(gigabytes * GIB), 1),
                    "num_nodes": layout.num_nodes,
                },
                device,
            )
        cluster, notes = self._clusters[named]
        for note in notes:
            self._note(note)
        return cluster

    def _row(
        self,
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
            aside={
                name: value
                for name, value in fields.text.items()
                if name not in KNOWN_COLUMNS and name not in self.knobs.columns
            },
        )


def _later_value(fields: Fields, column: str, name: str) -> Any:
    """A number, a truth, a word, or kinds of layers, of which `kind*n` are n in succession."""
    if name in MODEL_RANGES:
        number = fields.number(column)
        return int(number) if number.is_integer() else number
    if name == "layer_kinds":
        runs = (each.partition("*") for each in fields.word(column).split())
        return [{kind: core_value(number)} if star else kind for kind, star, number in runs]
    return fields.truth(column) if name in SWITCHES else fields.word(column)


_READ: Final[Mapping[str, Callable[[Fields, str], Any]]] = {
    "qk_norm": lambda fields, name: (
        "width" if fields.text[name].strip() == "width" else fields.truth(name)
    ),
    "attention": Fields.word,
    **dict.fromkeys(ATTENTION_FIELDS[1:], Fields.number),
}
"""How fields of the model are read that are no whole numbers."""


def _knob_value(fields: Fields, knob: Knob) -> Any:
    """A knob as a row states it, or its default where a table need not have it."""
    if knob.table_column != "stated" and not fields.has(knob.name):
        return knob.default
    if knob.is_number:
        return fields.whole(knob.name, 1 if knob.is_count else 0)
    if knob.is_switch:
        return fields.truth(knob.name)
    is_read = knob.parse is not None and knob.problem(fields.word(knob.name)) is None
    return fields.word(knob.name, () if knob.is_text or is_read else knob.choices)


def inferred_family(*, hidden_size: int, ffn_hidden_size: int) -> Family:
    """The family of a shape without one: the feed-forward block of a GPT is 4 hidden sizes wide."""
    return "gpt" if ffn_hidden_size == 4 * hidden_size else "llama"


def _machine(stated: dict[str, Any], device: str) -> tuple[Cluster, list[str]]:
    """The machine that a table states, and what is assumed of it.

    It has the speeds of the preset of its name, or generic ones; those of `device` replace them.
    """
    name, notes = stated["name"], []
    if name == LOCAL_CPU:
        # The cores of another machine: of the detected values only the constants remain.
        cluster = Cluster.from_mapping(detect_local_cpu(1).to_mapping() | stated)
    elif name in CLUSTER_PRESETS:
        cluster = resolve_cluster({"preset": name, **stated})[0]
    else:
        cluster = resolve_cluster(stated)[0]
        notes.append(f"cluster {name!r} is not a preset: generic constants stand in for its speeds")
    if not device:
        return cluster, notes
    other = with_speeds_of(cluster, device)
    if other is None:
        hint = nearest(device, CLUSTER_PRESETS)
        notes.append(f"no preset is for device={shown(device)}, which is left aside{hint}")
    elif other.device != cluster.device:
        notes.append(f"the speeds are those of device={shown(device)}, not of cluster {name!r}")
        return other, notes
    return cluster, notes
