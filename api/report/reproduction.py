"""The commands that repeat a campaign, for its report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from api.report.probe_command import probe_command
from api.version import version
from results_db.campaigns.imports import IMPORTED
from results_db.records import CampaignRecord
from search_spaces.spec.layout import Layout
from search_spaces.trainers.embedded import EMBEDDED_TRAINER


def commands(campaign: CampaignRecord, winner: Layout | None) -> Iterator[str]:
    """Lines for a shell: the search again, the winner as a job, its probe, the table."""
    name = shlex.quote(campaign.name)
    yield f"# layout-tuner {version()}"
    if campaign.strategy == IMPORTED:
        yield f"layout-tuner campaign table {name} > {name}.csv   # where this is"
        yield f"layout-tuner campaign import {name}.csv           # where it is to be"
        return
    yield "# the same search again (give it another name where this one is):"
    yield f"layout-tuner campaign submit {name}.yaml"
    if winner is not None:
        yield "# the winner as a training job:"
        if campaign.trainer == EMBEDDED_TRAINER:
            yield f"layout-tuner export {name} --format embedded --out job/"
            yield "layout-tuner train --config job/job.json"
        else:
            yield f"layout-tuner export {name} --format command --out job/"
        probe = probe_command(campaign.spec, winner)
        if probe is not None and probe.model is None:
            yield "# the winner's probe by itself, here and now:"
            yield probe.line
    yield "# everything that was measured, as a table:"
    yield f"layout-tuner campaign table {name} > {name}.csv"
