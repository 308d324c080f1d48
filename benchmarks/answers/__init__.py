"""Aggregators, uncertainty estimators and look-ahead programs: whether they tell right answers from wrong ones."""
