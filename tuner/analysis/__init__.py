"""Importance of the knobs of a campaign, and steps around its winner."""
