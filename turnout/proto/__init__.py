"""The gRPC contract (`generation.proto`) and the code generated from it by `generate.py`."""
