"""Tokens in, logits out, and the caches between."""
