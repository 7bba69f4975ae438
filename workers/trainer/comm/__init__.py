"""Communication between ranks: process groups, collectives, shared memory."""
