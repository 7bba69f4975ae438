"""Launch scripts, read without running them: their commands, launchers and heads."""
