"""Every seeded fault can be applied to the code as it is; `make test-faults` runs the tests."""

from __future__ import annotations

import pytest

from tests.seeded_faults.fault import Fault
from tests.seeded_faults.faults import FAULTS
from tests.seeded_faults.seeding import changed


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_can_be_applied(fault: Fault) -> None:
    assert changed(fault).text != ""
