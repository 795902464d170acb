"""The `rollwise` command: a client of the services like any other, over HTTP and gRPC."""
