"""One look-up through the tiers, and what is written behind it."""
