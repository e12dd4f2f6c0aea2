"""Dashboards drawn without Grafana: names, colours, and a page that leaves the browser alone."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from click.testing import CliRunner

from dashboards import render
from dashboards.spec import Panel, Query


class Prometheus(BaseHTTPRequestHandler):
    """Answers every range query with the same two series."""

    def do_GET(self) -> None:
        series = [
            {"metric": {"lane": lane}, "values": [[1000 + n, str(n)] for n in range(5)] + [[1005, "NaN"]]}
            for lane in ("batched", "speculative")
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


def test_a_legend_is_filled_as_grafana_fills_it() -> None:
    assert render.line_name("{{lane}} at {{absent}}", {"lane": "a"}) == "a at "


def test_lines_of_one_lane_share_a_colour_and_differ_in_dashes() -> None:
    names = ["batched", "speculative"]
    assert render.colour_of(names, "batched p50") == render.colour_of(names, "batched p95")
    assert render.colour_of(names, "batched") != render.colour_of(names, "speculative")
    assert render.colour_of(names, "limit of the SLO") == render.REFERENCE_COLOUR
    assert render.dashes_of(["batched p50", "batched p95", "speculative p50"]) == [[1, 0], [6, 3], [1, 0]]


def test_what_is_compared_with_is_grey_only_beside_others() -> None:
    mixed = Panel("t", "d.", "s", (Query("a", "{{lane}}"), Query("b", "limit")))
    alone = Panel("t", "d.", "s", (Query("a", "granted"), Query("b", "refused")))
    assert render.references(mixed) == {"limit"}
    assert render.references(alone) == set()


def test_pages_hold_all_they_need(tmp_path: Path) -> None:
    with prometheus() as url:
        done = CliRunner().invoke(
            render.main, ["--prometheus", url, "--dashboard", "tension", "--out", str(tmp_path)]
        )
    assert done.exit_code == 0, done.output
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
