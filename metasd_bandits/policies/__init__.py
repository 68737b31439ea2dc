"""One file per policy: its equation, its source, three compiled functions and a class."""
