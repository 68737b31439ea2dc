"""Train a pool of drafters for a target: answers, corpus, heads, evaluation, the pool's files."""
