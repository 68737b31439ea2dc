"""The laws and bounds of the theory, as plain functions."""
