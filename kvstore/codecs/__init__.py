"""Codecs: how a chunk becomes bytes. One module per family; it assigns a `CodecFamily` to `PART`."""
