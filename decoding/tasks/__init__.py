"""Tasks: what a pool can be asked that writes no answer, only reads. One file each."""
