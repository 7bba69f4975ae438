"""Commands that run the processes: service, driver, workers, allocations, database."""
