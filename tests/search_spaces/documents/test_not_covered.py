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
        ("tiny", {"expert_model_parallel_size": 2}, "(here it is called 'ep')"),
        ("tiny", {"expert_tensor_parallel_degree": 2}, "(here it is called 'etp')"),
        ({"preset": "tiny", "num_local_experts": 8}, {}, "(here it is called 'num_experts')"),
        ({"preset": "tiny", "family": "mixtral"}, {}, "(here it is called 'llama')"),
        ({"preset": "tiny", "capacity_factor": 1}, {}, "experts that drop tokens over a capacity"),
        ("tiny", {"fsdp": True}, "(here it is called 'zero_stage')"),
        ("tiny", {"precision": "mxfp8"}, "types narrower than fp8, and its recipes: not covered"),
        ("tiny", {"tensor_model_parallel_size": 2}, "(here it is called 'tp')"),
        ("tiny", {"gradient_accumulation_steps": 2}, "(here it is called 'num_microbatches')"),
    ],
)
def test_a_known_word_is_recognised_by_name(model: Any, space: dict[str, Any], says: str) -> None:
    with pytest.raises(SearchSpaceError) as refused:
        CampaignSpec.from_document({**LEAST, "model": model, "space": BATCH | space})
    assert says in str(refused.value)
    assert "did you mean" not in str(refused.value)


def test_other_words_are_not_known() -> None:
    for name in (None, 3, [], "tp", "", "_size", "_parallel_parallel_parallel"):
        assert known_word(name) == "", name
