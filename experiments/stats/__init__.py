"""How sure one may be of a comparison: intervals, tests, corrections, stopping, power, curves of cost and quality."""
