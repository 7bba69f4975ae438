"""The campaign: its file, settings, default space and baseline; the fidelity of its probes."""
