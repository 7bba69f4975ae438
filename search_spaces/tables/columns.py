"""The columns of a measurement table: the published ones in their order, and two of our own."""

from __future__ import annotations

from typing import Final

COLUMNS: Final = (
    "source",
    "cluster",
    "device_memory_gb",
    "num_devices",
    "devices_per_node",
    "model",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "seq_length",
    "vocab_size",
    "tied_embeddings",
    "tp",
    "pp",
    "dp",
    "vpp",
    "sequence_parallel",
    "micro_batch_size",
    "num_microbatches",
    "global_batch_size",
    "zero_stage",
    "recompute",
    "precision",
    "status",
    "tokens_per_s",
    "step_time_s",
    "peak_memory_bytes",
)
"""Every table that we write has these, in this order."""

EXTRA_COLUMNS: Final = ("family", "zero_replicas")
"""Written after the others, where some row differs from what is assumed without them."""

MODEL_COLUMNS: Final = COLUMNS[6:14]
"""The model's shape, by the names of its fields."""

LAYOUT_COLUMNS: Final = tuple(name for name in COLUMNS[14:25] if name != "global_batch_size")
"""The layout's fields that the published columns hold."""

MEASURED_COLUMNS: Final = COLUMNS[26:]
"""What a completed row has and no other."""

OPTIONAL_COLUMNS: Final = (
    "source",
    "num_kv_heads",
    "vpp",
    "sequence_parallel",
    "zero_stage",
    "peak_memory_bytes",
    *EXTRA_COLUMNS,
)
"""Columns that a table may leave out or leave empty; every other must be there and filled."""

STATUSES: Final = ("completed", "out_of_memory", "failed")
