"""`make crosscheck`: this load tool and three others against an engine that stamps what it sends.

Exit codes: 0 each of our figures is within tolerance of what was sent, 1 not so, 2 wrong usage.
"""

from __future__ import annotations

import sys

import click

from loadtest.crosscheck.figures import QUANTITIES
from loadtest.crosscheck.run import Measured, NotMeasured, OfferedStreams, Profile, measure
from loadtest.crosscheck.table import closest, figures_table, names_table, outside_tolerance
from loadtest.crosscheck.tools import tools
from serving import model_store
from serving.core.errors import ConfigError
from serving.core.exit_codes import ExitCode

PROFILES = (Profile(tokens_per_chunk=1), Profile(tokens_per_chunk=4))
MAX_REQUESTS = 500  # the engine remembers the last 512 streams
TOOL_NAMES = [tool.name for tool in tools()]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rate", type=click.FloatRange(0.1, 100), default=4, help="Requests/s, Poisson.")
@click.option(
    "--requests", type=click.IntRange(2, MAX_REQUESTS), default=80, help="Of each tool, per profile."
)
@click.option("--output-tokens", type=click.IntRange(2, 4096), default=64)
@click.option("--prompt-tokens", type=click.IntRange(1, 4096), default=64)
@click.option("--seed", type=click.IntRange(0), default=1)
@click.option("--tool", "chosen", multiple=True, type=click.Choice(TOOL_NAMES), help="Only these, and ours.")
def main(
    rate: float, requests: int, output_tokens: int, prompt_tokens: int, seed: int, chosen: tuple[str, ...]
) -> None:
    """Measure one simulated engine with several load tools, each next to what was really sent."""
    try:
        tokenizer = model_store.resolve("auto")
    except ConfigError as error:
        raise click.UsageError(f"the tools need the default model's tokenizer: {error}") from None
    offered = OfferedStreams(rate, requests, output_tokens, prompt_tokens, seed)
    faults: list[str] = []
    for profile in PROFILES:
        results: list[Measured | NotMeasured] = []
        for tool in tools():
            if not chosen or tool.name in (*chosen, TOOL_NAMES[0]):
                click.echo(f"{profile.title}: {tool.name}", err=True)
                results.append(measure(tool, profile, offered, tokenizer))
        click.echo(
            f"\n{profile.title}; {requests} requests of {output_tokens} tokens, Poisson {rate:g} requests/s, "
            f"seed {seed}\n\n{figures_table(results)}\n\n{names_table(results)}\n"
        )
        faults += _faults(profile, results)
    click.echo(
        "\n".join(faults)
        or "tandem: each figure is within tolerance of what was sent, and the closest or a tie"
    )
    sys.exit(ExitCode.FAILED if any(": outside tolerance: " in fault for fault in faults) else ExitCode.OK)


def _faults(profile: Profile, results: list[Measured | NotMeasured]) -> list[str]:
    """What is to be said against our own figures."""
    ours = results[0]
    if isinstance(ours, NotMeasured):
        return [f"{profile.title}: outside tolerance: tandem not measured, {ours.reason}"]
    measured = [result for result in results if isinstance(result, Measured)]
    beaten = [quantity for quantity in QUANTITIES if ours.tool not in closest(measured, quantity)]
    return [
        *(f"{profile.title}: outside tolerance: {fault}" for fault in outside_tolerance(ours)),
        *(f"{profile.title}: another tool is closer: {quantity}" for quantity in beaten),
    ]


if __name__ == "__main__":
    main()
