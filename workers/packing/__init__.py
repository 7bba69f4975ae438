"""Packing of probes into the devices of an allocation: pure functions of the given time."""
