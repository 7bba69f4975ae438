"""What this trainer cannot do, in sentences."""

from __future__ import annotations

from search_spaces.cluster import detect_local_cpu
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from search_spaces.rules import violations
from workers.trainer.errors import LayoutUnsupportedError


def unsupported(layout: Layout, model: ModelShape) -> list[str]:
    """Says what of the layout the trainer cannot run with this model; empty when it can.

    These are the search space's own rules about models and the trainer, so that the two never
    differ; none of them looks at the cluster.
    """
    return violations(layout, model, detect_local_cpu(), scopes={"model", "trainer"})


def refuse_unsupported(layout: Layout, model: ModelShape) -> None:
    """Raises LayoutUnsupportedError, with every reason, if the trainer cannot run the layout."""
    if reasons := unsupported(layout, model):
        raise LayoutUnsupportedError("; ".join(reasons))
