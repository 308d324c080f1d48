"""Equal shares of a device's time for its tenants: how long a step may be, and who is owed time.

Every tenant that has work waiting is entitled to 1/n of each step's time, in the sense of a step of its own: n steps
of its rows alone are the longest a shared step may take. What a tenant did not get, because a step of others was
under way when it came or because one of its rows would not fit, it is owed, and gets back over the next steps: the
others' parts of them are smaller meanwhile, by half at most, so that what they have running goes on. Whoever gets more
than its part because nobody minds owes nothing for it. The counters are those of the virtual token counter (Sheng et
al. 2024, Fairness in Serving Large Language Models), in predicted seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

# Balances are bounded: a forecast that is far off must not give a tenant the device, or keep it away, for long.
LARGEST_BALANCE_S = 1.0
# Steps end a little before they must: forecasts err, and what happens between steps takes time too.
MARGIN = 0.9
# What is left of a balance after each step in which its tenant had nothing waiting.
FADING = 0.9


class FairShare:
    """How far the tenants of one device are behind their shares, in seconds of steps of their own."""

    def __init__(self) -> None:
        self._balances: dict[str, float] = {}

    def balance(self, tenant: str) -> float:
        """Seconds a tenant is behind its share; negative: ahead of it."""
        return self._balances.get(tenant, 0.0)

    def owed(self, tenant: str) -> float:
        """Seconds a tenant must be given back."""
        return max(self._balances.get(tenant, 0.0), 0.0)

    def longest_step(self, here: Mapping[str, float], elsewhere: Mapping[str, float]) -> float:
        """Seconds the next step of one model may take.

        A tenant that is owed nothing bears n times its own step; one that is owed time bears less, until it has
        caught up, but half of what the others would have beside it.

        Args:
            here: seconds that each tenant's rows would take in a step of their own.
            elsewhere: the same of tenants that wait for other models only: their own step is still to come.

        Returns:
            Infinity with fewer than two tenants.
        """
        owed = {tenant: self.owed(tenant) for tenant in (*here, *elsewhere)}
        return _longest_step(here, elsewhere, owed)

    def charge(self, got: Mapping[str, float], active: Collection[str], seconds: float) -> None:
        """Account for a step.

        Args:
            got: seconds that what was fed for each tenant would have taken in a step of its own.
            active: tenants that had work waiting.
            seconds: what the step took, by the same forecast.
        """
        absent = self._balances.keys() - set(active) if len(active) > 1 else set(self._balances)
        for tenant in absent:
            self._balances[tenant] *= FADING
            if abs(self._balances[tenant]) < 1e-6:
                del self._balances[tenant]
        if len(active) > 1:
            share = seconds / len(active)
            for tenant in active:
                balance = self.balance(tenant) + share - got.get(tenant, 0.0)
                self._balances[tenant] = min(max(balance, -LARGEST_BALANCE_S), LARGEST_BALANCE_S)
            # Rows share what any step takes, so that all may get more than their shares: that is no debt.
            spare = min(max(self._balances[tenant] for tenant in active), 0.0)
            for tenant in active:
                self._balances[tenant] -= spare


def usual_step(here: Mapping[str, float], elsewhere: Mapping[str, float]) -> float:
    """Seconds the next step may take where nobody is owed anything; see `FairShare.longest_step`."""
    return _longest_step(here, elsewhere, {})


def _longest_step(here: Mapping[str, float], elsewhere: Mapping[str, float], owed: Mapping[str, float]) -> float:
    n = len(here) + len(elsewhere)
    if n < 2:
        return inf

    def bears(tenant: str, seconds: float) -> float:
        usual = MARGIN * n * seconds
        return max(usual - MARGIN * n * owed.get(tenant, 0.0), (seconds + usual) / 2)

    limits = [bears(tenant, seconds) for tenant, seconds in here.items()]
    limits += [bears(tenant, seconds) - seconds for tenant, seconds in elsewhere.items()]
    return max(min(limits), 0.0)
