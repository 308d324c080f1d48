"""Whatever decides which proposed tokens stay, one file each."""
