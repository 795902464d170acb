"""The launcher passes only settings that the services know."""

from __future__ import annotations

import importlib

import pytest

from deploy.ports import Ports
from deploy.processes import STOP_ORDER, service_specs

SETTINGS = {
    "generation": ("services.generation.settings", "GenerationSettings"),
    "value_prior": ("services.value_prior.settings", "ValuePriorSettings"),
    "verifier": ("services.verifier.settings", "VerifierSettings"),
    "allocator": ("services.allocator.settings", "AllocatorSettings"),
    "api": ("trainer.settings", "ApiSettings"),
    "worker": ("trainer.settings", "WorkerSettings"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variable_names_a_setting_and_its_value_is_accepted(name, tmp_path, monkeypatch):
    module, cls = SETTINGS[name]
    settings = getattr(importlib.import_module(module), cls)
    spec = {s.name: s for s in service_specs(Ports(), redis_url="redis://127.0.0.1:7379/0", state_dir=tmp_path)}[name]
    prefix = settings.model_config["env_prefix"]
    passed = {key: value for key, value in spec.environment.items() if key.startswith("ROLLWISE_")}
    assert all(key.startswith(prefix) for key in passed)
    assert {key.removeprefix(prefix).lower() for key in passed} <= set(settings.model_fields)
    for key, value in passed.items():
        monkeypatch.setenv(key, value)
    assert settings().ready_file == spec.ready_file


def test_every_process_is_stopped_in_the_stated_order(tmp_path):
    specs = service_specs(Ports(), redis_url="redis://127.0.0.1:7379/0", state_dir=tmp_path)
    assert {spec.name for spec in specs} | {"redis"} == set(STOP_ORDER)
    assert STOP_ORDER[0] == "worker"
    assert STOP_ORDER[-1] == "redis"


def test_generation_and_trainer_share_the_cores_and_the_others_take_one(tmp_path):
    specs = service_specs(Ports(), redis_url="redis://127.0.0.1:7379/0", state_dir=tmp_path, threads=6)
    threads = {spec.name: spec.environment["OMP_NUM_THREADS"] for spec in specs}
    assert threads == {
        "generation": "6",
        "worker": "6",
        "value_prior": "1",
        "verifier": "1",
        "allocator": "1",
        "api": "1",
    }
