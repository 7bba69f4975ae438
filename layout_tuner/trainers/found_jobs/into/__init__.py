"""Writes layouts into copies of the files that jobs were read from (`export --into`)."""
