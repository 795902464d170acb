"""What every process shares: settings, gRPC and Redis plumbing, telemetry. It knows nothing of RL."""
