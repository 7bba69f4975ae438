"""The store of trials: outcomes, lifecycle, loss vote, filters and pages."""
