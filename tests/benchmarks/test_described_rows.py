"""Recipes of 2026 as models, and their places in plans."""

from __future__ import annotations

import pytest

from benchmarks.tables.described_rows import SAID_NOW, described, even_stages, model_of
from benchmarks.tables.judged_tables import LACKS, table_cells
from benchmarks.tables.recipes_in_plans import LEAST_FITS, place_of
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from tests.search_spaces.tables.tables import make_row, make_text

LATENT = {
    "q_lora_rank": "96",
    "kv_lora_rank": "32",
    "qk_head_dim": "64",
    "qk_rope_head_dim": "32",
    "v_head_dim": "64",
}
PIPELINED = {"num_layers": "7", "pp": "2", "vpp": "2", "lacks": "pipeline_layout"}


def base(**fields: object) -> ModelShape:
    return ModelShape.from_mapping(
        {
            "name": "a",
            "family": "llama",
            "num_layers": 4,
            "hidden_size": 256,
            "ffn_hidden_size": 512,
            "num_heads": 8,
            "seq_length": 512,
            "vocab_size": 1000,
            **fields,
        }
    )


def test_latent_columns_become_fields() -> None:
    found = model_of(base(), LATENT)
    assert (found.q_lora_rank, found.kv_lora_rank, found.qk_nope_head_dim) == (96, 32, 64)
    assert (found.head_size, found.value_head_size) == (96, 64)
    assert model_of(base(), {"q_lora_rank": ""}) == base()


def test_letters_become_kinds_without_gates() -> None:
    mamba = {"mamba_heads": "8", "mamba_head_dim": "32", "mamba_state": "16", "mamba_groups": "2"}
    row = {"layer_pattern": "M-*-", "gated_experts": "0", **mamba}
    found = model_of(base(), row)
    assert found.kind_of_layers == ("mamba2", "dense", "full", "dense")
    assert found.activation_of == "relu2"
    assert found.rotary_size == 0


def test_depths_of_prediction_are_read() -> None:
    assert model_of(base(), {"mtp_layers": "1"}).num_mtp_layers == 1
    assert model_of(base(), {"mtp_layers": "0"}) == base()


def test_said_words_are_no_longer_lacking() -> None:
    row = {**LATENT, "lacks": "mla mtp recompute_modules", "mtp_layers": ""}
    found = described({**row, "recompute_modules": "mla_up_proj"})
    assert (found["lacks"], found[SAID_NOW]) == ("mtp", "mla recompute_modules")
    assert found["recompute"] == "mla_up_proj"
    unknown = described({**row, "recompute_modules": "moe core_attn"})
    assert unknown["lacks"] == "mtp recompute_modules"
    assert "recompute" not in unknown


def test_a_stated_pipeline_loses_the_letter_of_prediction() -> None:
    found = described({**PIPELINED, "pipeline_layout": "Et*2|t*2|t*2|tmL"})
    assert (found["pipeline_layout"], found["lacks"]) == ("Et*2|t*2|t*2|tL", "")


def test_an_unstated_pipeline_has_equal_stages() -> None:
    assert described(PIPELINED)["pipeline_layout"] == "Ett|(tt|)*2tL"
    assert even_stages(61, 16) == "Et*4|(t*4|)*14tL"
    assert even_stages(61, 32) == "Et*2|(tt|)*29t|L".replace("t*2", "tt")
    assert even_stages(9, 8) is None


def test_a_row_is_judged_as_the_model_it_describes() -> None:
    row = make_row(family="llama", **LATENT, lacks="mla", recompute_modules="", mtp_layers="1")
    [(cell, texts)] = table_cells(make_text(row))
    assert cell.model.kv_lora_rank == 32
    assert cell.model.num_mtp_layers == 1
    assert texts[0][LACKS] == ""


def test_the_place_counts_faster_layouts_that_fit() -> None:
    model, cluster = base(num_layers=8), CLUSTER_PRESETS["h100-sxm"]
    common = {"num_nodes": 1, "dp": 8, "zero_stage": 1, "precision": "bf16"}
    best = Layout(micro_batch_size=8, num_microbatches=1, **common)
    worse = Layout(micro_batch_size=1, num_microbatches=8, recompute="full", **common)
    places = [place_of("a", model, cluster, each, "Megatron-Bridge") for each in (best, worse)]
    first, last = places
    assert first.fitting == last.fitting > 50
    assert first.faster < 0.1 * first.fitting < last.faster
    assert first.share == pytest.approx((first.faster + 1) / first.fitting)
    assert 0 <= first.loss < last.loss < 1
    assert all(each.fits > LEAST_FITS for each in places)


def test_an_illegal_recipe_is_named() -> None:
    layout = Layout(num_nodes=1, dp=8, num_microbatches=1, zero_stage=1, vpp=3)
    with pytest.raises(ValueError, match="is not legal in its own space"):
        place_of("a", base(), CLUSTER_PRESETS["h100-sxm"], layout, "Megatron-Bridge")


OWN_RUN = {
    "activation": "gelu",
    "normalization": "LayerNorm",
    "biases": "1",
    "gated_experts": "",
    "kv_lora_rank": "",
    "pp": "2",
    "vpp": "1",
    "mtp_layers": "",
    "lacks": "hybrid",
}


def test_a_hybrid_of_megatrons_runs_has_stages_and_usual_heads() -> None:
    row = described({**OWN_RUN, "hybrid_pattern": "M-|M*|M-|*-/*-/*-"})
    assert (row[LACKS], row[SAID_NOW], row["vpp"]) == ("", "hybrid", "2")
    found = model_of(base(family="gpt", num_layers=8), row)
    kinds = ("mamba2", "dense", "mamba2", "full", "mamba2", "dense", "full", "dense")
    assert found.kind_of_layers == kinds
    assert found.num_mtp_layers == 2
    assert (found.mamba_num_heads, found.mamba_size) == (8, 2 * found.hidden_size)
    assert (found.activation_of, found.has_layer_norms, found.biases_of) == ("gelu", True, "all")


def test_a_run_of_latent_attention_has_no_norms_of_heads() -> None:
    row = described({**OWN_RUN, **LATENT, "lacks": "mla", "qk_norm": "1", "hybrid_pattern": ""})
    assert (row["qk_norm"], row[LACKS]) == ("", "")
    found = model_of(base(family="gpt"), row)
    assert (found.family, found.kv_lora_rank, found.biases_of) == ("llama", 32, "none")


def test_rows_that_lacked_nothing_stay_as_they_were() -> None:
    row = described({**OWN_RUN, "lacks": "", "hybrid_pattern": ""})
    assert model_of(base(family="gpt"), row) == base(family="gpt")


def test_experts_without_gate_have_the_activation_of_the_column() -> None:
    row = described({**OWN_RUN, "gated_experts": "0", "lacks": "ungated_experts muon"})
    assert (row[LACKS], row[SAID_NOW]) == ("muon", "ungated_experts")
    experts = {"num_experts": 4, "experts_per_token": 1, "ffn_hidden_size": 512}
    assert model_of(base(**experts), row).activation_of == "gelu"
