"""Models of a pool by role: both spellings of the usual ones, any number of others, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from turnout.config import PoolConfig, parse_config
from turnout.errors import Code, TurnoutError
from turnout.registry import MethodInfo, MethodParams, ModelRole, get_method

MODELS = {name: {"path": name} for name in ("s", "l", "j")}


def pool_of(pool: dict[str, Any]) -> PoolConfig:
    return parse_config({"models": MODELS, "pools": {"p": pool}}).pools["p"]


@pytest.mark.parametrize(
    ("pool", "roles"),
    [
        ({"small": "s", "large": "l"}, {"small": "s", "large": "l"}),
        ({"models": {"small": "s", "large": "l"}}, {"small": "s", "large": "l"}),
        ({"small": "s", "models": {"large": "l"}}, {"small": "s", "large": "l"}),
        ({"small": "s", "large": "l", "models": {"small": "s"}}, {"small": "s", "large": "l"}),
        ({"large": "l"}, {"small": "l", "large": "l"}),
        ({"small": "s"}, {"small": "s", "large": "s"}),
        ({"models": {"large": "l"}}, {"small": "l", "large": "l"}),
        ({"small": "s", "large": "l", "models": {"judge": "j"}}, {"small": "s", "large": "l", "judge": "j"}),
        ({"large": "l", "models": {"judge": "l"}}, {"small": "l", "large": "l", "judge": "l"}),
    ],
)
def test_both_spellings_say_the_same(pool: dict[str, Any], roles: dict[str, str]) -> None:
    read = pool_of(pool)
    assert read.roles == roles
    assert (read.small, read.large) == (roles["small"], roles["large"])
    assert read.members == list(dict.fromkeys(roles.values()))
    assert PoolConfig.model_validate(read.model_dump(mode="json")) == read


@pytest.mark.parametrize(
    ("pool", "field", "says"),
    [
        ({}, "large", "required: a pool has at least a large model"),
        ({"models": {"judge": "j"}}, "large", "required"),
        ({"small": "s", "large": "l", "models": {"large": "j"}}, "models.large", "is 'j', and large is 'l'"),
        ({"small": "s", "large": "l", "models": {"judge": "x"}}, "models.judge", "no model 'x'; models: j, l, s"),
        ({"models": {"large": "x"}}, "models.large", "no model 'x'"),
        ({"large": "x"}, "large", "no model 'x'"),
        ({"small": "x"}, "small", "no model 'x'"),
        ({"large": 5}, "large", "string"),
        ({"large": "l", "models": ["j"]}, "models", "dictionary"),
        ({"large": "l", "models": {"Judge 1": "j"}}, "models.Judge 1", "match pattern"),
        ({"large": "l", "models": {"prefill": "j"}}, "models.prefill", "reserved for actors that compute prompts"),
        (
            {"large": "l", "placement": {"models": "actors", "resources": {"judge": {"a": 1}}}},
            "placement.resources.judge",
            "no such role; roles: large, prefill, small",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_field(pool: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        pool_of(pool)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert str(caught.value.field).startswith(f"pools.p.{field}")
    assert says in caught.value.message


def test_an_actor_of_a_third_role_may_ask_for_resources() -> None:
    placement = {"models": "actors", "resources": {"judge": {"a": 1}}}
    read = pool_of({"large": "l", "models": {"judge": "j"}, "placement": placement})
    assert read.placement.resources == {"judge": {"a": 1.0}}


class JudgedParams(MethodParams):
    """One role by name, one by what is asked for."""

    writer: ModelRole = "large"
    strict: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """The strict one asks a critic, too."""
        return frozenset({"critic"} if self.strict else ())


async def judged(request: Any, models: Any, params: Any) -> Any:
    """Nothing."""
    yield None


@pytest.mark.parametrize(
    ("params", "roles", "field", "says"),
    [
        (
            {},
            {"small", "large"},
            "method",
            "'judged' needs a model with the role 'judge'; the pool's roles: large",
        ),
        ({"strict": True}, {"large", "judge"}, "method", "needs a model with the role 'critic'"),
        ({"writer": "poet"}, {"large", "judge"}, "method.params.writer", "must be 'judge' or 'large'"),
    ],
)
def test_roles_that_a_pool_does_not_fill_are_refused_by_field(
    params: dict[str, Any], roles: set[str], field: str, says: str
) -> None:
    info = MethodInfo("judged", judged, JudgedParams, (), False, frozenset({"judge"}))
    parsed = info.parse(params)
    info.check_roles(parsed, {"large", "judge", "critic", "poet"})
    with pytest.raises(TurnoutError) as caught:
        info.check_roles(parsed, roles)
    assert caught.value.field == field
    assert says in caught.value.message


def test_a_wrapping_method_needs_what_it_wraps() -> None:
    monitored = get_method("monitored")
    monitored.check_roles(monitored.parse({"inner": {"name": "plain"}}), {"small", "large"})
    assert "small" in getattr(monitored.parse({"inner": {"name": "pearl"}}), "needs", ())
