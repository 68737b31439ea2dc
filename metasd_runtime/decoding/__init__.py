"""One round: select, draft, verify, commit, reward, update."""
