"""Which tenants a metric names."""

from __future__ import annotations

from collections import Counter

from serving.core.request import DEFAULT_TENANT, TENANT_NAME
from serving.gateway.metrics import GatewayMetrics
from serving.metrics.tenant_label import NUM_GROUPS, TenantLabels

INVENTED = [f"t{number}" for number in range(1000)]


def test_listed_tenants_and_the_default_are_named_however_many_others_came_first() -> None:
    labels = TenantLabels(["gold"])
    for tenant in INVENTED:
        labels.label(tenant)
    assert [labels.label(tenant) for tenant in ("gold", DEFAULT_TENANT)] == ["gold", DEFAULT_TENANT]


def test_every_process_gives_a_tenant_the_same_label_whatever_it_has_seen() -> None:
    one, other = TenantLabels(["gold"]), TenantLabels(["gold"])
    for tenant in INVENTED:
        one.label(tenant)
    tenants = ["gold", "late", *reversed(INVENTED)]
    assert [one.label(tenant) for tenant in tenants] == [other.label(tenant) for tenant in tenants]
    assert (
        TenantLabels().label("acme") == "other 15"
    )  # of this release and the next, or counters change their names


def test_invented_names_are_bounded_and_do_not_hide_a_tenant_that_comes_later() -> None:
    labels = TenantLabels()
    groups = Counter(labels.label(tenant) for tenant in INVENTED)
    assert len(groups) == NUM_GROUPS
    assert max(groups.values()) < 3 * len(INVENTED) / NUM_GROUPS
    for tenant in INVENTED[:20]:
        labels.label(tenant)
    assert len({labels.label(tenant) for tenant in ("acme", "initech")}) == 2


def test_no_tenant_has_the_name_of_a_group() -> None:
    assert not any(TENANT_NAME.fullmatch(TenantLabels().label(tenant)) for tenant in INVENTED)


def test_two_gateways_count_a_tenant_under_one_name() -> None:
    gateways = GatewayMetrics(), GatewayMetrics()
    names = []
    for gateway, first in zip(gateways, (INVENTED[:20], INVENTED[20:40]), strict=True):
        for tenant in (*first, "acme"):
            gateway.ended("", "completed", None, tenant)  # type: ignore[arg-type]
        names.append({
            sample.labels["tenant"] for family in gateway.registry.collect() for sample in family.samples
            if sample.name == "tandem_tenant_requests_total"
        })  # fmt: skip
    label = TenantLabels().label("acme")
    assert label in names[0] & names[1]
