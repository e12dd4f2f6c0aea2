"""Which tenants a metric names."""

from serving.metrics.tenant_label import MAX_UNLISTED_TENANTS, OTHER_TENANTS, TenantLabels


def test_listed_tenants_are_named_however_many_others_came_first() -> None:
    labels = TenantLabels(["gold"])
    for number in range(MAX_UNLISTED_TENANTS + 5):
        labels.label(f"t{number}")
    assert labels.label("gold") == "gold"


def test_the_first_others_keep_their_names_and_the_rest_share_one() -> None:
    labels = TenantLabels()
    first = [labels.label(f"t{number}") for number in range(MAX_UNLISTED_TENANTS)]
    assert first == [f"t{number}" for number in range(MAX_UNLISTED_TENANTS)]
    assert labels.label("late") == OTHER_TENANTS
    assert labels.label("t0") == "t0"
