"""The embedded TP/PP/ZeRO-1 trainer: torch, numpy and search_spaces alone."""
