"""Which tenants a metric names: a bounded number, for every label value is kept for ever.

Gateways and the scheduler each count by themselves, and a counter must keep its name. So the label follows from
the tenant's name and the config alone: the same in every process, after every restart, whoever came first.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from serving.core.request import DEFAULT_TENANT

OTHER_TENANTS = "other"
NUM_GROUPS = 20  # of the tenants that have no name of their own


class TenantLabels:
    """The tenants of the config and `default` by name; each of the others is in a group, for good.

    Whoever invents names fills groups with noise, and takes no name from anybody: a tenant that must be seen by
    itself is listed in the config. A group's label has a space, which no tenant's name can have.
    """

    def __init__(self, listed: Iterable[str] = ()) -> None:
        self._named = {DEFAULT_TENANT, *listed}

    def label(self, tenant: str) -> str:
        """The label's value for a tenant."""
        if tenant in self._named:
            return tenant
        return f"{OTHER_TENANTS} {crc32(tenant.encode()) % NUM_GROUPS + 1:02d}"
