"""Subcommands of the command line that talk to, or run, the service."""
