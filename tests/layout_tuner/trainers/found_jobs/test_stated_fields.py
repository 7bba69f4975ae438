"""Fields of a job that the user states beside its file."""

from __future__ import annotations

import pytest

from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError
from layout_tuner.trainers.found_jobs.stated_fields import read_stated


def test_values_are_numbers_switches_and_words_as_in_a_campaigns_file() -> None:
    texts = ("tp=4", "sequence_parallel=true", "recompute=full", "model.vocab_size=128256")
    assert read_stated((*texts, "job.cuda_graphs=attn", "num_devices=64")) == {
        "tp": 4,
        "sequence_parallel": True,
        "recompute": "full",
        "model.vocab_size": 128256,
        "job.cuda_graphs": "attn",
        "num_devices": 64,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp", "is not FIELD=VALUE"),
        ("tp=", "is not FIELD=VALUE"),
        ("tp=0", "tp: "),
        ("tp=two", "tp: "),
        ("recompute=some", "recompute: "),
        ("tensor=4", "unknown field 'tensor'"),
        ("model.layers=4", "unknown field 'model.layers'"),
        ("global_batch_size=1.5", "global_batch_size: "),
        ("job.Bad-Name=1", "is not a name of small letters"),
        ("job.bucket=-1", "is not true, false, a whole number"),
    ],
)
def test_a_wrong_field_or_value_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(JobFileInvalidError) as refused:
        read_stated([text])
    assert said in str(refused.value)


def test_a_field_has_one_value() -> None:
    assert read_stated(["tp=4", "tp=4"]) == {"tp": 4}
    with pytest.raises(JobFileInvalidError, match="stated twice"):
        read_stated(["tp=4", "tp=8"])
