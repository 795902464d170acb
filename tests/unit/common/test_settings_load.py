from pathlib import Path

import pytest
from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict

from services.common.settings import Port, ServiceSettings, load_settings


class ProbeSettings(ServiceSettings):
    """A service for these tests."""

    model_config = SettingsConfigDict(env_prefix="ROLLWISE_PROBE_")
    port: Port = Field(7999, description="gRPC port.")
    layers: list[int] = Field(default_factory=list, description="Layers.")
    eager: bool = Field(False, description="Whether.")
    folder: Path = Field(Path("there"), description="Where 100% of it is.")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        load_settings(ProbeSettings, argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_flag_wins_over_a_variable_which_wins_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(ProbeSettings, []).port == 7999
    monkeypatch.setenv("ROLLWISE_PROBE_PORT", "1234")
    assert load_settings(ProbeSettings, []).port == 1234
    assert load_settings(ProbeSettings, ["--port", "0"]).port == 0


def test_flags_of_every_type_are_understood() -> None:
    settings = load_settings(
        ProbeSettings, ["--layers", "1,2", "--eager", "true", "--folder", "/x", "--metrics-port", "none"]
    )
    assert (settings.layers, settings.eager, settings.folder, settings.metrics_port) == ([1, 2], True, Path("/x"), None)
    assert load_settings(ProbeSettings, ["--layers", "[3]"]).layers == [3]


def test_a_misspelt_variable_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLWISE_PROBE_PROT", "1")
    error = refused(capsys)
    assert "ROLLWISE_PROBE_PROT" in error
    assert "did you mean ROLLWISE_PROBE_PORT?" in error


def test_variables_of_other_services_are_no_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWISE_OTHER_THING", "1")
    monkeypatch.setenv("ROLLWISE_CACHE", "/tmp")
    assert load_settings(ProbeSettings, []).port == 7999


def test_a_misspelt_flag_is_refused_with_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --log-level?" in refused(capsys, "--log-levle", "info")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--port", "70000"], "--port (ROLLWISE_PROBE_PORT) = '70000'"),
        (["--port", "x"], "--port"),
        (["--redis-url", "http://x"], "--redis-url"),
        (["--log-level", "loud"], "--log-level"),
        (["--auth-token-file", "/nowhere/token"], "auth_token_file: cannot read /nowhere/token"),
        (["--tls-cert", "/nowhere/cert"], "tls_cert and tls_key belong together"),
    ],
)
def test_a_bad_value_names_its_setting(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in refused(capsys, *argv)


def test_a_bad_variable_names_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ROLLWISE_PROBE_GRACE_SECONDS", "-1")
    assert "ROLLWISE_PROBE_GRACE_SECONDS" in refused(capsys)
    monkeypatch.delenv("ROLLWISE_PROBE_GRACE_SECONDS")
    monkeypatch.setenv("ROLLWISE_PROBE_LAYERS", "not json")
    assert "layers" in refused(capsys)


def test_the_token_comes_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    settings = load_settings(ProbeSettings, ["--auth-token-file", str(file)])
    assert settings.token == "s3cret"
    assert "s3cret" not in repr(settings)
    with pytest.raises(ValidationError, match="differ"):
        ProbeSettings(auth_token="other", auth_token_file=file)  # type: ignore[arg-type]


def test_an_empty_token_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text("\n")
    assert "is empty" in refused(capsys, "--auth-token-file", str(file))


def test_help_lists_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_settings(ProbeSettings, ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, field in ProbeSettings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert field.description, f"{name} has no description"
    assert "100%" in text
