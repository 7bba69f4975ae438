"""Reading of documents from outside: field checks, limits, durations."""
