"""What `layout-tuner probe` prints of an outcome."""

from __future__ import annotations

from dataclasses import replace

from search_spaces.protocol.measurement import Iteration
from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from tests.kit.store import completed, make_iterations
from workers.commands.commands import probe_document, probe_text

REQUEST = ProbeRequest(model=model_preset("tiny"), layout=Layout(tp=2))


def test_a_report_says_where_a_step_went_and_whether_the_probe_was_compiled() -> None:
    text = probe_text(REQUEST, completed())
    where = "compute 50.0%, tp 20.0%, pp 10.0%, dp 10.0%, optimizer 6.2%, unexplained 3.8%"
    assert where in text
    assert "compiled" not in text
    assert "of a step" not in probe_text(REQUEST, completed(breakdown=None))
    document = probe_document(REQUEST, completed())
    assert document["breakdown"]["compute_s"] == 0.064
    assert document["compile"] is False
    compiled = replace(REQUEST, compile=True)
    assert probe_document(compiled, completed())["compile"] is True
    assert ", compiled, on 2 devices" in probe_text(compiled, completed())


def skipping(number: int) -> tuple[Iteration, ...]:
    """Iterations of which the first ones overflowed."""
    iterations = make_iterations(0.5)
    return tuple(replace(it, grad_norm=None) if it.index < number else it for it in iterations)


def test_a_report_names_what_makes_a_figure_doubtful() -> None:
    plain = probe_text(REQUEST, completed())
    for word in ("unsettled", "skipped", "oversubscribed"):
        assert word not in plain
    doubtful = completed(warmup_settled=False, iterations=skipping(3), oversubscribed=True)
    text = probe_text(REQUEST, doubtful)
    for sentence in (
        "unsettled: step times still changed when timing began",
        "3 steps were skipped: their gradients overflowed",
        "oversubscribed: ranks shared devices",
    ):
        assert sentence in text
    one = probe_text(REQUEST, completed(iterations=skipping(1)))
    assert "1 step was skipped: its gradients overflowed" in one
