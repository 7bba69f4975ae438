"""The command `layout-tuner estimate`: predictions for one layout or for a table."""
