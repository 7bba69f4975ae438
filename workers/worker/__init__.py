"""The worker process: leases trials, runs them side by side and posts their outcomes."""
