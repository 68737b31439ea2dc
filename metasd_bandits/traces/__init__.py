"""Recorded rounds: written, read, imported, made up."""
