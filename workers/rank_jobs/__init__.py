"""What a rank runs: probes and training jobs, health checks, and timings of the machine."""
