"""Settings of a process: environment variables and command-line flags, checked before anything starts."""

import argparse
import difflib
import json
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar

from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

S = TypeVar("S", bound="ServiceSettings")
Port = Annotated[int, Field(ge=0, le=65535)]
ExpandedPath = Annotated[Path, AfterValidator(lambda path: path.expanduser())]


class ServiceSettings(BaseSettings):
    """What every process of Rollwise can be told. A service derives from this and sets its `env_prefix`."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix="ROLLWISE_", validate_default=True)

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; loopback unless told otherwise.")
    port: Port = Field(0, description="gRPC port; 0 takes any free one.")
    metrics_port: Port | None = Field(None, description="Port of /metrics; 0 takes any free one, 'none' serves none.")
    redis_url: str = Field(
        "redis://127.0.0.1:7379/0", pattern="^(redis|rediss|unix)://", description="Redis or Valkey: the queue."
    )
    auth_token: SecretStr | None = Field(
        None, min_length=1, description="Token that calls must carry; better given as a file."
    )
    auth_token_file: ExpandedPath | None = Field(None, description="File with the token that calls must carry.")
    tls_cert: ExpandedPath | None = Field(None, description="PEM certificate chain; serves and connects with TLS.")
    tls_key: ExpandedPath | None = Field(None, description="PEM private key of the certificate.")
    tls_ca: ExpandedPath | None = Field(
        None, description="PEM roots to trust; a server with them wants a certificate from its clients."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What to log.")
    log_format: Literal["json", "console"] = Field("json", description="How to log, always on stderr.")
    grace_seconds: float = Field(10.0, ge=0, description="Time for calls in progress after SIGTERM.")
    ready_file: ExpandedPath | None = Field(
        None, description="File to write the ports to, as JSON, once the process serves."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.auth_token_file is not None:
            text = _read(self.auth_token_file, "auth_token_file").strip()
            if not text:
                raise ValueError(f"auth_token_file: {self.auth_token_file} is empty")
            if self.auth_token is not None and self.auth_token.get_secret_value() != text:
                raise ValueError("auth_token and auth_token_file are both set and differ; keep one")
            self.auth_token = SecretStr(text)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both or neither")
        for name in ("tls_cert", "tls_key", "tls_ca"):
            path = getattr(self, name)
            if path is not None:
                _read(path, name)
        return self

    @property
    def token(self) -> str | None:
        """The token that calls must carry, from wherever it was given; None when calls need none."""
        return None if self.auth_token is None else self.auth_token.get_secret_value()


def load_settings(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """Read a process's settings: flags first, then environment variables, then defaults.

    On `--help` it prints every setting and exits 0. On anything wrong (unknown flag, unknown variable with the
    service's prefix, bad value) it prints what and how to fix it on stderr and exits 2.

    Args:
        cls: The service's settings class; its `env_prefix` names its environment variables.
        argv: Command-line arguments without the program's name; None takes those of this process.
    """
    prefix = str(cls.model_config.get("env_prefix") or "")
    parser = _parser(cls, prefix)
    known, unknown = parser.parse_known_args(argv)
    flags = [action.option_strings[0] for action in parser._actions if action.option_strings]
    for argument in unknown:
        hint = _did_you_mean(argument.split("=")[0], flags) if argument.startswith("-") else ""
        _refuse(parser, f"unknown argument {argument}{hint}")
    problems = unknown_variables(cls, os.environ)
    if problems:
        _refuse(parser, "\n  ".join(problems))
    try:
        given = {name: _parse_value(cls, name, text) for name, text in vars(known).items()}
        return cls(**given)
    except ValidationError as error:
        _refuse(parser, "\n  ".join(_describe(cls, prefix, problem) for problem in error.errors()))
    except Exception as error:  # noqa: BLE001 - pydantic-settings wraps a bad variable in its own error; all mean "bad input"
        _refuse(parser, str(error))


def unknown_variables(cls: type[ServiceSettings], environment: Mapping[str, str]) -> list[str]:
    """Return one sentence for each variable that has the service's prefix and names no setting of it."""
    prefix = str(cls.model_config.get("env_prefix") or "").upper()
    nested = cls.model_config.get("env_nested_delimiter")
    names = {(prefix + name).upper() for name in cls.model_fields}
    problems = []
    for variable in sorted(environment):
        upper = variable.upper()
        if not prefix or not upper.startswith(prefix) or upper in names:
            continue
        if nested and any(upper.startswith(name + nested.upper()) for name in names):
            continue
        problems.append(f"unknown environment variable {variable}{_did_you_mean(upper, sorted(names))}")
    return problems


def _parser(cls: type[ServiceSettings], prefix: str) -> argparse.ArgumentParser:
    package = sys.modules[cls.__module__].__package__ or cls.__module__
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description=(cls.__doc__ or "").strip(),
        epilog=f"Each flag has an environment variable: --log-level is {prefix}LOG_LEVEL. A flag wins.",
        allow_abbrev=False,
    )
    for name, field in cls.model_fields.items():
        default = field.get_default(call_default_factory=False)
        shown = "" if default is None or field.is_required() else f" (default: {default})"
        text = f"{field.description or ''}{shown}".replace("%", "%%")
        parser.add_argument(
            "--" + name.replace("_", "-"), dest=name, default=argparse.SUPPRESS, metavar=name.upper(), help=text
        )
    return parser


def _parse_value(cls: type[ServiceSettings], name: str, text: str) -> Any:
    annotation = cls.model_fields[name].annotation
    if text.lower() == "none" and type(None) in typing.get_args(annotation):
        return None
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    containers = (list, tuple, dict, set, frozenset)
    if any(option in containers or typing.get_origin(option) in containers for option in options):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _describe(cls: type[ServiceSettings], prefix: str, problem: Any) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    field = cls.model_fields.get(name)
    secret = field is not None and "Secret" in str(field.annotation)
    value = "" if secret or problem["type"] == "missing" else f" = {problem['input']!r}"
    return f"--{name.replace('_', '-')} ({(prefix + name).upper()}){value}: {message}"


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _read(path: Path, name: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    sys.stderr.write(f"{parser.prog}: cannot start:\n  {message}\nSee --help for every setting.\n")
    raise SystemExit(2)
