"""Reads pages of metrics: the samples that are wanted, and no others."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples_of(page: str, names: Collection[str]) -> Iterator[Sample]:
    """The page's samples of these names, in its order.

    Lines of other metrics are not parsed: most of an engine's page is of no use to who reads it each second, and
    parsing all of it would cost a core.

    Args:
        names: of samples, as the page has them: a histogram's end in `_bucket`, `_sum` and `_count`.

    Raises:
        ValueError: such a line, or the first one, is not in Prometheus' format.
    """
    wanted = tuple(names)
    # The first line always: what is no page of metrics is not one without samples.
    first, *others = page.split("\n")
    lines = [first, *(line for line in others if line.startswith(wanted))]
    for family in text_string_to_metric_families("\n".join(lines)):
        yield from (sample for sample in family.samples if sample.name in names)


def sums_of(page: str, names: Collection[str]) -> dict[str, float]:
    """Each of these names that the page has, with its samples summed over their labels.

    Raises:
        ValueError: as `samples_of`.
    """
    sums: dict[str, float] = {}
    for sample in samples_of(page, names):
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def is_exported(page: str, name: str) -> bool:
    """Whether the page names a metric; it does so from the start, before there is any sample of it."""
    return f"# TYPE {name} " in page
