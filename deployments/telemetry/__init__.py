"""What the server tells of itself: metrics, a log of requests, the first span of a trace, audits."""
