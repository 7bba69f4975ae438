"""An adapter for each trainer: its configuration, refusals and log."""
