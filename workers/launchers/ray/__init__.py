"""The Ray launcher: one node agent on every node of a Ray cluster."""
