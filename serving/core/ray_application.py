"""The lab as an application on Ray: what deploying it and exporting it for others must say alike.

Here, and not beside the deployments, because importing Ray takes seconds.
"""

from __future__ import annotations

APP_NAME = "tandem"
# What a node offers to be given engines: one for each that its memory holds.
ENGINE_RESOURCE = "tandem_engine"
HEAD_RESOURCE = "node:__internal_head__"  # Ray's own, on the head and nowhere else
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # the data path is HTTP; Ray's store holds next to nothing
# Ray's own switch for desktops: at 0 every service is on 127.0.0.1, at 1 on the node's address.
LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

# What the Ray of one lab on one machine does less often than by Ray's defaults: docs/decisions/0009.
SELDOM = {
    # Serve's controller looks at everything in each turn of its loop; 0.1 s by default.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Serve's own counts, which leave a process every 10 s anyway; 100 ms by default, in each process twice.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    # The agent beside the raylet: figures of the machine (5 s), and a folder of events that nobody reads (2 s).
    "REPORTER_UPDATE_INTERVAL_MS": "10000",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
    # The raylet: objects of other nodes, workers to spare, room on the disk; 0.1, 0.2 and 0.1 s.
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    "RAY_local_fs_monitor_interval_ms": "10000",
}
