"""Scheduling of one model: its queue, the policy, the memory of a step, and the loop that runs steps."""
