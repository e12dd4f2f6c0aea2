"""The five dashboards, in the order in which they are linked."""

from __future__ import annotations

from dashboards.engines import ENGINES
from dashboards.load_test import LOAD_TEST
from dashboards.scheduler import SCHEDULER
from dashboards.speculation import SPECULATION
from dashboards.tension import TENSION
from serving.metrics import names

DASHBOARDS = (TENSION, SCHEDULER, SPECULATION, ENGINES, LOAD_TEST)
# Samples in a row make one region: its ends are the run's.
RUN_ANNOTATION = f"max({names.LOAD_RUN_ACTIVE.name}) == 1"
