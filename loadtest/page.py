"""Pages that need no network: one style, whatever they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def render_page(template: str, **context: Any) -> str:
    """Fill a template of this directory; text in it is escaped, and a missing value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**context)
