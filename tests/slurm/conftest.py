"""Real Slurm for tests marked `slurm`; where it can't be installed, they skip with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.slurm.site import SlurmSite, why_not


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    """Four nodes of 8 CPUs and 8 pretended GPUs, for the tests of a file."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with closing(SlurmSite(num_nodes=4)) as site:
        yield site


@pytest.fixture
def slurm(site: SlurmSite) -> Iterator[SlurmSite]:
    """The file's site, on which the test leaves no job and no process."""
    yield site
    site.cancel_everything()
