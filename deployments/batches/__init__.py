"""Many requests in a file: batches of the served endpoint, and jobs of their own that need no server."""
