"""The store of trials: outcomes, lifecycle, comparison of losses, filters and pages."""
