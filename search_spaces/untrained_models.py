"""What of a model the embedded trainer does not train; other trainers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from layout_tuner.documents.reading import word_of
from layout_tuner.search_spaces.models.layer_kinds import Mixer, sublayers_of
from layout_tuner.search_spaces.models.model_shape import ModelShape


def _has(mixer: Mixer) -> Callable[[ModelShape], str]:
    def words(model: ModelShape) -> str:
        own = (kind for kind in model.kind_of_layers if sublayers_of(kind)[0] == mixer)
        return f"layers of kind {kind}" if (kind := next(own, "")) else ""

    return words


def _states(name: str) -> Callable[[ModelShape], str]:
    return lambda model: f"{name}={word_of(value)}" if (value := getattr(model, name)) else ""


UNTRAINED: Final[Mapping[str, Callable[[ModelShape], str]]] = {
    "gated_delta_net": _has("gated_delta_net"),
    "kda": _has("kda"),
    "mamba2": _has("mamba2"),
    "multi_token_prediction": _states("num_mtp_layers"),
    "attention_sinks": _states("attention_sinks"),
    "router_bias": _states("router_bias"),
    "latent_experts": _states("expert_latent_size"),
    "packed_documents": _states("mean_document_length"),
}
"""Features by name: what a model states of each; empty: it has none of it."""


def untrained_sentence(words: str) -> str:
    """Why the trainer refuses a model that states these words."""
    return (
        f"{words}: the embedded trainer does not train this; name another trainer (probe.trainer; "
        "for an estimate --software)"
    )
