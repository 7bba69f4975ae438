"""Strategies behind one ask/tell protocol."""
