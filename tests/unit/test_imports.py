"""The import graph, by a public tool: no module needs itself, however long the way round."""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def in_order(graph: grimp.ImportGraph) -> list[str]:
    """The modules, each after those it imports.

    Raises:
        CycleError: some import each other; the text names them.
    """
    return list(
        TopologicalSorter(
            {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
        ).static_order()
    )


def test_no_module_imports_itself_over_others() -> None:
    graph = grimp.build_graph("serving", "loadtest", "dashboards", cache_dir=None)
    order = in_order(graph)
    assert {"serving.core.request", "loadtest.bench.__main__", "dashboards.build"} <= set(order)


def test_core_needs_of_others_only_msgspec_and_no_event_loop() -> None:
    graph = grimp.build_graph("serving", include_external_packages=True, cache_dir=None)
    core = {"serving.core", *graph.find_descendants("serving.core")}
    imported = {name for module in core for name in graph.find_modules_directly_imported_by(module)} - core
    assert "asyncio" not in imported
    assert imported - sys.stdlib_module_names == {"msgspec"}


def test_a_cycle_would_be_seen() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a")):
        graph.add_import(importer=importer, imported=imported)
    with pytest.raises(CycleError):
        in_order(graph)
