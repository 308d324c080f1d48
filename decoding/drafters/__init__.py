"""Whatever proposes tokens, one file each."""
