"""What of a model the embedded trainer does not train; other trainers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from layout_tuner.search_spaces.models.layer_kinds import Mixer, sublayers_of
from layout_tuner.search_spaces.models.model_shape import ModelShape


def _has(mixer: Mixer) -> Callable[[ModelShape], str]:
    def words(model: ModelShape) -> str:
        own = (kind for kind in model.kind_of_layers if sublayers_of(kind)[0] == mixer)
        return f"layers of kind {kind}" if (kind := next(own, "")) else ""

    return words


UNTRAINED: Final[Mapping[str, Callable[[ModelShape], str]]] = {
    "gated_delta_net": _has("gated_delta_net"),
    "kda": _has("kda"),
    "mamba2": _has("mamba2"),
    "multi_token_prediction": lambda model: (
        f"num_mtp_layers={model.num_mtp_layers}" if model.num_mtp_layers else ""
    ),
    "attention_sinks": lambda model: "attention_sinks=true" if model.attention_sinks else "",
    "router_bias": lambda model: "router_bias=true" if model.router_bias else "",
    "latent_experts": lambda model: (
        f"expert_latent_size={model.expert_latent_size}" if model.expert_latent_size else ""
    ),
    "packed_documents": lambda model: (
        f"mean_document_length={model.mean_document_length}" if model.mean_document_length else ""
    ),
}
"""Features by name: what a model states of each; empty: it has none of it."""


def untrained_sentence(words: str) -> str:
    """Why the trainer refuses a model that states these words."""
    return (
        f"{words}: the embedded trainer does not train this; name another trainer (probe.trainer; "
        "for an estimate --software)"
    )
