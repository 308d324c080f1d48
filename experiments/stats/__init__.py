"""Uncertainty of comparisons: intervals, tests, corrections, stopping, power, curves of cost and quality."""
