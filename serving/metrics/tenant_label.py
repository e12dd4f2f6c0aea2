"""Which tenants a metric names: a bounded number, for every label value is kept for ever."""

from __future__ import annotations

from collections.abc import Iterable

OTHER_TENANTS = "other"
MAX_UNLISTED_TENANTS = 20


class TenantLabels:
    """The tenants of the config by name, and the first `MAX_UNLISTED_TENANTS` others; the rest are `other`.

    First come and not busiest: a counter must not change its name when somebody else becomes busy.
    """

    def __init__(self, listed: Iterable[str] = ()) -> None:
        self._named = set(listed)
        self._num_free = MAX_UNLISTED_TENANTS

    def label(self, tenant: str) -> str:
        """The label's value for a tenant."""
        if tenant in self._named:
            return tenant
        if not self._num_free:
            return OTHER_TENANTS
        self._num_free -= 1
        self._named.add(tenant)
        return tenant
