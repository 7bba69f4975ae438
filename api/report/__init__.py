"""The report of a campaign: one HTML document with plots, without scripts or external resources."""
