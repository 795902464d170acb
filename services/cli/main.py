"""The `rollwise` command. Modules that need a model are imported by the command that uses them, not here."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from services.cli.demo import demo
from services.cli.doctor import doctor
from services.cli.jobs import cancel, jobs
from services.cli.output import FAILED, INTERRUPTED, CliError, UsageProblem, print_error, stderr
from services.cli.replay import replay
from services.cli.report import report
from services.cli.score import score
from services.cli.submit import evaluate, resume, submit
from services.cli.up import up
from services.cli.verify import verify
from services.cli.watch import watch

_PREFIX = "ROLLWISE_CLI_"
VARIABLES = (
    "ROLLWISE_CLI_API_URL",
    "ROLLWISE_CLI_AUTH_TOKEN",
    "ROLLWISE_CLI_DEBUG",
    "ROLLWISE_CLI_VALUE_PRIOR_URL",
    "ROLLWISE_CLI_VERIFIER_TARGET",
)

app = typer.Typer(
    name="rollwise",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    help="Post-train language models by reinforcement learning, and spend rollouts wisely.\n\n"
    "First steps: [bold]rollwise demo[/] runs everything once. [bold]rollwise up[/] starts the services and keeps them "
    "running; then [bold]rollwise submit[/] a job and [bold]rollwise watch[/] it.\n\n"
    "Exit codes: 0 fine, 1 job or check failed, 2 wrong usage or input, 3 a service is out of reach, 130 Ctrl-C.",
)

_PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Start": {"demo": demo, "up": up, "doctor": doctor},
    "Jobs": {
        "submit": submit,
        "eval": evaluate,
        "jobs": jobs,
        "watch": watch,
        "cancel": cancel,
        "resume": resume,
        "report": report,
    },
    "Tools": {"score": score, "verify": verify, "replay": replay},
}
for _panel, _commands in _PANELS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", envvar="ROLLWISE_CLI_DEBUG")] = False,
) -> None:
    if debug:
        os.environ["ROLLWISE_CLI_DEBUG"] = "1"
    refuse_unknown_variables(os.environ)


def refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Raises UsageProblem for a variable with this command's prefix that it does not read: a slip is not ignored."""
    for variable in sorted(environment):
        if variable.startswith(_PREFIX) and variable not in VARIABLES:
            close = difflib.get_close_matches(variable, VARIABLES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(VARIABLES)}"
            raise UsageProblem(f"unknown environment variable {variable}", hint)


def main() -> None:
    """Entry point: runs the command and exits with a code that mirrors the outcome."""
    try:
        app()
    except CliError as error:
        _trace()
        print_error(error)
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except Exception as error:  # noqa: BLE001 -- the last place where a fault can still be told in one line
        _trace()
        print_error(CliError(f"{type(error).__name__}: {error}", "run `rollwise --debug ...` and report what it shows"))
        sys.exit(FAILED)


def _trace() -> None:
    if os.environ.get("ROLLWISE_CLI_DEBUG"):
        stderr.print(traceback.format_exc(), highlight=False, markup=False)


if __name__ == "__main__":
    main()
