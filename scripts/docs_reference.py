"""Reference pages of the documentation that are written when the site is built: commands, gRPC, Python."""

from __future__ import annotations

import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

import decoding
from cli.main import app
from scripts.docs_catalogue import cell
from turnout.proto.generate import PROTO, ROOT

# Modules that a user of the client, and a writer of methods, imports from.
CLIENT = (
    *("turnout.client", "turnout.types", "turnout.calls", "turnout.errors", "turnout.structure", "turnout.tools"),
    *("turnout.cost", "turnout.registry", "turnout.config"),
)
METHOD_SIDE = ("decoding.model", "decoding.sequence", "decoding.tree", "decoding.parts", "decoding.fakes")

OURS = ".turnout.v1."
LABEL_REPEATED = FieldDescriptorProto.LABEL_REPEATED
# Numbers of fields in descriptor.proto, of which the places of comments are made.
MESSAGE, SERVICE, FIELD, NESTED = 4, 6, 2, 3


def pages() -> dict[str, str]:
    """Markdown by page."""
    return {"reference/cli.md": commands(), "reference/grpc.md": grpc(), **python_pages()}


def slot_bases() -> list[str]:
    """The module of every slot that says what its parts must be."""
    found = [f"decoding.{each.name}.base" for each in pkgutil.iter_modules(decoding.__path__) if each.ispkg]
    return [name for name in found if (ROOT / name.replace(".", "/")).with_suffix(".py").exists()] + ["router.base"]


def python_pages() -> dict[str, str]:
    """A page for each module, filled from its docstrings."""
    modules = (*CLIENT, *METHOD_SIDE, *slot_bases())
    return {f"reference/python/{name}.md": f"# `{name}`\n\n::: {name}\n" for name in modules}


def commands() -> str:
    """Every command with its options, as `--help` shows them."""
    head = "# Commands\n\nWhat `turnout --help` says, of every command. Exit codes: 0 done, 1 refused or failed, 2 the "
    head += "command line itself is wrong.\n"
    root = typer.main.get_command(app)
    return head + "".join(_command(root, "turnout", None))


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent)
    if parent is not None:
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        yield f"\n{'#' * (1 + name.count(' '))} `{name}`\n\n```text\n{usage}\n```\n\n{command.help or ''}\n\n"
    records = [param.get_help_record(context) for param in command.params]
    rows = [f"| `{cell(what)}` | {cell(_plain(meaning))} |\n" for what, meaning in filter(None, records)]
    yield from ("| option or argument | meaning |\n| --- | --- |\n", *rows) if rows and parent is not None else ()
    for below in getattr(command, "commands", {}).values():
        yield from _command(below, f"{name} {below.name}", context)


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").replace("_", "\\_")


def grpc() -> str:
    """The contract from its own file: services, messages and enums with their comments."""
    file = _descriptor()
    comments = {tuple(each.path): each for each in file.source_code_info.location}
    lead = (ROOT / PROTO).read_text(encoding="utf-8").partition("syntax =")[0].replace("// ", "").replace("//", "")
    yielded = [f"# gRPC\n\nPackage `{file.package}`, from `{PROTO}`. {lead}\n"]
    for i, service in enumerate(file.service):
        yielded.append(
            f"\n## Service `{service.name}`\n\n| call | takes | answers | meaning |\n| --- | --- | --- | --- |\n"
        )
        for j, call in enumerate(service.method):
            answer = ("stream of " if call.server_streaming else "") + _link(call.output_type)
            meaning = _comment(comments, (SERVICE, i, FIELD, j))
            yielded.append(f"| `{call.name}` | {_link(call.input_type)} | {answer} | {meaning} |\n")
    for i, message in enumerate(file.message_type):
        yielded += _message(message, message.name, (MESSAGE, i), comments)
    for enum in file.enum_type:
        yielded.append(f"\n## `{enum.name}` {{ #{_anchor(enum.name)} }}\n\n| value | number |\n| --- | --- |\n")
        yielded += [f"| `{value.name}` | {value.number} |\n" for value in enum.value]
    return "".join(yielded)


def _descriptor() -> FileDescriptorProto:
    import grpc_tools
    from grpc_tools import protoc

    includes = (ROOT, Path(grpc_tools.__file__).parent / "_proto")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "set.bin")
        arguments = ["protoc", *(f"--proto_path={each}" for each in includes), "--include_source_info"]
        if protoc.main([*arguments, f"--descriptor_set_out={out}", str(PROTO)]) != 0:
            raise RuntimeError(f"{PROTO} does not compile")
        return FileDescriptorSet.FromString(out.read_bytes()).file[0]


def _message(
    message: DescriptorProto, name: str, path: tuple[int, ...], comments: dict[tuple[int, ...], Any]
) -> Iterator[str]:
    if message.options.map_entry:
        return
    yield f"\n## `{name}` {{ #{_anchor(name)} }}\n\n{_comment(comments, path)}\n\n"
    if message.field:
        yield "| field | number | type | meaning |\n| --- | --- | --- | --- |\n"
    for i, field in enumerate(message.field):
        meaning = _comment(comments, (*path, FIELD, i))
        yield f"| `{field.name}` | {field.number} | {_type(field, message)} | {meaning} |\n"
    for i, below in enumerate(message.nested_type):
        yield from _message(below, f"{name}.{below.name}", (*path, NESTED, i), comments)


def _type(field: FieldDescriptorProto, owner: DescriptorProto) -> str:
    entry = next((each for each in owner.nested_type if field.type_name.endswith(f".{each.name}")), None)
    if entry is not None and entry.options.map_entry:
        return f"map of {_type(entry.field[0], entry)} to {_type(entry.field[1], entry)}"
    if field.type_name:
        kind = _link(field.type_name)
    else:
        kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == LABEL_REPEATED:
        return f"list of {kind}"
    group = owner.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    if field.proto3_optional:
        return f"{kind}, may be absent"
    return f"{kind}, one of `{group}`" if group else kind


def _link(type_name: str) -> str:
    if not type_name.startswith(OURS):
        return f"`{type_name.lstrip('.')}`"
    name = type_name.removeprefix(OURS)
    return f"[`{name}`](#{_anchor(name)})"


def _anchor(name: str) -> str:
    return name.lower().replace(".", "-")


def _comment(comments: dict[tuple[int, ...], Any], path: tuple[int, ...]) -> str:
    place = comments.get(path)
    text = f"{place.leading_comments} {place.trailing_comments}" if place is not None else ""
    return cell(" ".join(text.split())).replace("<", "&lt;")
