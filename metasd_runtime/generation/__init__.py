"""One call of `generate`: its settings, its prompts, its output."""
