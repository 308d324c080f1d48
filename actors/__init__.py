"""Model actors: one model on one device group each, reached over Ray as if it were in the same process."""
