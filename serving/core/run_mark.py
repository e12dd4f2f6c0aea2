"""How processes and files of one lab are known: by the run's id."""

from __future__ import annotations

RUN_ID_VARIABLE = "TANDEM_RUN_ID"  # in the environment of each process of a lab on one machine
NUM_MARK_CHARS = 8  # in names of folders, which are short: paths of sockets have at most 107 bytes


def socket_folder_prefix(run_id: str) -> str:
    """How the names of the engines' folders of sockets begin."""
    return f"tandem-vllm-{run_id[:NUM_MARK_CHARS]}-"
