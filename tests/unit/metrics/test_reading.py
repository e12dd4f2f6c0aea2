"""What is read of a page, and what is passed over."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from serving.metrics.reading import is_exported, samples_of, sums_of

PAGE = """\
# HELP a_total Of two processes.
# TYPE a_total counter
a_total{engine="0",name="x{y} 7, \\"z\\""} 10.0
a_total{engine="1"} 5.5
# TYPE a_total_more gauge
a_total_more 3.0
this line is {no sample
# TYPE b_seconds histogram
b_seconds_bucket{le="0.1"} 1.0
b_seconds_bucket{le="+Inf"} 2.0
b_seconds_sum 0.75
b_seconds_count 2.0
# TYPE empty_total counter
"""


def test_samples_are_those_of_the_names_in_the_order_of_the_page() -> None:
    found = [(one.name, one.labels, one.value) for one in samples_of(PAGE, ("b_seconds_bucket", "a_total"))]
    assert found == [
        ("a_total", {"engine": "0", "name": 'x{y} 7, "z"'}, 10.0),
        ("a_total", {"engine": "1"}, 5.5),
        ("b_seconds_bucket", {"le": "0.1"}, 1.0),
        ("b_seconds_bucket", {"le": "+Inf"}, 2.0),
    ]


def test_sums_are_over_labels_and_what_is_absent_has_none() -> None:
    assert sums_of(PAGE, ("a_total", "b_seconds_sum", "c")) == {"a_total": 15.5, "b_seconds_sum": 0.75}


def test_a_metric_is_exported_before_it_has_a_sample() -> None:
    assert is_exported(PAGE, "empty_total")
    assert not is_exported(PAGE, "empty")
    assert not is_exported(PAGE, "a_total{")


def test_a_wanted_line_that_is_no_sample_is_a_fault() -> None:
    with pytest.raises(ValueError, match="could not convert string to float"):
        list(samples_of("# HELP\na_total one\n", ("a_total",)))


def test_what_is_no_page_of_metrics_is_a_fault_and_an_empty_one_is_not() -> None:
    with pytest.raises(ValueError, match="invalid metric name"):
        sums_of("<!doctype html>\n<p>Welcome", ("a_total",))
    assert sums_of("", ("a_total",)) == sums_of("# nothing\n", ("a_total",)) == {}


def test_a_first_line_that_is_wanted_counts_once() -> None:
    assert sums_of('a_total{lane="x"} 2.0\na_total{lane="y"} 3.0', ("a_total",)) == {"a_total": 5.0}


def test_a_page_of_our_own_collectors_is_read_back() -> None:
    registry = CollectorRegistry()
    Counter("requests_total", "Ended.", ("tenant",), registry=registry).labels(tenant="\u2028a\nb").inc(3)
    Histogram("wait_seconds", "Waits.", registry=registry, buckets=(1.0,)).observe(0.5)
    page = generate_latest(registry).decode()
    (sample,) = samples_of(page, ("requests_total",))
    assert (sample.labels, sample.value) == ({"tenant": "\u2028a\nb"}, 3)
    assert sums_of(page, ("wait_seconds_count",)) == {"wait_seconds_count": 1}
    assert is_exported(page, "requests_total")
