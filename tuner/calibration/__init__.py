"""The estimates' constants, corrected by what was measured."""
