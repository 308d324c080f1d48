"""Methods over texts, for pools with endpoints: one module per method, named as in `decoding.methods`."""
