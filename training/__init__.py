"""Trainers of the small models that Turnout ships, and the data they learn from."""
