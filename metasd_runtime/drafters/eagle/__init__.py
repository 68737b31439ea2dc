"""EAGLE's heads: chains, trees, and their compiled step."""
