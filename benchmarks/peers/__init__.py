"""Other engines compared with ours: each runs in a process of its own, and all answer the same prompts in turn."""
