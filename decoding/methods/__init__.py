"""Methods: what answers a request (`turnout generate --method NAME`). One file each."""
