"""`turnout tenants`: who may use the server, with which keys and limits, and what they used."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import print_json, print_table
from cli.tenant_values import key_id, limit_texts, parse_limits, parse_moment, parse_span, sharing_text
from turnout.errors import invalid

if TYPE_CHECKING:
    from deployments.access.keys import KeyRecord
    from deployments.access.tenants_file import Tenant, Tenants
    from deployments.access.usage_totals import Totals
    from turnout.config import TurnoutConfig
    from turnout.types import SharingPolicy

app = typer.Typer(help="Say who may use the server, give and take keys, add up what was used.", no_args_is_help=True)

ONCE = "this key is shown once and kept nowhere; hand it over now"
USAGE_COLUMNS = (
    *("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("paper", "flops", "wall_s"),
)

Name = Annotated[str, typer.Argument(help="The tenant's name.")]
File = Annotated[Path | None, typer.Option(help="The tenants file, instead of access.tenants_file.")]
Config = Annotated[Path | None, typer.Option(help="Configuration file that names the tenants file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="requests_per_minute, tokens_per_minute, concurrency, pools, methods (lists of patterns: a,b), priority,"
        " max_priority, operator, budget (AMOUNT tokens|flops|seconds per day|month), sharing (private, group:NAME or"
        " private:NAME); none takes a limit away; repeatable.",
    ),
]
Expires = Annotated[str, typer.Option(help="When the key ends: a time, or a span from now (90d, 12h); absent: never.")]
Label = Annotated[str, typer.Option(help="What the key is for.")]
Note = Annotated[str | None, typer.Option(help="A remark about the tenant.")]


@app.command()
def add(
    name: Name,
    limit: Limit = None,
    note: Note = None,
    expires: Expires = "",
    label: Label = "",
    no_key: Annotated[bool, typer.Option("--no-key", help="Make no key: it has signed tokens.")] = False,
    file: File = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Add a tenant, and make its first key, which is shown once. The file is made where there is none."""
    from deployments.access.keys import make_key
    from deployments.access.tenants_file import Tenant, Tenants, locked, new_entry, write_tenants

    path = _path(file, config)
    key, record = make_key(parse_moment(expires), label)
    keys = () if no_key else (record,)
    with locked(path):
        tenants = _read(path) if path.exists() else Tenants()
        if name in tenants.tenants:
            raise invalid("tenant", f"{name!r} is there already; `turnout tenants set` changes it")
        tenant = Tenant(id=new_entry(), limits=parse_limits({}, limit or []), note=note or "", keys=keys)
        _check(name, tenant, config)
        write_tenants(path, _holding(tenants, name, tenant))
    _show_key(name, None if no_key else key, record, as_json)


@app.command("list")
def list_tenants(file: File = None, config: Config = None, as_json: AsJson = False) -> None:
    """List the tenants, their keys and limits; nothing of a key is shown but its id."""
    tenants = _read(_path(file, config))
    if as_json:
        print_json({name: _described(tenant) for name, tenant in tenants.tenants.items()})
        return
    rows = [
        [name, "disabled" if t.disabled else "", len(_good(t)), len(t.keys) - len(_good(t)), _limits_text(t), t.note]
        for name, t in sorted(tenants.tenants.items())
    ]
    print_table(["tenant", "", ">keys", ">ended", "limits", "note"], rows)


@app.command()
def show(name: Name, file: File = None, config: Config = None, as_json: AsJson = False) -> None:
    """Show one tenant: limits, keys, and with whom it shares cached prefixes (--config: as kvstore.tenants says)."""
    tenant = _read(_path(file, config)).tenant(name)
    described = _described(tenant) | {"sharing": _sharing(name, tenant, config)}
    if as_json:
        print_json(described)
        return
    typer.echo(f"{name}{' (disabled)' if tenant.disabled else ''}{f': {tenant.note}' if tenant.note else ''}")
    typer.echo(f"limits: {_limits_text(tenant) or 'none'}")
    if described["sharing"]:
        typer.echo(f"cached prefixes: {described['sharing']}")
    rows = [[k["id"], k["label"], k["state"], k["created"], k["expires"] or "never"] for k in described["keys"]]
    print_table(["key", "label", "state", "made", "ends"], rows)


@app.command("set")
def set_limits(
    name: Name,
    limit: Limit = None,
    note: Note = None,
    disabled: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Refuse all its requests, or no longer.")
    ] = None,
    file: File = None,
    config: Config = None,
) -> None:
    """Change a tenant's limits; what is not named stays. Running servers take it over within two seconds."""

    def changed(tenant: Tenant) -> Tenant:
        limits = parse_limits(tenant.limits.model_dump(exclude_defaults=True), limit or [])
        update: dict[str, Any] = {"limits": limits}
        update |= {} if note is None else {"note": note}
        update |= {} if disabled is None else {"disabled": disabled}
        return tenant.model_copy(update=update)

    _change(_path(file, config), name, changed, config)
    typer.echo(f"{name}: changed")


@app.command()
def rotate(
    name: Name,
    overlap: Annotated[str, typer.Option(help="How long its other keys are still good: 30m, 24h, 7d, or 0m.")] = "24h",
    expires: Expires = "",
    label: Label = "",
    file: File = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Make a new key, which is shown once; the tenant's other keys end after the overlap."""
    from deployments.access.keys import make_key

    key, record = make_key(parse_moment(expires), label)
    end = datetime.now(UTC).replace(microsecond=0) + parse_span(overlap, "overlap")

    def changed(tenant: Tenant) -> Tenant:
        kept = tuple(
            old.model_copy(update={"expires": end}) if old.expires is None or old.expires > end else old
            for old in tenant.keys
        )
        return tenant.model_copy(update={"keys": (*kept, record)})

    _change(_path(file, config), name, changed)
    _show_key(name, key, record, as_json)
    if not as_json:
        typer.echo(f"its other keys end at {end:%Y-%m-%dT%H:%M:%SZ}", err=True)


@app.command()
def revoke(
    name: Name,
    key: Annotated[str, typer.Argument(help="The key's id, or all.")],
    file: File = None,
    config: Config = None,
) -> None:
    """End a key now; requests that are under way go on."""
    now = datetime.now(UTC).replace(microsecond=0)

    def changed(tenant: Tenant) -> Tenant:
        ended = tenant.keys if key == "all" else (tenant.key(key_id(key)),)
        for record in ended:
            tenant = tenant.with_key(record.model_copy(update={"revoked": record.revoked or now}))
        return tenant

    _change(_path(file, config), name, changed)
    typer.echo(f"{name}: revoked")


@app.command()
def remove(name: Name, file: File = None, config: Config = None) -> None:
    """Remove a tenant and its keys; its usage records stay."""
    from deployments.access.tenants_file import locked, write_tenants

    path = _path(file, config)
    with locked(path):
        write_tenants(path, _read(path).without(name))
    typer.echo(f"{name}: removed")


@app.command()
def usage(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    since: Annotated[str, typer.Option(help="From this time on (by UTC): a date, a time, or a span back (7d).")] = "",
    until: Annotated[str, typer.Option(help="Before this time.")] = "",
    by: Annotated[str, typer.Option(help="Sum by tenant, key, model, method, day, batch or outcome.")] = "tenant",
    folder: Annotated[Path | None, typer.Option(help="Folder of the records, instead of access.usage.folder.")] = None,
    config: Config = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_records: Annotated[
        bool,
        typer.Option("--records", help="Print the records that count, a line of JSON each, and no sums."),
    ] = False,
) -> None:
    """Add up the usage records. A request counts at the time it ended; an interrupted one with what was sent."""
    from deployments.access.usage_totals import GROUPS, RecordFiles, once, total

    group = next((known for known in GROUPS if known == by), None)
    if group is None:
        raise invalid("by", f"must be one of {', '.join(GROUPS)} (got {by!r})")
    if as_json + as_csv + as_records > 1:
        raise invalid("json", "choose one of --json, --csv and --records")
    files = RecordFiles(_usage_folder(folder, config))
    found = files.between(parse_moment(since, back=True), parse_moment(until, back=True))
    asked = (each for each in found if tenant is None or each.tenant == tenant)
    if as_records:
        for record in once(asked):
            typer.echo(record.model_dump_json())
    elif as_json:
        print_json({"by": by, "totals": total(asked, group), "damaged_lines": files.num_damaged})
    elif as_csv:
        _print_csv(by, total(asked, group))
    else:
        totals = total(asked, group)
        rows = [[name, *(_shown(getattr(each, column)) for column in USAGE_COLUMNS)] for name, each in totals.items()]
        print_table([by, *(f">{column.replace('_', ' ')}" for column in USAGE_COLUMNS)], rows)
    if files.num_damaged and not as_json:
        typer.echo(f"{files.num_damaged} lines are no records, and left out", err=True)


def _print_csv(by: str, totals: dict[str, Totals]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([by, *USAGE_COLUMNS])
    writer.writerows([name, *(getattr(each, column) for column in USAGE_COLUMNS)] for name, each in totals.items())


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _path(file: Path | None, config: Path | None) -> Path:
    if file is not None:
        return file
    access = _config(config).access if config is not None else None
    if access is None or access.tenants_file is None:
        raise invalid("file", "is needed: --file, or --config with access.tenants_file")
    return Path(access.tenants_file).expanduser()


def _usage_folder(folder: Path | None, config: Path | None) -> Path:
    if folder is not None:
        return folder
    access = _config(config).access if config is not None else None
    if access is None or access.usage is None:
        raise invalid("folder", "is needed: --folder, or --config with access.usage")
    return Path(access.usage.folder).expanduser()


def _config(path: Path) -> TurnoutConfig:
    from turnout.config import parse_config, read_yaml

    return parse_config(read_yaml(path))


def _sharing(name: str, tenant: Tenant, config: Path | None) -> str | None:
    """With whom a tenant shares cached prefixes: as its entry says, else as kvstore.tenants does; None: not known."""
    found: SharingPolicy | None = tenant.limits.sharing
    if found is None and config is None:
        return None
    if found is None and config is not None:
        found = _config(config).kvstore.tenants.get(name)
    return "private" if found is None else sharing_text(found)


def _read(path: Path) -> Tenants:
    from deployments.access.tenants_file import read_tenants

    return read_tenants(path)


def _change(path: Path, name: str, changed: Callable[[Tenant], Tenant], config: Path | None = None) -> None:
    from deployments.access.tenants_file import locked, write_tenants

    with locked(path):
        tenants = _read(path)
        tenant = changed(tenants.tenant(name))
        _check(name, tenant, config)
        write_tenants(path, _holding(tenants, name, tenant))


def _check(name: str, tenant: Tenant, config: Path | None) -> None:
    """Refuse what the server of this configuration could not do."""
    from deployments.access.tenants_file import unrecorded

    access = _config(config).access if config is not None else None
    if access is not None and access.usage is None and (fault := unrecorded(name, tenant)) is not None:
        raise fault


def _holding(tenants: Tenants, name: str, tenant: Tenant) -> Tenants:
    """The same with a tenant added or replaced, checked as the file is when it is read."""
    from deployments.access.tenants_file import Tenants
    from turnout.registry import validated

    values = tenants.model_dump() | {"tenants": {**tenants.model_dump()["tenants"], name: tenant.model_dump()}}
    return validated(Tenants, values, "")


def _good(tenant: Tenant) -> list[KeyRecord]:
    now = datetime.now(UTC)
    return [record for record in tenant.keys if record.ended(now) is None]


def _described(tenant: Tenant) -> dict[str, Any]:
    """A tenant without salts and hashes."""
    now = datetime.now(UTC)
    return {
        "disabled": tenant.disabled,
        "note": tenant.note,
        "limits": tenant.limits.model_dump(mode="json"),
        "keys": [
            {
                "id": record.id,
                "label": record.label,
                "state": record.ended(now) or "good",
                "created": record.created.isoformat(),
                "expires": record.expires.isoformat() if record.expires else None,
            }
            for record in tenant.keys
        ],
    }


def _limits_text(tenant: Tenant) -> str:
    return ", ".join(limit_texts(tenant.limits.model_dump(exclude_defaults=True)))


def _show_key(name: str, key: str | None, record: KeyRecord, as_json: bool) -> None:
    """The key on standard output, alone, so that it can be piped to where it belongs."""
    if as_json:
        print_json({"tenant": name, "key_id": record.id if key else None, "key": key})
        return
    if key is None:
        typer.echo(f"{name}: added, without a key")
        return
    typer.echo(f"{name}: {ONCE}", err=True)
    typer.echo(key)
