"""Identifier providers: which names may follow a dot in code (`monitor_guided`). One file each."""
