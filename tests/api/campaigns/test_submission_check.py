"""What is said of a document before it is submitted; submission itself says the same."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.api.campaigns import submission_check
from layout_tuner.api.campaigns.submission import Submission
from layout_tuner.api.campaigns.submission_check import CountingSlowError, check_submission
from layout_tuner.errors import NoLegalLayoutError, SearchSpaceError
from layout_tuner.results_db.store import Store
from tests.kit.api import CAMPAIGN


@pytest.fixture
def submission(store: Store) -> Submission:
    return Submission(store, None)


def test_the_count_is_the_one_that_submission_stores(submission: Submission) -> None:
    document = {**CAMPAIGN, "space": {**CAMPAIGN["space"], "tp": [1, 2, 3], "pp": [1, 2, 3, 4]}}
    check = check_submission(submission, document)
    assert not check.problems
    campaign, _ = submission.create(document, None)
    assert len(check.counts.legal) == campaign.num_legal_layouts
    assert check.counts.legal.num_combinations == 12
    assert check.counts.fitting.num_fitting == len(check.counts.legal)
    sentences = {exclusion.rule: exclusion.example for exclusion in check.counts.legal.exclusions}
    assert sentences["layers_over_stages"] == (
        "num_layers=4 is not divisible by pp*vpp=3*1=3; it would be with "
        "pipeline_split=embedding_and_head; or state unequal stages as pipeline_layout, if the "
        "trainer takes it"
    )


def test_all_problems_are_found_at_once_and_layouts_are_counted_all_the_same(
    submission: Submission,
) -> None:
    submission.create(CAMPAIGN, None)
    document = {**CAMPAIGN, "strategy": "best", "seed": -1, "start_from": [1], "colour": "red"}
    check = check_submission(submission, document)
    found = {problem.field for problem in check.problems}
    assert found == {"name", "strategy", "seed", "start_from", "colour"}
    assert len(check.counts.legal) == 4


def test_the_sentences_are_those_of_the_refusal(submission: Submission) -> None:
    document = {**CAMPAIGN, "space": {"tp": [0], "global_batch_size": 8}, "budget": {}}
    check = check_submission(submission, document)
    with pytest.raises(SearchSpaceError) as caught:
        submission.create(document, None)
    assert [str(problem) for problem in check.problems] == [str(p) for p in caught.value.parts]
    assert check.counts is None


def test_a_space_without_legal_or_fitting_layouts_is_a_problem_with_counts(
    submission: Submission,
) -> None:
    document = {**CAMPAIGN, "space": {"tp": [3], "global_batch_size": 8}}
    check = check_submission(submission, document)
    (problem,) = check.problems
    with pytest.raises(NoLegalLayoutError) as caught:
        submission.create(document, None)
    assert problem.problem == caught.value.problem
    assert len(check.counts.legal) == 0
    check = check_submission(submission, {**CAMPAIGN, "model": "gpt-175b"})
    (problem,) = check.problems
    assert "too large for every one" in problem.problem
    assert check.counts.fitting.num_fitting == 0


def test_job_knobs_are_checked_as_at_submission(submission: Submission) -> None:
    space = {**CAMPAIGN["space"], "tp": 1, "job": {"overlap_tp": [False, True]}}
    document = {**CAMPAIGN, "space": space}
    check = check_submission(submission, document)
    with pytest.raises(SearchSpaceError) as caught:
        submission.create(document, None)
    assert [str(problem) for problem in check.problems] == [str(caught.value)]
    # Also while another field is wrong, with the knobs of the document's trainer.
    space = {**CAMPAIGN["space"], "job": {"cross_entropy": ["te"]}}
    document = {**CAMPAIGN, "space": space, "probe": {"trainer": "megatron-lm"}, "seed": -1}
    assert check_submission(submission, document).counts is not None


def test_a_model_that_the_embedded_trainer_would_train_otherwise_is_a_problem(
    submission: Submission,
) -> None:
    document = {**CAMPAIGN, "model": {"preset": "tiny", "attention_dropout": 0.1}}
    (problem,) = check_submission(submission, document).problems
    assert "the embedded trainer has fused attention and no dropout" in problem.problem
    other = {**document, "probe": {"trainer": "megatron-lm"}}
    assert not check_submission(submission, other).problems


@pytest.mark.parametrize(
    "document", [None, [], "tiny", {}, {"model": 3, "space": []}, {"name": []}]
)
def test_anything_can_be_checked(submission: Submission, document: Any) -> None:
    check = check_submission(submission, document)
    assert check.problems
    assert check.counts is None


def test_counting_ends_at_its_limit_and_a_slow_search_for_a_fit_leaves_the_counts(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = check_submission(submission, CAMPAIGN, within_s=-1.0)
    assert (check.counts, check.too_slow) == (None, 4)
    assert not check.problems

    def slow(*_arguments: object, **_more: object) -> None:
        raise CountingSlowError

    monkeypatch.setattr(submission_check.CampaignSpec, "refuse_if_too_large", slow)
    check = check_submission(submission, {**CAMPAIGN, "model": "gpt-175b"})
    assert not check.problems
    assert check.counts.fitting.num_fitting == 0


def test_a_baseline_outside_of_the_space_is_a_warning_and_an_illegal_one_a_problem(
    submission: Submission,
) -> None:
    outside = check_submission(submission, {**CAMPAIGN, "baseline": {"tp": 4}})
    assert "the baseline is not among the layouts of the space" in outside.warnings[-1]
    assert not outside.problems
    illegal = check_submission(submission, {**CAMPAIGN, "baseline": {"tp": 3}})
    assert {problem.field for problem in illegal.problems} == {"baseline"}
    assert illegal.counts is not None
