"""Figures of a campaign: pure functions from records to plain data, without the store."""
