"""Wires the engine to a gRPC server, and ends the process when the engine dies."""

from __future__ import annotations

from pathlib import Path

import torch
from rollwise.v1 import generation_pb2, generation_pb2_grpc

from services.common.errors import ConfigurationError, Internal, InvalidArgument
from services.common.grpc_server import GrpcServer
from services.common.lifecycle import Background
from services.generation.scheduler import Limits
from services.generation.servicer import GenerationServicer
from services.generation.settings import GenerationSettings
from services.generation.transformers_engine import TransformersEngine

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


def build_engine(settings: GenerationSettings) -> TransformersEngine:
    """The engine that the settings describe; not started."""
    return TransformersEngine(
        Limits(
            max_rows=settings.max_rows,
            max_batch_tokens=settings.max_batch_tokens,
            max_waiting=settings.max_waiting,
            max_prefill_tokens=settings.max_prefill_tokens,
            prefix_cache_tokens=settings.prefix_cache_tokens,
        ),
        model=_initial_folder(settings.model),
        memory=settings.state_dir / "generation" / "current.json",
        dtype=getattr(torch, settings.dtype),
        device=settings.device,
        threads=settings.threads,
        feature_layer=settings.feature_layer,
        pack=settings.pack_weights,
    )


async def serve(settings: GenerationSettings) -> None:
    """Serve until a signal; raises Internal when the engine dies, so that the process ends with a failure."""
    engine = build_engine(settings)
    try:
        await engine.start()
    except InvalidArgument as error:
        await engine.close()
        raise ConfigurationError(f"--model {settings.model}: {error.message}", reason=error.reason) from error

    async def healthy() -> str | None:
        return engine.failure()

    server = GrpcServer(
        settings,
        name="generation",
        register=lambda target: generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(engine), target
        ),
        service_names=[SERVICE_NAME],
        healthy=healthy,
    )

    async def watch() -> None:
        raise Internal(f"the generation engine died: {await engine.wait_failed()}", reason="ENGINE_DEAD")

    try:
        async with Background() as background:
            background.start("engine-watch", watch())
            await server.run_until_signal()
    finally:
        await server.stop(0)
        await engine.close()


def _initial_folder(model: str | None) -> Path | None:
    if model is None:
        return None
    if model == "smollm2":
        from services.common.models import smollm2_folder

        return smollm2_folder()
    return Path(model).expanduser()
