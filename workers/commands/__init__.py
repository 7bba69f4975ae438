"""The commands of the workers, with their shared options and input."""
