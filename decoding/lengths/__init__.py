"""Length policies: how deep a draft goes, before a round and after each token. One file each."""
