"""Dashboards drawn without Grafana: names, colours, and a page that leaves the browser alone."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from dashboards import render
from dashboards.spec import REFERENCE_COLOUR, Panel, Query
from dashboards.tension import TENSION
from serving.core.lane_colours import lane_colours


class Prometheus(BaseHTTPRequestHandler):
    """Answers every range query with the same two series, but one with none."""

    def do_GET(self) -> None:
        lanes = () if "goodput" in self.path else ("batched", "speculative")
        series = [
            {"metric": {"lane": lane}, "values": [[1000 + n, str(n)] for n in range(5)] + [[1005, "NaN"]]}
            for lane in lanes
        ]
        body = json.dumps({"data": {"result": series}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def prometheus() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Prometheus)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_points_have_names_and_no_holes() -> None:
    with prometheus() as url:
        points = render.read_points(url, Query('up{lane=~"$lane"}', "{{lane}} p50"), {}, (1000.0, 1010.0))
    assert {point["line"] for point in points} == {"batched p50", "speculative p50"}
    assert len(points) == 10
    assert points[0]["at"] == 1_000_000
    assert {point["owner"] for point in points} == {("lane", "batched"), ("lane", "speculative")}


def test_a_prometheus_that_is_not_there_is_named_with_the_query() -> None:
    with pytest.raises(render.NoPrometheusError) as caught:
        render.read_points("http://127.0.0.1:9", Query("up", "up"), {}, (1000.0, 1010.0))
    assert str(caught.value) == "http://127.0.0.1:9: cannot be reached: Connection refused: up"


def test_a_legend_is_filled_as_grafana_fills_it() -> None:
    assert render.line_name("{{lane}} at {{absent}}", {"lane": "a"}) == "a at "


def test_a_line_is_its_lane_s_a_replica_s_too() -> None:
    labels = {"lane": "batched", "replica": "batched-1a2b", "tenant": "acme"}
    assert render.owner_of(Query("x", "{{replica}} running"), labels) == ("lane", "batched")
    assert render.owner_of(Query("x", "{{tenant}}"), {"tenant": "acme"}) == ("tenant", "acme")
    assert render.owner_of(Query("x", "granted"), {}) == ("", "granted")


def test_lanes_have_the_colours_of_reports_and_others_their_own() -> None:
    tenants = [("tenant", name) for name in "abcd"]
    found = render.colours_of([("lane", "speculative"), *tenants, ("lane", "sequential"), ("tenant", "a")])
    assert {lane: found["lane", lane] for lane in ("sequential", "speculative")} == lane_colours(
        ["sequential", "speculative"]
    )
    assert len(set(found.values())) == 6


def test_lines_of_one_colour_differ() -> None:
    assert render.told_apart(["red", "red", "blue", "red"], "abc") == ["a", "b", "a", "c"]


def test_what_is_compared_with_is_grey_only_beside_others() -> None:
    mixed = Panel("t", "d.", "s", (Query("a", "{{lane}}"), Query("b", "limit")))
    alone = Panel("t", "d.", "s", (Query("a", "granted"), Query("b", "refused")))
    assert mixed.references == {"limit"}
    assert alone.references == set()


def test_a_panel_without_data_says_so_and_why() -> None:
    queries = (Query("a", "{{lane}}", "nothing was refused"), Query("b", "limit"))
    panel = Panel("t", "d.", "s", queries)
    limit = {"at": 1.0, "line": "limit", "value": 1.0, "owner": ("", "limit")}
    assert not render.has_data(panel, [limit])
    text = json.dumps(render.draw_panel(panel, [limit], (0.0, 10.0), {}).to_dict())
    assert '["no data", "nothing was refused"]' in text
    own = {"at": 1.0, "line": "a", "value": 1.0, "owner": ("lane", "a")}
    text = json.dumps(
        render.draw_panel(panel, [limit, own], (0.0, 10.0), {("lane", "a"): "#123456"}).to_dict()
    )
    assert "no data" not in text
    assert "#123456" in text
    assert REFERENCE_COLOUR in text


def test_pages_hold_all_they_need(tmp_path: Path) -> None:
    with prometheus() as url:
        done = CliRunner().invoke(
            render.main, ["--prometheus", url, "--dashboard", "tension", "--out", str(tmp_path)]
        )
    assert done.exit_code == 0, done.output
    num_panels = len(TENSION.panels)
    assert f"tension: reading {num_panels} panels" in done.stderr
    assert "tension: drawing" in done.stderr
    assert done.stdout.endswith(f"  no data in 1 of {num_panels} panels:\n    Goodput\n")
    assert (tmp_path / "tension.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "tension.html").read_text()
    assert "Time to first token" in page
    assert re.findall(r'<(?:script|link)[^>]+(?:src|href)="', page) == []


def test_no_prometheus_is_said_with_the_query(tmp_path: Path) -> None:
    done = CliRunner().invoke(render.main, ["--prometheus", "http://127.0.0.1:9", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "http://127.0.0.1:9" in done.output
    assert "tandem_generated_tokens" in done.output


def test_a_variable_needs_a_value() -> None:
    done = CliRunner().invoke(render.main, ["--variable", "lane"])
    assert done.exit_code == 2
    assert "lane=batched" in done.output
