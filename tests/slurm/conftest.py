"""Real Slurm for tests marked `slurm`; where it can't be installed, they skip with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.site import SlurmSite, why_not


@pytest.fixture
def slurm() -> Iterator[SlurmSite]:
    """A site of its own for the test: four nodes of 8 CPUs and 8 pretended GPUs."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with SlurmSite(num_nodes=4) as site:
        yield site
        if site.has_controller:
            site.cancel_everything()
