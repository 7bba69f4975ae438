"""The embedded trainer refuses by name what it does not train, also in an export to it."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES, violations
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.untrained_models import UNTRAINED
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.workers.trainer.open_training import unsupported

SIZES = {
    "family": "llama",
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_heads": 4,
    "seq_length": 32,
    "vocab_size": 64,
}
LINEAR = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
LINEAR |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
MIXTURE = {"num_experts": 4, "experts_per_token": 2, "moe_ffn_hidden_size": 128}
MAMBA = {f"mamba_{name}": 8 for name in ("num_heads", "head_dim", "state_dim", "num_groups")}

FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "gated_delta_net": (
        LINEAR | {"layer_kinds": ["gated_delta_net+dense", "full+dense"]},
        "layers of kind gated_delta_net+dense",
    ),
    "kda": (LINEAR | {"layer_kinds": ["full+dense", "kda"]}, "layers of kind kda"),
    "mamba2": (
        MAMBA | {"layer_kinds": ["mamba2", "full", "dense", "full"]},
        "layers of kind mamba2",
    ),
    "multi_token_prediction": ({"num_mtp_layers": 1}, "num_mtp_layers=1"),
    "attention_sinks": ({"attention_sinks": True}, "attention_sinks=true"),
    "router_bias": (MIXTURE | {"router_bias": True}, "router_bias=true"),
    "latent_experts": (MIXTURE | {"expert_latent_size": 8}, "expert_latent_size=8"),
    "packed_documents": ({"mean_document_length": 16}, "mean_document_length=16"),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_an_untrained_feature_is_refused_by_name(name: str) -> None:
    fields, words = FEATURES[name]
    model = ModelShape.from_mapping(SIZES | fields)
    sentence = (
        f"{words}: the embedded trainer does not train this; name another trainer (probe.trainer; "
        "for an estimate --software)"
    )
    assert unsupported(Layout(), model) == [sentence]
    assert EMBEDDED.refusals(TrainerJob(model=model, layout=Layout())) == [sentence]
    cluster = detect_local_cpu()
    assert violations(Layout(), model, cluster, scopes=OTHER_TRAINER_SCOPES) == []


def test_a_model_without_them_is_trained() -> None:
    model = ModelShape.from_mapping(SIZES | {"layer_kinds": ["full", "dense"]})
    assert unsupported(Layout(), model) == []
    assert EMBEDDED.refusals(TrainerJob(model=model, layout=Layout())) == []
