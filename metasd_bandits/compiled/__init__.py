"""Policies whose arithmetic is compiled once and run everywhere."""
