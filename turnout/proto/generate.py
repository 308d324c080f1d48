"""Regenerate the committed gRPC code: `python -m turnout.proto.generate [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTO = Path("turnout/proto/generation.proto")
OUTPUTS = ("generation_pb2.py", "generation_pb2.pyi", "generation_pb2_grpc.py")


def generate(root: Path = ROOT) -> None:
    """Write the generated files into `root/turnout/proto`, importable as `turnout.proto.*`.

    Raises:
        RuntimeError: the compiler refused the .proto file.
    """
    import grpc_tools
    from grpc_tools import protoc

    arguments = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={root}",
        f"--pyi_out={root}",
        f"--grpc_python_out={root}",
        str(PROTO),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"{PROTO} does not compile")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
