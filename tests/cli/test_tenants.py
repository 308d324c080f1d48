from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.access.tenants_file import read_tenants
from deployments.access.usage_record import Spent, UsageRecord
from deployments.access.usage_records import UsageRecords
from turnout.access_config import UsageConfig


@pytest.fixture
def tenants(run: Any, tmp_path: Path) -> Any:
    """`turnout tenants` on a file of its own."""

    def run_tenants(command: str, *arguments: str) -> Any:
        return run("tenants", command, *arguments, "--file", str(tmp_path / "tenants.yaml"))

    return run_tenants


def stored(tmp_path: Path) -> Any:
    return read_tenants(tmp_path / "tenants.yaml").tenants


def test_a_tenant_gets_a_key_that_is_shown_once(tenants: Any, tmp_path: Path) -> None:
    limits = ["--limit", "requests_per_minute=60", "--limit", "pools=demo*,other", "--limit", "budget=1e6 tokens a day"]
    added = tenants("add", "acme", *limits, "--label", "ci", "--expires", "90d", "--note", "a note")
    assert added.code == 0
    key = added.out.strip()
    assert "shown once" in added.err
    [record] = stored(tmp_path)["acme"].keys
    assert record.opened_by(key.split("_", 2)[2])
    assert record.expires is not None
    assert timedelta(days=89) < record.expires - datetime.now(UTC) <= timedelta(days=90)
    assert key.split("_", 2)[2] not in (tmp_path / "tenants.yaml").read_text(encoding="utf-8")
    listed = tenants("list").out
    for part in ("acme", "requests_per_minute 60", "pools demo* other", "budget 1e+06 tokens a day", "a note"):
        assert part in listed
    shown = tenants("show", "acme").out
    assert record.id in shown
    assert "ci" in shown
    for text in (listed, shown, tenants("list", "--json").out, tenants("show", "acme", "--json").out):
        assert record.hash not in text
        assert record.salt not in text


def test_an_entry_is_known_from_a_later_one_of_its_name_however_it_is_changed(tenants: Any, tmp_path: Path) -> None:
    tenants("add", "acme")
    first = stored(tmp_path)["acme"].id
    for command in (["rotate", "acme"], ["set", "acme", "--disable"]):
        assert tenants(*command).code == 0
    assert stored(tmp_path)["acme"].id == first != ""
    tenants("remove", "acme")
    tenants("add", "acme")
    assert stored(tmp_path)["acme"].id not in ("", first)


def test_rotation_leaves_an_overlap(tenants: Any, tmp_path: Path) -> None:
    old = tenants("add", "acme").out.strip()
    rotated = json.loads(tenants("rotate", "acme", "--overlap", "2h", "--json").out)
    before, after = stored(tmp_path)["acme"].keys
    assert before.opened_by(old.split("_", 2)[2])
    assert after.opened_by(rotated["key"].split("_", 2)[2])
    now = datetime.now(UTC)
    assert before.ended(now) is None
    assert before.ended(now + timedelta(hours=2)) == "expired"
    assert after.ended(now + timedelta(days=999)) is None
    tenants("rotate", "acme", "--overlap", "0m")
    assert [key.ended(datetime.now(UTC)) for key in stored(tmp_path)["acme"].keys] == ["expired", "expired", None]


def test_keys_are_revoked_by_id_or_all(tenants: Any, tmp_path: Path) -> None:
    first = tenants("add", "acme").out.strip()
    tenants("rotate", "acme")
    # Who pastes the whole key means its id, and its secret is not repeated.
    assert tenants("revoke", "acme", first).code == 0
    assert [key.revoked is None for key in stored(tmp_path)["acme"].keys] == [True, False]
    unknown = tenants("revoke", "acme", "tk_000000000000_" + "s" * 43)
    assert unknown.code == 1
    assert "s" * 43 not in unknown.err
    assert tenants("revoke", "acme", "all").code == 0
    assert all(key.revoked for key in stored(tmp_path)["acme"].keys)


def test_limits_are_set_and_taken_away(tenants: Any, tmp_path: Path) -> None:
    tenants("add", "acme", "--limit", "concurrency=3", "--limit", "methods=plain")
    assert tenants("set", "acme", "--limit", "concurrency=none", "--limit", "operator=true", "--disable").code == 0
    tenant = stored(tmp_path)["acme"]
    assert (tenant.limits.concurrency, tenant.limits.methods, tenant.limits.operator) == (None, ("plain",), True)
    assert tenant.disabled
    tenants("set", "acme", "--enable")
    assert not stored(tmp_path)["acme"].disabled
    assert tenants("remove", "acme").code == 0
    assert stored(tmp_path) == {}


@pytest.mark.parametrize(
    ("given", "stands", "shown"),
    [
        ("group:team", {"policy": "group", "group": "team"}, "group, group team"),
        ("private:team", {"policy": "private", "group": "team"}, "private, group team"),
        ("private", {"policy": "private"}, "private"),
    ],
)
def test_sharing_is_set_shown_and_taken_away(
    tenants: Any, tmp_path: Path, given: str, stands: dict[str, str], shown: str
) -> None:
    assert tenants("add", "acme", "--limit", f"sharing={given}", "--limit", "concurrency=3").code == 0
    written = yaml.safe_load((tmp_path / "tenants.yaml").read_text(encoding="utf-8"))
    assert written["tenants"]["acme"]["limits"]["sharing"] == stands
    assert f"sharing {shown}" in tenants("list").out
    assert f"cached prefixes: {shown}\n" in tenants("show", "acme").out
    assert json.loads(tenants("show", "acme", "--json").out)["sharing"] == shown
    tenants("set", "acme", "--limit", "operator=true")
    sharing = stored(tmp_path)["acme"].limits.sharing
    assert (sharing.policy, sharing.group) == (stands["policy"], stands.get("group"))
    assert tenants("set", "acme", "--limit", "sharing=none").code == 0
    limits = stored(tmp_path)["acme"].limits
    assert (limits.sharing, limits.concurrency, limits.operator) == (None, 3, True)
    assert "cached prefixes" not in tenants("show", "acme").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("add", "acme"), "there already"),
        (("add", "a b"), "tenants.a b"),
        (("add", "x", "--limit", "speed=1"), "must be NAME=VALUE with one of requests_per_minute"),
        (("add", "x", "--limit", "concurrency=0"), "limit.concurrency: "),
        (("add", "x", "--limit", "concurrency=many"), "limit.concurrency: "),
        (("add", "x", "--limit", "budget=5 apples"), "limit.budget.unit: "),
        (("add", "x", "--limit", "budget=1 b c d"), "limit.budget: must be as"),
        (("add", "x", "--limit", "sharing=group"), "limit.sharing: must be private, group:NAME"),
        (("add", "x", "--limit", "sharing=group:"), "limit.sharing: must be private, group:NAME"),
        (("set", "acme", "--limit", "sharing=public"), "limit.sharing: must be private, group:NAME"),
        (("add", "x", "--expires", "tomorrow"), "time: must be as"),
        (("rotate", "acme", "--overlap", "soon"), "overlap: must be"),
        (("show", "nobody"), "'nobody' is not known; available: acme"),
        (("revoke", "acme", "000000000000"), "is not known"),
        (("remove", "nobody"), "is not known"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(
    tenants: Any, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    tenants("add", "acme")
    before = (tmp_path / "tenants.yaml").read_bytes()
    result = tenants(*arguments)
    assert result.code == 1
    assert says in result.err
    assert result.err.count("\n") == 1
    assert (tmp_path / "tenants.yaml").read_bytes() == before


def test_the_file_is_found_through_the_configuration(run: Any, config_file: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    values["access"] = {"tenants_file": str(tmp_path / "t.yaml"), "usage": {"folder": str(tmp_path / "u")}}
    values["kvstore"] = {"tenants": {"acme": {"policy": "group", "group": "g"}}}
    config_file.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert run("tenants", "add", "acme", "--config", str(config_file)).code == 0
    assert "group, group g" in run("tenants", "show", "acme", "--config", str(config_file)).out
    # What the tenants file says goes before it.
    assert run("tenants", "set", "acme", "--limit", "sharing=private", "--config", str(config_file)).code == 0
    assert "cached prefixes: private\n" in run("tenants", "show", "acme", "--config", str(config_file)).out
    assert "is needed" in run("tenants", "list").err


def test_usage_is_added_up(run: Any, tmp_path: Path) -> None:
    records = UsageRecords(UsageConfig(folder=str(tmp_path / "u")))
    for number, tenant, day, batch in [
        (0, "acme", 1, ""),
        (1, "acme", 1, "b"),
        (1, "acme", 2, "b"),
        (2, "other", 2, ""),
    ]:
        records.promise()
        records.write(
            UsageRecord(
                time=datetime(2026, 3, day, tzinfo=UTC), request_id=str(number), tenant=tenant, model="demo",
                batch_id=batch, prompt_tokens=10, completion_tokens=2, tokens_by_model={"s": 2},
                cost=Spent(flops=5, wall_s=0.5, paper=0.5),
            )
        )  # fmt: skip
    records.close()

    def usage(*arguments: str) -> Any:
        return run("tenants", "usage", "--folder", str(tmp_path / "u"), *arguments)

    totals = json.loads(usage("--json").out)["totals"]
    assert (totals["acme"]["requests"], totals["acme"]["prompt_tokens"], totals["acme"]["paper"]) == (2, 20, 2.0)
    rows = list(csv.DictReader(io.StringIO(usage("--csv", "--by", "day", "--tenant", "acme").out)))
    assert [(row["day"], row["completion_tokens"]) for row in rows] == [("2026-03-01", "2"), ("2026-03-02", "2")]
    later = json.loads(usage("--json", "--since", "2026-03-02", "--until", "2026-03-03").out)["totals"]
    assert {name: each["requests"] for name, each in later.items()} == {"acme": 1, "other": 1}
    assert "acme" in usage().out
    # Line 1 of the batch was answered twice, and counts once.
    listed = [UsageRecord.model_validate_json(line) for line in usage("--records", "--tenant", "acme").out.splitlines()]
    assert [(each.request_id, each.time.day, each.cost.flops) for each in listed] == [("0", 1, 5), ("1", 2, 5)]
    assert "choose one of" in usage("--records", "--csv").err
    assert usage("--by", "colour").err.startswith("turnout: by: must be one of tenant, key")
    assert usage("--since", "later").code == 1


def test_a_key_file_reaches_the_server(run: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("tk_x y\n", encoding="utf-8")
    refused = run("generate", "x", "--api-key-file", str(tmp_path / "key"))
    assert refused.code == 1
    assert "must hold one API key" in refused.err
    assert "tk_x" not in refused.err
