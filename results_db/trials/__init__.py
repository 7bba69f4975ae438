"""The store of trials: leases, outcomes, lifecycle, loss vote, filters and pages."""
