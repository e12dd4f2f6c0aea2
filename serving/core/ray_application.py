"""The lab as an application on Ray: what deploying it and exporting it for others must say alike.

Here, and not beside the deployments, because importing Ray takes seconds.
"""

from __future__ import annotations

APP_NAME = "tandem"
# What a node offers to be given engines: one for each that its memory holds.
ENGINE_RESOURCE = "tandem_engine"
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # the data path is HTTP; Ray's store holds next to nothing
# Ray's own switch for desktops: at 0 every service is on 127.0.0.1, at 1 on the node's address.
LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
