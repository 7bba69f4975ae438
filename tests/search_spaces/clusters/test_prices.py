"""Clusters may state what a node-hour costs."""

from __future__ import annotations

import pytest

from layout_tuner.errors import ClusterInvalidError
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster


@pytest.mark.parametrize("price", ["2.50", "EUR", "-1 EUR", "1.2.3 EUR"])
def test_a_price_is_an_amount_with_a_currency(price: str) -> None:
    with pytest.raises(ClusterInvalidError, match="is not an amount with a currency, such as"):
        resolve_cluster({"name": "hal", "node_hour_price": price})
