from __future__ import annotations

import pytest

from tests.kit.api import Api


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    """Of tests that use names of their own."""
    return module_api
