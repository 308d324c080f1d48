"""Reading entropy and log-probability of every token of a stretch, without a say in when it ends."""

from __future__ import annotations

from decoding.model import Decision, Row, Until, Want


class Watch:
    """A stop rule that never stops: what it wants is read, and comes back with the tokens."""

    name = "watch"
    want = Want(draw=None, entropy=True, logprob=True)

    def observe(self, token: int, row: Row) -> Decision:
        """Go on."""
        return Decision.GO_ON


def watched() -> Until:
    """To the end of the answer; every token carries its entropy (bits) and log-probability (nats)."""
    return Until((Watch(),))
