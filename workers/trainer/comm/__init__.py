"""Communication between ranks: mesh, process groups, collectives, shared memory."""
