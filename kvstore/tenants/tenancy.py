"""Whose cache a prompt's tokens belong to: decided here, from who asks and what is registered, never by the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.tenants.registry import PUBLIC, Prefix, Registry, namespace_of
from turnout.types import Namespace, Sharing, SharingPolicy

if TYPE_CHECKING:
    from turnout.config import TenantSharing


class Tenancy:
    """Sharing and limits of tenants.

    Each call may carry a tenant's `policy`, from the tenants file: it takes precedence over the configuration.
    Limits are as configured.

    Args:
        tenants: as configured, by name; others are private.
        quota_bytes: of a namespace that no tenant's setting names; None: no limit.
        registry: of prefixes; None: nothing is registered.
    """

    def __init__(
        self, tenants: Mapping[str, TenantSharing], quota_bytes: int | None, registry: Registry | None = None
    ) -> None:
        self._tenants = tenants
        self._quota = quota_bytes
        self._registry = registry
        self._limits: dict[Namespace, int | None] = {}
        for name, setting in tenants.items():
            own = setting.quota_bytes if setting.quota_bytes is not None else quota_bytes
            # Its private one too: the tenants file may say private of a tenant that is in a group here.
            for namespace in (Namespace("private", name), *self._of(name)):
                others = self._limits.get(namespace, 0)
                self._limits[namespace] = None if own is None or others is None else max(own, others)

    def sharing(self, tenant: str, prompt: Sequence[int], policy: SharingPolicy | None = None) -> Sharing:
        """Split a prompt: the longest head in common with a public prefix, then with one of the tenant's group, then
        the tenant's own policy.

        A head of a registered prefix is as public as the whole, so it need not be there to its end: the last token
        of a text may differ when something follows.

        Args:
            tenant: who asks.
            prompt: token ids.
            policy: the tenant's, of the call; None: as configured.
        """
        spans: list[tuple[int, Namespace]] = []
        group = self.group(tenant) if policy is None else policy.group
        for namespace, fits in self._shared(group):
            end = max((common_length(tokens, prompt) for tokens in fits), default=0)
            if end > (spans[-1][0] if spans else 0):
                spans.append((end, namespace))
        return Sharing(self.home(tenant) if policy is None else policy.home(tenant), tuple(spans))

    def home(self, tenant: str) -> Namespace:
        """Return the namespace of a tenant's own chunks, as configured."""
        setting = self._tenants.get(tenant)
        return Namespace("private", tenant) if setting is None else setting.home(tenant)

    def group(self, tenant: str) -> str | None:
        """Return the group a tenant is configured to belong to, whether it shares its own prompts with it or not."""
        setting = self._tenants.get(tenant)
        return setting.group if setting is not None else None

    def may_write(self, tenant: str) -> bool:
        """Tell whether a tenant may store anything: not with a quota of 0, however it shares."""
        setting = self._tenants.get(tenant)
        quota = setting.quota_bytes if setting is not None else None
        return (self._quota if quota is None else quota) != 0

    def limit(self, namespace: Namespace) -> int | None:
        """Return a namespace's limit, bytes: its tenant's; of a group the largest of its members'; public: none."""
        if namespace.policy == "public":
            return None
        return self._limits.get(namespace, self._quota)

    def namespaces(self) -> list[Namespace]:
        """List those that the configuration or a registered prefix names, and the public one."""
        configured = [namespace for name in self._tenants for namespace in self._of(name)]
        registered = [] if self._registry is None else map(namespace_of, self._registry.prefixes)
        return list(dict.fromkeys([PUBLIC, *configured, *registered]))

    def _of(self, tenant: str) -> list[Namespace]:
        """Return the namespace of a tenant's chunks, and that of what its group registered."""
        group = self.group(tenant)
        return list(dict.fromkeys([self.home(tenant), *([Namespace("group", group)] if group else [])]))

    def sharing_of(self, prefix: Prefix, tokens: Sequence[int]) -> Sharing:
        """Return the namespaces of the tokens of a registered prefix."""
        if prefix.policy == "public":
            return Sharing(namespace_of(prefix))
        if prefix.policy == "private":
            return self.sharing(prefix.id, tokens, prefix.sharing)
        spans = self._shared(None)
        end = max((common_length(each, tokens) for _, fits in spans for each in fits), default=0)
        return Sharing(namespace_of(prefix), ((end, PUBLIC),) if end else ())

    def _shared(self, group: str | None) -> list[tuple[Namespace, list[list[int]]]]:
        if self._registry is None:
            return []
        found = [(PUBLIC, self._tokens(lambda prefix: prefix.policy == "public"))]
        if group is not None:
            of_group = self._tokens(lambda prefix: prefix.policy == "group" and prefix.id == group)
            found.append((Namespace("group", group), of_group))
        return found

    def _tokens(self, fits: Callable[[Prefix], bool]) -> list[list[int]]:
        assert self._registry is not None
        return [self._registry.tokens_of(prefix) for prefix in self._registry.prefixes if fits(prefix)]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that two sequences have in common from the start on."""
    low, high = 0, min(len(first), len(second))
    if high and first[0] != second[0]:
        return 0
    while low < high:  # all before `low` are equal, those from `high` on are not known to be
        middle = (low + high + 1) // 2
        if list(first[low:middle]) == list(second[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
