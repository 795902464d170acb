"""Build hook: makes package `rollwise.v1` (messages, gRPC stubs, type stubs) from protos/ with the pinned grpcio-tools.

The stubs are never committed. An editable install imports them from generated/, a wheel carries them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _plugin(name: str) -> str:
    """Path of a protoc plugin that was installed beside grpcio-tools."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise RuntimeError(f"{name} is not installed: install [build-system].requires of pyproject.toml")
    return found


def generate(root: Path) -> Path:
    """Compiles every proto under `root`/protos into `root`/generated and returns that folder."""
    import grpc_tools

    protos, out = root / "protos", root / "generated"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={protos}",
        f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy')}",
        f"--mypy_out={out}",
        f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc')}",
        f"--mypy_grpc_out={out}",
        *sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto")),
    ]
    subprocess.run(command, check=True, cwd=protos, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    for package in (out / "rollwise", out / "rollwise" / "v1"):
        (package / "__init__.py").write_text('"""Generated from protos/ at install time; do not edit."""\n')
    (out / "rollwise" / "py.typed").touch()
    return out


class ProtoBuildHook(BuildHookInterface[Any]):
    """Called by hatchling for editable installs and wheels alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generates the stubs, and puts them into the wheel unless the install is editable."""
        if self.target_name != "wheel":
            return
        out = generate(Path(self.root))
        if version != "editable":
            build_data["force_include"][str(out / "rollwise")] = "rollwise"
