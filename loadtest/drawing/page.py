"""Pages that need no network: one style, whatever they show, and pictures that the browser draws."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from loadtest.drawing.style import PAGE_THEME, VEGA_LITE_VERSION

EXPORTS = "window.vegaEmbed = vegaEmbed;"


def render_page(template: Path, pictures: Mapping[str, Any] | None = None, **context: Any) -> str:
    """Fill a template; text in it is escaped, and a missing value is an error.

    Args:
        template: may extend and include those beside this module.
        pictures: Vega-Lite by name, for a template that includes `drawing.html.j2`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader((template.parent, Path(__file__).parent)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    if pictures is not None:
        context |= {
            "javascript": script(vega()),
            "specs": _json(pictures),
            "theme": _json(PAGE_THEME),
        }
    return environment.get_template(template.name).render(**context)


@cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script that needs no network."""
    return str(vl_convert.javascript_bundle(EXPORTS, vl_version=VEGA_LITE_VERSION))


def _json(value: Any) -> Markup:
    """JSON for a script element; without `<`, no text in it can end the script."""
    return Markup(json.dumps(value).replace("<", r"\u003c"))


def script(code: str) -> Markup:
    """Code for a script element.

    Raises:
        ValueError: it holds a tag that would end or hide the script.
    """
    lowered = code.lower()
    for tag in ("</script", "<script", "<!--"):
        if tag in lowered:
            raise ValueError(f"the pictures' JavaScript holds {tag!r} and cannot be put into a page")
    return Markup(code)
