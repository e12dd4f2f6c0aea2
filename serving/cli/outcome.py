"""How a verb ends: in a word on stderr and an exit code, whether it did its work or raised an error."""

from __future__ import annotations

from typing import Any, NoReturn

import click

from serving.core.errors import AlreadyRunningError, ConfigError, NotRunningError, TandemError
from serving.core.exit_codes import ExitCode


class Verbs(click.Group):
    """Turns Tandem's errors into a line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TandemError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(_exit_code(error))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(ExitCode.INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _exit_code(error: TandemError) -> ExitCode:
    if isinstance(error, ConfigError):
        return ExitCode.USAGE
    if isinstance(error, NotRunningError):
        return ExitCode.NOT_RUNNING
    if isinstance(error, AlreadyRunningError):
        return ExitCode.ALREADY_RUNNING
    return ExitCode.FAILED


def end(code: int) -> NoReturn:
    """End the verb that runs."""
    click.get_current_context().exit(code)


def say_err(text: str) -> None:
    """Say a line on stderr; what a verb was asked for goes to stdout alone."""
    click.echo(text, err=True)
