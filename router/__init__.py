"""Which method answers a request: routing policies, their decisions, and what is written down about them."""
