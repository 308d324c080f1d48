"""Whatever chooses, each round, among the drafters of a request, one file each."""
