"""Comparisons of decoding methods that users run: grids, live splits, tuning, load, and how sure one may be."""
