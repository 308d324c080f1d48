"""The serving layer: gRPC and OpenAI-compatible HTTP over Ray Serve, from one configuration."""
