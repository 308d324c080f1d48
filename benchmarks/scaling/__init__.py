"""A cluster on paper: a discrete-event simulator of pools, what stands before them, and what they share."""
