"""The contract's own lint: every service, method, message, field and enum is explained, and names are as is usual."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from turnout.proto.generate import PROTO, ROOT

SNAKE, CAMEL = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*"), re.compile(r"([A-Z][a-z0-9]+)+")
MESSAGES, ENUMS, SERVICES, FIELDS, METHODS, NESTED = 4, 5, 6, 2, 2, 3


def described(text: str, folder: Path) -> FileDescriptorProto:
    """A contract with its comments."""
    (folder / "one.proto").write_text(text, encoding="utf-8")
    out = folder / "set"
    include = Path(protoc.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{folder}", f"-I{include}", "--include_source_info", f"-o{out}", "one.proto"]
    assert protoc.main(arguments) == 0
    [file] = FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def faults(file: FileDescriptorProto) -> list[str]:
    """What is not explained, or not named as is usual."""
    explained = {
        tuple(place.path)
        for place in file.source_code_info.location
        if place.leading_comments.strip() or place.trailing_comments.strip()
    }
    found = [] if re.fullmatch(r"[a-z]+\.v[1-9]\d*", file.package) else [f"package {file.package} has no version"]

    def look(path: tuple[int, ...], name: str, usual: re.Pattern[str], comment: bool = True) -> None:
        if comment and path not in explained:
            found.append(f"{name} has no comment")
        if not usual.fullmatch(name.rpartition(".")[2]):
            found.append(f"{name} is named otherwise than is usual")

    def look_into(message: DescriptorProto, path: tuple[int, ...], name: str) -> None:
        look(path, name, CAMEL)
        for place, field in enumerate(message.field):
            look((*path, FIELDS, place), f"{name}.{field.name}", SNAKE)
        for place, inner in enumerate(message.nested_type):
            if not inner.options.map_entry:
                look_into(inner, (*path, NESTED, place), f"{name}.{inner.name}")

    for place, message in enumerate(file.message_type):
        look_into(message, (MESSAGES, place), message.name)
    for place, enum in enumerate(file.enum_type):
        look((ENUMS, place), enum.name, CAMEL)
        first = enum.value[0].name
        if not first.endswith("_UNSPECIFIED"):
            found.append(f"{enum.name} begins with {first}: absent must not mean something")
    for place, service in enumerate(file.service):
        look((SERVICES, place), service.name, CAMEL)
        for number, method in enumerate(service.method):
            look((SERVICES, place, METHODS, number), f"{service.name}.{method.name}", CAMEL)
    return found


def test_everything_in_the_contract_is_explained(tmp_path: Path) -> None:
    assert faults(described((ROOT / PROTO).read_text(encoding="utf-8"), tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("package a;", "package a has no version"),
        ("package a.v1; message M {}", "M has no comment"),
        ("package a.v1;\n// M.\nmessage M {\n  int64 a = 1;\n}", "M.a has no comment"),
        ("package a.v1;\n// M.\nmessage M {\n  int64 aB = 1;  // a\n}", "M.aB is named otherwise than is usual"),
        ("package a.v1;\n// E.\nenum E {\n  ONE = 0;\n}", "E begins with ONE: absent must not mean something"),
        ("package a.v1;\n// M.\nmessage M {}\n// S.\nservice S {\n  rpc R(M) returns (M);\n}", "S.R has no comment"),
    ],
)
def test_what_is_not_is_found(tmp_path: Path, text: str, fault: str) -> None:
    assert fault in faults(described('syntax = "proto3";\n' + text, tmp_path))
