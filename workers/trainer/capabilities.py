"""What this trainer cannot do, in sentences."""

from __future__ import annotations

from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape


def unsupported(layout: Layout, model: ModelShape) -> list[str]:
    """Says what of the layout the trainer cannot run with this model; empty when it can."""
    reasons = []
    if layout.vpp > 1:
        reasons.append(f"vpp={layout.vpp}: the trainer does not interleave stages yet; use vpp=1")
    if layout.sequence_parallel:
        reasons.append(
            "sequence_parallel=True: the trainer does not shard the sequence yet; use false"
        )
    if layout.recompute == "selective":
        reasons.append("recompute=selective: the trainer knows none and full; use one of them")
    if layout.precision == "fp16":
        reasons.append("precision=fp16: the trainer does not scale losses yet; use fp32 or bf16")
    if model.num_layers % layout.pp:
        reasons.append(f"num_layers={model.num_layers} is not divisible by pp={layout.pp}")
    for name in ("num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size"):
        count = getattr(model, name)
        if count % layout.tp:
            reasons.append(f"{name}={count} is not divisible by tp={layout.tp}")
    return reasons
