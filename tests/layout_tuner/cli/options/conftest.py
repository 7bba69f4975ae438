"""What tests of these commands share with those of the workers."""

from __future__ import annotations

from tests.workers.conftest import (
    client,
    mark,
    nodes,
    orders,
    orders_file,
    place,
    service,
    two_nodes,
)

__all__ = ["client", "mark", "nodes", "orders", "orders_file", "place", "service", "two_nodes"]
