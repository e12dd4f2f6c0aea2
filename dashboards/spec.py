"""What a dashboard is made of: questions, panels and PromQL. No Grafana in here.

Every rate is over one minute, in the panels as in the recording rules, so that panels can be compared.
What several panels or alerts ask is a recording rule of `prometheus/rules`; what one panel asks stands in it.
A query may hold the variables of `VARIABLES`; each stands in a regular expression: `lane=~"$lane"`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from serving.metrics import names

Kind = Literal["lines", "stack", "stat"]
Colour = Literal["green", "orange", "red"]

# Selectors of what is chosen.
LANE = '{lane=~"$lane"}'
REPLICA = '{lane=~"$lane",replica=~"$replica"}'

# Where the values of each variable come from.
VARIABLES = {
    "lane": f"label_values({names.WANTED_REPLICAS.name}, lane)",
    "replica": f"label_values({names.RUNNING.name}{LANE}, replica)",
    "tenant": f"label_values({names.TENANT_REQUESTS.name}, tenant)",
    "workload": f"label_values({names.LOAD_DUE.name}, workload)",
    "plain": f"label_values({names.WANTED_REPLICAS.name}, lane)",
}
# The lane that others are compared with: one value, never All.
SINGLE_VARIABLES = {"plain": "batched"}
ALL = ".*"
REFERENCE_COLOUR = "#9aa3ad"  # of `Panel.references`


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what its lines are called.

    Attributes:
        legend: text, with labels in double braces.
        may_be_empty: why there may be no data while all is well; empty where that would be a fault.
    """

    expr: str
    legend: str
    may_be_empty: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that its legend names."""
        return tuple(re.findall(r"\{\{(\w+)\}\}", self.legend))


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Attributes:
        description: one sentence without code marks: what it shows, and what to look for.
        unit: as Grafana names it.
        thresholds: value from which a colour holds; below the first it is green.
        width: of 24.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    thresholds: tuple[tuple[float, Colour], ...] = ()
    width: int = 12

    @property
    def why_empty(self) -> str:
        """When it is no fault that there is no data; empty where it is one."""
        return "; ".join(dict.fromkeys(query.may_be_empty for query in self.queries if query.may_be_empty))

    @property
    def references(self) -> frozenset[str]:
        """Lines that others are compared with: those without labels, where there are others."""
        bare = frozenset(query.legend for query in self.queries if not query.labels)
        return bare if len(bare) < len(self.queries) else frozenset()


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading; their widths add up to 24, or to a multiple of it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One question, and the panels that answer it."""

    name: str
    title: str
    question: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that its queries use, and those that they depend on, in the order of `VARIABLES`."""
        text = " ".join(query.expr for panel in self.panels for query in panel.queries)
        used = set(re.findall(r"\$(\w+)", text))
        for name in tuple(used):
            used |= set(re.findall(r"\$(\w+)", VARIABLES[name]))
        return tuple(name for name in VARIABLES if name in used)


def per_second(metric: str, selector: str, by: str = "") -> str:
    """PromQL for what a counter gains each second.

    Args:
        metric: a name of `serving.metrics.names`.
        by: labels to keep, with commas between; none: one sum of all.
    """
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{selector}[1m]))"


def filled(expr: str, values: dict[str, str]) -> str:
    """PromQL with its variables replaced; those without a value are at All, or at their default.

    An empty value stays empty, as when nothing is chosen.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return values.get(name, SINGLE_VARIABLES.get(name, ALL))

    return re.sub(r"\$(\w+)", value, expr)
