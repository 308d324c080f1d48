"""Aggregators: which of several answers of one request is shown (`best_of`). One file each."""
