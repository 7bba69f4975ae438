"""The driver process: asks strategies for layouts and tells them the outcomes."""
