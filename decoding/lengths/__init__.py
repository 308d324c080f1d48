"""Whatever decides how long a draft may become, one file each."""
