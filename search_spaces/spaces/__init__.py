"""The search space: choices of the knobs, and the legal layouts among them."""
