"""`turnout cache`: look into the shared prefix store, remove from it, and register what tenants share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import read_config
from cli.output import print_json, print_table
from cli.provenance import quantity
from turnout.errors import Code, TurnoutError, invalid
from turnout.standard_streams import read_stdin

if TYPE_CHECKING:
    from kvstore.admin import Report, StoreAdmin
    from kvstore.tenants.registry import Prefix
    from turnout.config import TurnoutConfig
    from turnout.types import SharingPolicy

app = typer.Typer(help="Look into the shared prefix store, empty it, register shared prefixes.", no_args_is_help=True)

Config = Annotated[Path | None, typer.Option(help="Configuration file with the store's address and the tenants.")]
Url = Annotated[str, typer.Option(help="Address of the store, instead of kvstore.url.")]
KeyFile = Annotated[Path | None, typer.Option(help="File with its root key, instead of kvstore.root_key_file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TextFile = Annotated[Path | None, typer.Option("--text", help="File with the prefix as text; - reads it from here.")]
TokenFile = Annotated[Path | None, typer.Option("--tokens", help="File with its token ids, as a JSON list.")]
Remove = Annotated[bool, typer.Option("--remove", help="Take back what was registered under this name.")]
Name = Annotated[str, typer.Argument(help="What it is called from now on.")]


@app.command()
def stats(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    config: Config = None,
    url: Url = "",
    root_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what the store holds, by namespace, and what each tenant asked for and found.

    Servers add to the tenants' accounts every few seconds. `gone` is the share of a sample that Redis evicted.
    """
    with _open(read_config(config), url, root_key_file) as desk:
        report = desk.report(tenant)
    if as_json:
        print_json(report)
    else:
        _show(report)


@app.command()
def flush(
    tenant: Annotated[str | None, typer.Option(help="Remove what this tenant holds.")] = None,
    group: Annotated[str | None, typer.Option(help="Remove what this group holds.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Remove the chunks of public prefixes.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Remove all of it.")] = False,
    config: Config = None,
    url: Url = "",
    root_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove chunks from Redis; prompts are computed anew then.

    What servers hold in their own memory stays until it is pushed out. Registered prefixes stay registered.
    """
    if sum((tenant is not None, group is not None, public, everything)) != 1:
        raise invalid("flush", "say what to remove: exactly one of --tenant, --group, --public and --all")
    with _open(read_config(config), url, root_key_file) as desk:
        from kvstore.tenants.registry import PUBLIC

        if tenant is not None:
            namespaces = [each for each in desk.of_tenant(tenant) if each.policy == "private"]
        elif group is not None:
            namespaces = [desk.of_group(group)]
        else:
            namespaces = desk.namespaces() if everything else [PUBLIC]
        removed = desk.flush(namespaces)
    if as_json:
        print_json({"removed": removed})
    else:
        typer.echo(f"removed {removed} values")


@app.command()
def pin(
    name: Name,
    tenant: Annotated[str, typer.Option(help="Whose prompts begin with it.")] = "default",
    text: TextFile = None,
    tokens: TokenFile = None,
    remove: Remove = False,
    config: Config = None,
    url: Url = "",
    root_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Keep the chunks of a tenant's prefix from expiring; who may use them does not change.

    They are those of where the tenant's are now, by its entry in the tenants file, else by kvstore.tenants: when the
    entry comes to say something else, pin again. At least one of them must be there. They still count towards the
    quota, and go when it is exceeded.
    """
    settings = read_config(config)
    with _open(settings, url, root_key_file) as desk:
        if remove:
            _removed(desk.unregister(name), as_json)
            return
        prefix = replace(
            _prefix(name, "private", tenant, text, tokens, settings), sharing=_sharing_of(tenant, settings)
        )
        if not prefix.tokens:
            raise invalid("text", "no tokenizer of the configuration's pools is at hand; give --config with the models")
        kept = desk.pin(prefix)
    if as_json:
        print_json({"name": name, "tenant": tenant, "kept": kept})
    else:
        typer.echo(f"{name}: {kept} values of tenant {tenant} are kept")


@app.command("register-public")
def register_public(
    name: Name,
    text: TextFile = None,
    tokens: TokenFile = None,
    group: Annotated[str | None, typer.Option(help="Share it within this group only.")] = None,
    remove: Remove = False,
    config: Config = None,
    url: Url = "",
    root_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Let all tenants (or a group's) share the chunks of prompts that begin with this text.

    A client can infer from the latency that a registered prefix was used lately: register nothing that
    is a secret. Servers know of it within seconds. A system prompt is registered as the chat template writes it.
    """
    settings = read_config(config)
    with _open(settings, url, root_key_file) as desk:
        if remove:
            _removed(desk.unregister(name), as_json)
            return
        policy, whose = ("public", "") if group is None else ("group", group)
        prefix = desk.register(_prefix(name, policy, whose, text, tokens, settings))
    length = max(map(len, prefix.tokens.values()), default=0)
    if as_json:
        print_json({"name": name, "policy": policy, "group": group, "tokens": length})
    else:
        typer.echo(f"{name}: {length} tokens, shared by {'everybody' if group is None else f'group {group}'}")


@contextmanager
def _open(config: TurnoutConfig, url: str, root_key_file: Path | None) -> Iterator[StoreAdmin]:
    """The configured store, or the one that the options name.

    Raises:
        TurnoutError: none is named, it does not answer, or it has another root key.
    """
    from kvstore.admin import StoreAdmin
    from kvstore.base import StoreFault
    from kvstore.opening import address_of, open_keyring
    from kvstore.redis.checks import check_address
    from kvstore.redis.redis_store import RedisStore
    from turnout.kvstore_config import KVStoreConfig
    from turnout.registry import validated

    values = config.kvstore.model_dump()
    values.update({"url": url} if url else {})
    values.update({"root_key_file": str(root_key_file)} if root_key_file is not None else {})
    settings = validated(KVStoreConfig, values, "kvstore")
    if not settings.has_address:
        raise invalid("url", "no store is named; give --config with kvstore.url, or --url and --root-key-file")
    address = address_of(settings)
    checked = check_address(address)
    if not checked.reachable:
        raise TurnoutError(Code.UNAVAILABLE, f"url: no store answers at {address}", "url")
    store = RedisStore(address)
    try:
        yield StoreAdmin(settings, store, open_keyring(settings))
    except StoreFault as fault:
        raise TurnoutError(Code.UNAVAILABLE, f"url: the store at {address} does not answer: {fault}", "url") from None
    finally:
        store.close()


def _prefix(
    name: str, policy: str, whose: str, text: Path | None, tokens: Path | None, config: TurnoutConfig
) -> Prefix:
    """A prefix from a file, with the token ids of every tokenizer in the configuration.

    Raises:
        TurnoutError: there is not exactly one file, or it cannot be read or holds something else.
    """
    from kvstore.tenants.registry import Prefix

    if (text is None) == (tokens is None):
        raise invalid("text", "give the prefix in exactly one of --text and --tokens")
    if text is not None:
        content = _read(text, "text")
        if not content.strip():
            raise invalid("text", f"{text} holds no text")
        ids = {digest: tuple(encode(content)) for digest, encode in _tokenizers(config)}
        return Prefix(name, policy, whose, ids, content)
    assert tokens is not None
    try:
        given = json.loads(_read(tokens, "tokens"))
    except ValueError:
        given = None
    if not isinstance(given, list) or not given or not all(type(each) is int and each >= 0 for each in given):
        raise invalid("tokens", f"{tokens} must hold a JSON list of token ids")
    return Prefix(name, policy, whose, {digest: tuple(given) for digest, _ in _tokenizers(config)})


def _sharing_of(tenant: str, config: TurnoutConfig) -> SharingPolicy | None:
    """With whom the tenants file has a tenant share; None: it does not say, or there is none.

    Raises:
        TurnoutError: the file cannot be read.
    """
    from deployments.access.tenants_file import read_tenants

    file = config.access.tenants_file if config.access is not None else None
    entry = read_tenants(Path(file).expanduser()).tenants.get(tenant) if file is not None else None
    return entry.limits.sharing if entry is not None else None


def _read(path: Path, field: str) -> str:
    try:
        return read_stdin(field) if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(field, f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None


def _tokenizers(config: TurnoutConfig) -> Iterator[tuple[str, Callable[[str], list[int]]]]:
    """Digest and encoding of every tokenizer of the configuration's pools, each once."""
    from engine.fingerprint import tokenizer_digest
    from pool.text import TextTokenizer
    from turnout.config import model_path

    seen: set[str] = set()
    for pool in config.pools.values():
        folder = model_path(config.models[pool.large], f"models.{pool.large}.path", weights=False)
        digest = tokenizer_digest(folder)
        if digest not in seen:
            seen.add(digest)
            yield digest, TextTokenizer(folder).encode


def _removed(prefix: Prefix, as_json: bool) -> None:
    if as_json:
        print_json({"name": prefix.name, "removed": True})
    else:
        typer.echo(f"{prefix.name}: removed; what is there of it expires like everything else")


def _show(report: Report) -> None:
    print_table(
        ["sharing", "whose", ">bytes", ">values", ">quota", ">gone"],
        [
            [each.policy, each.id, quantity(each.bytes), each.values,
             "none" if each.quota is None else quantity(each.quota), f"{each.gone:.0%}"]
            for each in report.namespaces
        ],
    )  # fmt: skip
    print_table(
        ["tenant", ">lookups", ">hit rate", ">tokens asked", ">tokens saved", ">bytes written"],
        [
            [each.tenant, each.lookups, f"{each.hit_rate:.1%}", each.tokens_asked, each.tokens_found,
             quantity(each.bytes_written)]
            for each in report.tenants
        ],
    )  # fmt: skip
    print_table(
        ["registered", "sharing", "whose", ">tokens", "text"],
        [[each["name"], each["policy"], each["id"], each["tokens"], each["text"]] for each in report.prefixes],
    )
    print_table(
        ["model", ">chunk", "codecs", "fingerprint"],
        [
            [each["name"], each["chunk_tokens"], ", ".join(each["codecs"]), each["fingerprint"][:12]]
            for each in report.models
        ],
    )
