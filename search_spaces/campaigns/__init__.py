"""What a campaign describes: its file, settings and baseline, and the fidelity of its probes."""
