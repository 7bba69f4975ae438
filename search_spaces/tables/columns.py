"""The columns of a measurement table: the published ones in their order, and those of our own."""

from __future__ import annotations

from typing import Final

from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.models.model_fields import NAMES

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
"""The columns that every written table has, in this order."""

EXTRA_MODEL_COLUMNS: Final = NAMES[NAMES.index("head_dim") : NAMES.index("layer_kinds")]
"""Fields of the model's shape that a table has if some model states them."""

LATER_MODEL_COLUMNS: Final = {
    f"model.{name}": name for name in NAMES[NAMES.index("layer_kinds") : NAMES.index("lacks")]
}
"""The later ones by column, with a prefix: tables of others have such words in other meanings."""

EXTRA_COLUMNS: Final = (
    "family",
    *EXTRA_MODEL_COLUMNS,
    *LATER_MODEL_COLUMNS,
    *(name for name, knob in KNOBS.items() if knob.table_column == "if_not_default"),
)
"""Columns that are written after the others if some row differs from the assumed value."""

MODEL_COLUMNS: Final = COLUMNS[6:14]
"""The model's shape, by the names of its fields."""

LAYOUT_COLUMNS: Final = tuple(name for name in COLUMNS[14:25] if name != "global_batch_size")
"""The layout's fields that the published columns hold."""

UNSTATED_KNOBS: Final = tuple(
    name for name in LAYOUT_COLUMNS if KNOBS[name].table_column == "may_be_empty"
)
"""Knobs that published tables leave empty; the default is assumed."""

MEASURED_COLUMNS: Final = COLUMNS[26:]
"""Columns that only completed rows fill."""

OPTIONAL_COLUMNS: Final = (
    "source",
    "num_kv_heads",
    *UNSTATED_KNOBS,
    "peak_memory_bytes",
    *EXTRA_COLUMNS,
)
"""Columns that a table may leave out or leave empty; every other must be there and filled."""

INTERVAL_COLUMNS: Final = (
    "num_runs",
    "step_time_low_s",
    "step_time_high_s",
    "shortened",
    "tied_with_first",
    "rank",
    "trial",
    "disturbed",
)
"""Columns that a leaderboard writes besides, which the format does not define."""

TRIAL_COLUMNS: Final = ("others_share", "throttled", "skipped_steps")
"""Such columns of single trials."""

PREDICTED_COLUMNS: Final = (
    "predicted_step_time_s",
    "predicted_peak_memory_bytes",
    "predicted_fits",
)
"""Columns that `estimate` adds: seconds a step, bytes of the fullest device's peak, and the
probability that it fits."""

RESULT_COLUMNS: Final = (*INTERVAL_COLUMNS, *TRIAL_COLUMNS, *PREDICTED_COLUMNS)
"""Columns outside the format that say how a run went, and not how it was set up."""

STATUSES: Final = ("completed", "out_of_memory", "failed")
