"""What the next forward of a model holds: its queue, the policy that orders it, and the memory it needs."""
