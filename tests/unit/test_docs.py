"""The documents against the code: tables row by row, links, commands and examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtest.offer.workload import WORKLOAD_NAMES
from serving import config
from serving.calibration import profile
from serving.cli.verbs import tandem
from serving.core.errors import ERROR_SHAPES, Reason
from serving.core.lane import Strategy
from serving.metrics.names import METRICS
from serving.metrics.table import with_table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = ("serving", "loadtest", "dashboards", "tests")
METRIC_COLUMNS = ("name", "type", "unit", "labels", "exporter", "help")
# A unit by the end of the name, as Prometheus wants it; other metrics count things named in the table.
UNIT_BY_SUFFIX = {
    "_seconds": "s",
    "_seconds_total": "s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_tokens_total": "tokens",
}


def prose(path: Path) -> str:
    """A document without its comments."""
    return re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def table(text: str, *headings: str) -> list[dict[str, str]]:
    """The rows of the one table with these headings, code marks taken off."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _cells(line) == list(headings)]
    assert len(starts) == 1, f"{len(starts)} tables with the headings {headings}"
    rows = []
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(headings, _cells(line), strict=True)))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]


def code(text: str) -> str:
    """What stands in fences, in indented blocks and between code marks, a line each."""
    fenced = [match[2] for match in FENCE.finditer(text)]
    rest = FENCE.sub("", text)
    indented = [line[4:] for line in rest.splitlines() if line.startswith("    ")]
    return "\n".join([*fenced, *indented, *re.findall(r"`([^`\n]+)`", rest)])


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def make_verbs() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*)\s*:(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_metrics_table_is_the_list_in_the_code() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert with_table(text) == text, "`make dashboards` writes it again"
    names = [row["name"] for row in table(prose(ROOT / "docs/metrics.md"), *METRIC_COLUMNS)]
    assert names == [metric.name for metric in METRICS]


@pytest.mark.parametrize(
    ("document", "headings", "names"),
    [
        ("../README.md", ("strategy", "decodes"), tuple(Strategy)),
        ("scheduling.md", ("scheduler.order", "next is"), config.ORDERS),
        ("scheduling.md", ("scheduler.placement", "takes"), config.PLACEMENTS),
        (
            "workloads.md",
            ("workload", "what is asked", "prompt tokens", "answer tokens", "what it shows"),
            WORKLOAD_NAMES,
        ),
    ],
    ids=["strategies", "orders", "placements", "workloads"],
)
def test_tables_of_what_can_be_chosen_name_all_of_it(
    document: str, headings: tuple[str, ...], names: tuple[str, ...]
) -> None:
    rows = table(prose(ROOT / "docs" / document), *headings)
    assert sorted(row[headings[0]] for row in rows) == sorted(names)


def test_a_document_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table with the heading"):
        with_table("# Metrics\n")


def test_metrics_table_gives_the_unit_that_the_name_ends_in() -> None:
    for row in table(prose(ROOT / "docs/metrics.md"), *METRIC_COLUMNS):
        by_name = [unit for suffix, unit in UNIT_BY_SUFFIX.items() if row["name"].endswith(suffix)]
        assert row["unit"], row["name"]
        if by_name or row["unit"] in UNIT_BY_SUFFIX.values():
            assert [row["unit"]] == by_name, row["name"]


def test_status_table_has_every_reason_with_its_status_and_type() -> None:
    rows = table(prose(ROOT / "docs/metrics.md"), "reason", "status", "type", "when")
    documented = [(row["reason"], int(row["status"]), row["type"]) for row in rows]
    assert documented == [
        (str(reason), ERROR_SHAPES[reason].status, ERROR_SHAPES[reason].type) for reason in Reason
    ]
    assert all(row["when"] for row in rows)


def test_architecture_names_every_package_once() -> None:
    text = prose(ROOT / "docs/architecture.md")
    rows = text[text.index("## Packages") :].splitlines()
    named = [
        name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]
    packages = {
        f"{folder.parent.name}/{folder.name}"
        for root in ("serving", "loadtest")
        for folder in (ROOT / root).iterdir()
        if (folder / "__init__.py").exists()
    }
    assert sorted(named) == sorted({*packages, "dashboards"})


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_and_functions_that_are_named_exist(document: str) -> None:
    """`some/module.py`, from the root or from a package that is clear, and `some/module.py:name`."""
    text = prose(ROOT / document)
    sources = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    for path, name in re.findall(r"`([\w/]+\.py)(?::(\w+))?`", text):
        found = [each.read_text() for each in sources if each.as_posix().endswith(f"/{path}")]
        assert found, path
        definition = rf"^\s*(?:async def|def|class) {name}\b|^{name}\b.* = "
        assert not name or any(re.search(definition, each, re.MULTILINE) for each in found), f"{path}:{name}"


def test_architecture_is_read_in_one_go() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_point_to_what_exists(document: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", prose(document))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name) if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_index_names_every_document() -> None:
    index = {ROOT / "docs" / link for link in LINK.findall(prose(ROOT / "docs/README.md"))}
    assert index == {path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")} - {
        ROOT / "docs/README.md"
    }


def test_the_readme_lists_every_tandem_verb() -> None:
    documented = [row["verb"] for row in table(prose(README), "verb", "does")]
    assert sorted(documented) == sorted(f"tandem {name}" for name in tandem.commands)


def test_the_readme_names_every_lab_that_is_shipped() -> None:
    linked = {ROOT / link for link in LINK.findall(prose(README))}
    others = set((ROOT / "deploy").glob("*.yaml")) - {ROOT / "deploy/lab.yaml"}
    assert others <= linked, "a row of its table of labs"


def test_tandem_verbs_named_in_documents_exist() -> None:
    for document in DOCUMENTS:
        named = set(re.findall(r"(?<![\w.\-/])tandem ([a-z]+)", code(prose(document))))
        assert named <= set(tandem.commands), document.name


def test_make_verbs_named_in_documents_exist() -> None:
    named = {
        verb
        for document in DOCUMENTS
        for verb in re.findall(r"(?<![\w.\-/])make ([a-z][a-z-]*)", code(prose(document)))
    }
    assert {"demo", "test", "up", "down", "check", "help"} <= named
    assert named <= make_verbs()


def test_the_readme_s_config_is_accepted(tmp_path: Path) -> None:
    examples = [match[2] for match in FENCE.finditer(prose(README)) if match[1] == "yaml"]
    assert examples
    for example in examples:
        path = tmp_path / "lab.yaml"
        path.write_text(example)
        lab = config.load(path)
        assert lab.lane("batched").replicas == 2


def test_the_readme_s_python_compiles() -> None:
    examples = [match[2] for match in FENCE.finditer(prose(README)) if match[1] == "python"]
    assert examples
    for example in examples:
        compile(example, "README.md", "exec")


def test_the_smallest_profile_is_read(tmp_path: Path) -> None:
    (example,) = [
        match[2] for match in FENCE.finditer(prose(ROOT / "docs/simulate.md")) if match[1] == "json"
    ]
    path = tmp_path / "profile.json"
    path.write_text(example)
    assert [lane.lane for lane in profile.load(path).lanes] == ["batched"]
