"""A start that is stopped at a moment of its own: `stopped_start ADDRESS FILE MOMENT`.

`joined`: between joining the cluster and looking for another lab; `claimed`: before it starts Serve. It says so,
waits for a line on stdin, and then does what the supervisor does at a stop signal.
"""

from __future__ import annotations

import sys
import uuid
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from serving import config
from serving.deployments import RayLab
from serving.shared_cluster import SharedCluster


def main(address: str, path: str, moment: str) -> None:
    lab = RayLab(address, uuid.uuid4().hex)

    def stop(*_: object) -> None:
        sys.stdout.write(f"{moment}\n")
        sys.stdout.flush()
        sys.stdin.readline()
        raise KeyboardInterrupt

    def on_progress(text: str) -> None:
        if text == "starting Ray Serve":
            stop()

    with suppress(KeyboardInterrupt):
        if moment == "joined":
            with patch.object(SharedCluster, "claim", stop):
                lab.start(config.load(Path(path)), on_progress=on_progress)
        lab.start(config.load(Path(path)), on_progress=on_progress)
    lab.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
