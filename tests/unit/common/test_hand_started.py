"""Processes started by hand, without a launcher that passes folders and thread settings."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.allocator.settings import AllocatorSettings
from services.common.paths import STATE_DIR
from services.value_prior import server as value_prior
from services.value_prior.settings import ValuePriorSettings
from trainer.settings import WorkerSettings


def test_large_payloads_lie_in_one_folder_for_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shared = (tmp_path / "run" / "blobs").absolute()
    assert WorkerSettings().blob_folder == shared
    assert (AllocatorSettings().state_dir / "blobs").absolute() == shared
    assert value_prior.blob_folder(ValuePriorSettings()).absolute() == shared
    assert Path("run") == STATE_DIR


@pytest.mark.parametrize("module", ["trainer.worker", "trainer.api.__main__"])
def test_idle_threads_are_told_to_sleep_before_torch_loads(module: str):
    source = (
        "import sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        import os\n"
        "        if name == 'torch': assert os.environ.get('OMP_WAIT_POLICY') == 'PASSIVE'\n"
        "sys.meta_path.insert(0, Watch())\n"
        f"import os, {module}\n"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, env={"PATH": "/usr/bin:/bin"}, timeout=60)
