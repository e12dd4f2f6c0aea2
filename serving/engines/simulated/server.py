"""The simulated engine alone, without Ray: `python -m serving.engines.simulated.server --port 8100`.

For tests and cross-checks of load tools. It listens on 127.0.0.1 and prints its URL when it does.
It runs on asyncio's own event loop, so that `GET /tandem/engine/sent` gives the instants of the writes themselves.
"""

from __future__ import annotations

import asyncio
import socket

import click
import uvicorn
from pydantic import ValidationError

from serving.config import LaneConfig, SimulatedProfile
from serving.core.addresses import LOOPBACK
from serving.core.lane import Strategy
from serving.engines.engine_page import with_engine_page
from serving.engines.simulated.engine import SimulatedEngine
from serving.engines.steps.recorder import ReplicaLabels, StepRecorder

BACKLOG = 2048
DEFAULTS = {name: field.default for name, field in SimulatedProfile.model_fields.items()}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0: a free one.")
@click.option("--model", default="simulated", help="The name it serves.")
@click.option("--ttft-ms", type=float, default=DEFAULTS["ttft_ms"], help="To the first token of a request.")
@click.option("--step-ms", type=float, default=DEFAULTS["step_ms"], help="Between chunks.")
@click.option("--step-ms-per-request", type=float, default=DEFAULTS["step_ms_per_request"])
@click.option("--tokens-per-chunk", type=int, default=DEFAULTS["tokens_per_chunk"])
@click.option("--acceptance-rate", type=float, default=DEFAULTS["acceptance_rate"])
@click.option("--num-speculative-tokens", type=int, default=DEFAULTS["num_speculative_tokens"])
@click.option("--stall-after-tokens", type=int, default=DEFAULTS["stall_after_tokens"], help="0: no stall.")
@click.option("--stall-ms", type=float, default=DEFAULTS["stall_ms"])
@click.option("--seed", type=int, default=DEFAULTS["seed"], help="Of the acceptances.")
@click.option("--max-num-seqs", type=click.IntRange(1, 4096), default=256, help="Requests in a batch.")
@click.option("--max-model-len", type=click.IntRange(16), default=1_048_576)
def main(port: int, model: str, max_num_seqs: int, max_model_len: int, **profile: float) -> None:
    """Serve the OpenAI API with known times. It computes nothing: every word is simulated."""
    try:
        lane = LaneConfig(
            name="simulated",
            strategy=Strategy.BATCHED,
            engine="simulated",
            max_num_seqs=max_num_seqs,
            simulated=SimulatedProfile.model_validate(profile),
        )
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise click.UsageError("; ".join(faults)) from None
    try:
        listener = socket.create_server((LOOPBACK, port), backlog=BACKLOG)
    except OSError as error:
        raise click.UsageError(f"port {port} of {LOOPBACK}: {error.strerror} (--port)") from None
    asyncio.run(_serve(SimulatedEngine(lane, [model], max_model_len), listener))


async def _serve(engine: SimulatedEngine, listener: socket.socket) -> None:
    recorder = StepRecorder(engine.step_log, ReplicaLabels("simulated", "simulated", "batched", "simulated"))
    app = with_engine_page(await engine.start(), engine.tally, recorder)
    click.echo(
        f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    )  # connections wait in the backlog from here on
    try:
        await uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).serve([listener])
    finally:
        engine.close()


if __name__ == "__main__":
    main()
