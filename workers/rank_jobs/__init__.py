"""The jobs of a rank: probes, training jobs, health checks, and timings of the machine."""
