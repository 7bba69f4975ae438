"""The store of campaigns, of their analyses and imports, and of named models and clusters."""
