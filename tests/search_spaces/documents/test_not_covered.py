from __future__ import annotations

from typing import Any

import pytest

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.documents.not_covered import known_word
from search_spaces.errors import SearchSpaceError

LEAST = {"name": "first", "cluster": "local-cpu", "budget": {"trials": 3}}
BATCH = {"global_batch_size": 8}


@pytest.mark.parametrize(
    ("model", "space", "says"),
    [
        ("tiny", {"context_parallel_size": 2}, "(here it is called 'cp')"),
        ("tiny", {"ulysses": 2}, "(here it is called 'cp')"),
        ("tiny", {"ep": 2}, "expert parallelism: not covered"),
        ("tiny", {"expert_model_parallel_size": 2}, "expert parallelism: not covered"),
        ({"preset": "tiny", "num_experts": 8}, {}, "mixture-of-experts models"),
        ({"preset": "tiny", "family": "mixtral"}, {}, "mixture-of-experts models"),
        ("tiny", {"zero_stage": 3}, "ZeRO-2, ZeRO-3 and FSDP: not covered"),
        ("tiny", {"precision": "fp8"}, "fp8 and narrower types: not covered"),
        ("tiny", {"tensor_model_parallel_size": 2}, "(here it is called 'tp')"),
        ("tiny", {"gradient_accumulation_steps": 2}, "(here it is called 'num_microbatches')"),
    ],
)
def test_a_known_word_is_recognised_by_name(model: Any, space: dict[str, Any], says: str) -> None:
    with pytest.raises(SearchSpaceError) as refused:
        CampaignSpec.from_document({**LEAST, "model": model, "space": BATCH | space})
    assert says in str(refused.value)
    assert "did you mean" not in str(refused.value)


def test_a_word_that_is_misspelt_still_has_the_nearest_name() -> None:
    with pytest.raises(SearchSpaceError, match=r"did you mean 'micro_batch_size'"):
        CampaignSpec.from_document({**LEAST, "model": "tiny", "space": BATCH | {"micro_batch": 1}})


@pytest.mark.parametrize("name", [None, 3, [], "tp", "", "_size", "_parallel_parallel_parallel"])
def test_other_words_are_not_known(name: object) -> None:
    assert known_word(name) == ""
