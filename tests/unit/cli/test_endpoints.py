"""How commands find the running stack, and that ports are checked before anything starts."""

from __future__ import annotations

import os
import socket

import pytest

from deploy import endpoints as places
from deploy.endpoints import Endpoints, find
from deploy.ports import PortInUse, Ports, option_of, resolve

VARIABLE = "ROLLWISE_CLI_API_URL"


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(VARIABLE, raising=False)


def endpoints(tmp_path, **changes) -> Endpoints:
    values = {
        "launcher_pid": os.getpid(),
        "launcher_started": places.own_start_time(),
        "state_dir": str(tmp_path / "run"),
        "logs": str(tmp_path / "run" / "logs"),
        "api_url": "http://127.0.0.1:21000",
        "value_prior_url": "http://127.0.0.1:21001",
        "redis_url": "redis://127.0.0.1:21002/0",
        "targets": {"verifier": "127.0.0.1:21003"},
        "metrics": {},
        "pids": {"api": 1},
    }
    return Endpoints(**{**values, **changes})


def test_option_goes_before_environment_before_running_stack_before_default(tmp_path, monkeypatch):
    assert find(None, VARIABLE, "api_url", "http://default") == "http://default"
    places.publish(endpoints(tmp_path))
    assert find(None, VARIABLE, "api_url", "http://default") == "http://127.0.0.1:21000"
    assert find(None, "ROLLWISE_CLI_VERIFIER_TARGET", "verifier", "none") == "127.0.0.1:21003"
    monkeypatch.setenv(VARIABLE, "http://env/")
    assert find(None, VARIABLE, "api_url", "http://default") == "http://env"
    assert find("http://option", VARIABLE, "api_url", "http://default") == "http://option"


def test_a_stack_whose_launcher_is_gone_is_not_found(tmp_path):
    places.publish(endpoints(tmp_path, launcher_started=1.0))  # same pid, other process
    assert places.read(places.user_file()) is not None
    assert places.running_stack() is None


def test_a_second_stack_does_not_take_the_users_file_from_a_living_one(tmp_path):
    first = endpoints(tmp_path)
    places.publish(first)
    second = endpoints(
        tmp_path, launcher_pid=1, launcher_started=1.0, api_url="http://other", state_dir=str(tmp_path / "b")
    )
    places.publish(second)
    assert places.running_stack() == first
    places.withdraw(second)
    assert places.running_stack() == first
    places.withdraw(first)
    assert places.running_stack() is None
    assert not (tmp_path / "run" / places.FILE_NAME).exists()


def test_a_torn_file_counts_as_none(tmp_path):
    places.user_file().parent.mkdir(parents=True)
    places.user_file().write_text('{"launcher_pid": 1')
    assert places.running_stack() is None


def test_ports_in_use_are_all_named_with_their_options():
    with socket.socket() as one, socket.socket() as two:
        for taken in (one, two):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
        api, redis = one.getsockname()[1], two.getsockname()[1]
        free = resolve(Ports.any_free()).as_dict()
        with pytest.raises(PortInUse) as caught:
            resolve(Ports(**{**free, "api": api, "redis": redis}))
    text = str(caught.value)
    assert f"{api} (api)" in text
    assert f"{redis} (redis)" in text
    assert "--api-port" in text
    assert "--redis-port" in text


def test_one_port_wanted_twice_is_refused():
    with pytest.raises(PortInUse, match="wanted twice, by --generation-port and --verifier-port"):
        resolve(Ports(generation=29999, verifier=29999))


def test_free_ports_are_all_different():
    ports = resolve(Ports.any_free()).as_dict()
    assert len(set(ports.values())) == len(ports)
    assert all(ports.values())


def test_every_port_has_its_option():
    import inspect

    from services.cli.up import up

    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(up).parameters}
    assert {option_of(name) for name in Ports().as_dict()} <= options
