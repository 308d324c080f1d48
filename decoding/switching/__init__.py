"""Rules that hand a sequence from one model to the other, one file each."""
