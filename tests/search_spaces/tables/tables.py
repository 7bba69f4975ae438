"""Small measurement tables, made up: a GPT on two nodes of four devices."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables import COLUMNS, CellKey, TableCell, TableRow


def make_row(**changes: Any) -> dict[str, Any]:
    """One completed row; step time and throughput follow each other unless both are given."""
    machine = {"source": "made up", "cluster": "testbox", "device_memory_gb": 16}
    model = {"model": "small-gpt", "num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 2048}
    model |= {"num_heads": 8, "num_kv_heads": 8, "seq_length": 512, "vocab_size": 8192}
    layout = {"tp": 2, "pp": 2, "dp": 2, "vpp": 1, "sequence_parallel": 0, "micro_batch_size": 1}
    layout |= {"num_microbatches": 4, "global_batch_size": 8, "zero_stage": 0}
    measured = {"status": "completed", "step_time_s": 0.5, "peak_memory_bytes": 2_000_000_000}
    row = {**machine, "num_devices": 8, "devices_per_node": 4, **model, "tied_embeddings": 1}
    row |= {**layout, "recompute": "none", "precision": "bf16", **measured, **changes}
    if row["status"] != "completed":
        row |= {"step_time_s": "", "peak_memory_bytes": ""} | changes
    elif "tokens_per_s" not in row and row["step_time_s"]:
        tokens = int(row["global_batch_size"]) * int(row["seq_length"])
        row["tokens_per_s"] = tokens / float(row["step_time_s"])
    return row


def layouts() -> list[dict[str, int]]:
    """Layouts of eight devices with eight sequences a step."""
    return [
        {
            "tp": tp,
            "pp": pp,
            "dp": 8 // (tp * pp),
            "micro_batch_size": micro,
            "num_microbatches": tp * pp // micro,
        }
        for tp in (1, 2, 4)
        for pp in (1, 2)
        for micro in (1, 2, 4, 8)
        if tp * pp % micro == 0
    ]


def make_text(*rows: dict[str, Any], drop: tuple[str, ...] = ()) -> str:
    """The rows as CSV; unknown columns come last, dropped ones are not there at all."""
    listed = list(rows) or [make_row()]
    unknown = [name for row in listed for name in row if name not in COLUMNS]
    columns = [name for name in (*COLUMNS, *dict.fromkeys(unknown)) if name not in drop]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(listed)
    return text.getvalue()


def make_measured_cell(
    layouts: Sequence[Layout],
    model: ModelShape,
    cluster: Cluster,
    step_times_s: Iterable[float],
    peaks_bytes: Iterable[float] | None = None,
    *,
    source: str,
) -> TableCell:
    """Completed rows of layouts of the same devices and batch."""
    batch = layouts[0].global_batch_size
    times = [float(time) for time in step_times_s]
    peaks = [None] * len(layouts) if peaks_bytes is None else [round(peak) for peak in peaks_bytes]
    key = CellKey(
        source=source,
        cluster=cluster.name,
        model=model.name,
        seq_length=model.seq_length,
        num_devices=layouts[0].num_devices,
        global_batch_size=batch,
    )
    rows = tuple(
        TableRow(
            layout=layout,
            status="completed",
            tokens_per_s=batch * model.seq_length / time,
            step_time_s=time,
            peak_memory_bytes=peak,
            number=number,
        )
        for number, (layout, time, peak) in enumerate(
            zip(layouts, times, peaks, strict=True), start=1
        )
    )
    return TableCell(key=key, model=model, cluster=cluster, rows=rows)
