"""The table of methods, made from the registry: every drafter, verifier, length policy and selector, and plain."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.methods.speculative import SpeculativeParams, make_parts
from decoding.model import ModelPool
from decoding.selectors.base import PACKAGE as SELECTORS
from decoding.verifiers.base import PACKAGE as VERIFIERS
from decoding.verifiers.base import Verifier
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import load, names

PLAIN = "plain"
# What a contender has in the parts that it is not there for.
DEFAULTS = SpeculativeParams(
    drafter=PartChoice(name="model_chain"), length=PartChoice(name="fixed"), select=PartChoice(name="first")
)
DEFAULT = "default"
# What selectors choose from: a free copy, a model's chain, and guesses that cost nothing but their verification; and
# those that learn, from plain decoding too.
ARMS = ("copyspec", "model_chain", "token_recycling")
NO_DRAFT = "none"
# Decides for every drafter how deep it drafts, and whether at all.
CONTROL = "smartspec"
# Where a default would do nothing on small models: the demo pair's vocabulary is below `vocab_trim`'s usual part.
SETTINGS: dict[str, dict[str, Any]] = {"vocab_trim": {"keep": 512}}


class Family(StrEnum):
    """Kind of a contender: the part in which it differs from the others."""

    PLAIN = "plain"
    DRAFTER = "drafter"
    VERIFIER = "verifier"
    LENGTH = "length policy"
    SELECTOR = "selector"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to decode.

    Attributes:
        name: in tables and on the command line.
        family: what it is there for.
        params: of the method `speculative`; None decodes plainly.
        lossless: whether its output law is the target's.
        seeded: whether its tokens are those of plain decoding with the same seed, at any temperature.
        automatic: whether its length policy chooses how much is drafted, nothing included.
        sampled_only: whether it does the same as another contender where no token is drawn.
    """

    name: str
    family: Family
    params: dict[str, Any] | None = field(default=None, hash=False)
    lossless: bool = True
    seeded: bool = True
    automatic: bool = False
    sampled_only: bool = False

    @property
    def method(self) -> str:
        """The method that runs it."""
        return "plain" if self.params is None else "speculative"


@cache
def contenders() -> dict[str, Contender]:
    """Everything there is to compare, by name: plain and what `speculative` chooses itself, then each part.

    A drafter has the request's default verifier where that judges its candidates best, and else the first lossless
    one that does. Where several do, the others are contenders of their own when tokens are drawn. Each drafter is also
    tried under the length policy that decides when it drafts at all. The other length policies and verifiers that are
    not lossless are tried on the default drafter, selectors on a few arms; those that learn, on arms under that policy
    as well.
    """
    found = [Contender(PLAIN, Family.PLAIN), _contender(DEFAULT, Family.SELECTOR, {}, automatic=True)]
    found += [each for name in names(DRAFTERS) for each in _of_drafter(name)]
    chain = _choice(DEFAULTS.drafter)
    fixed = _choice(DEFAULTS.length)
    found += [
        _contender(
            f"{chain}+{name}",
            Family.VERIFIER,
            {"drafter": chain, "length": fixed, "verifier": name},
            lossless=False,
        )
        for name, part in _parts(VERIFIERS).items()
        if not part.lossless and set(part.accepts) & _parts(DRAFTERS)[chain].kinds
    ]
    found += [
        _contender(f"{chain}+{name}", Family.LENGTH, {"drafter": chain, "length": name}, automatic=part.abstains)
        for name, part in _parts(LENGTHS).items()
        if name not in (fixed, CONTROL)
    ]
    for name in names(SELECTORS):
        learns = name != _choice(DEFAULTS.select)
        params = {"drafter": [*ARMS, *([NO_DRAFT] if learns else [])], "length": fixed, "select": name}
        found.append(_contender(name, Family.SELECTOR, params))
        if learns:
            params = {**params, "length": CONTROL}
            found.append(_contender(f"{name}+{CONTROL}", Family.SELECTOR, params, automatic=True))
    return {each.name: each for each in found}


def _of_drafter(name: str) -> list[Contender]:
    kinds = _parts(DRAFTERS)[name].kinds
    verifiers = {key: part for key, part in _parts(VERIFIERS).items() if part.lossless and part.accepts[0] in kinds}
    default = _choice(DEFAULTS.verifier)
    usual = default if default in verifiers else next(iter(verifiers))
    drafter = {"name": name, **SETTINGS[name]} if name in SETTINGS else name
    fixed = _choice(DEFAULTS.length)
    params = {"drafter": drafter, "length": fixed, "verifier": usual}
    made = [
        _contender(name, Family.DRAFTER, params),
        _contender(f"{name}+{CONTROL}", Family.LENGTH, {**params, "length": CONTROL}, automatic=True),
    ]
    for other in verifiers:
        if other != usual:
            params = {"drafter": drafter, "length": fixed, "verifier": other}
            made.append(_contender(f"{name}+{other}", Family.VERIFIER, params, sampled_only=True))
    return made


def _contender(name: str, family: Family, params: dict[str, Any], **flags: bool) -> Contender:
    name_of_verifier = params.get("verifier", _choice(DEFAULTS.verifier))
    verifier: Verifier = PartChoice.of(name_of_verifier).make(VERIFIERS, "verifier")
    # Tokens that the target draws with its own noise are those it draws alone.
    seeded = verifier.lossless and verifier.want.draw is not None
    return Contender(name, family, params, **{"lossless": verifier.lossless, "seeded": seeded, **flags})


@cache
def _parts(package: str) -> dict[str, Any]:
    return {name: load(package, name, "part").PART for name in names(package)}


def _choice(value: Any) -> str:
    assert isinstance(value, PartChoice)
    return value.name


def lacking(contender: Contender, models: ModelPool) -> str | None:
    """Why a contender cannot run on these models; None when it can."""
    if contender.params is None:
        return None
    try:
        arms, _, verifier = make_parts(SpeculativeParams.model_validate(contender.params), models)
        verifier.check(models)
        for arm in arms:
            arm.drafter.check(models)
            arm.length.check(models)
    except TurnoutError as error:
        return error.message
    return None


def artifacts_of(contender: Contender) -> list[str]:
    """Names of the artifacts it opens, sorted."""
    if contender.params is None:
        return []
    arms, _, verifier = make_parts(SpeculativeParams.model_validate(contender.params))
    parts = [verifier, *(part for arm in arms for part in (arm.drafter, arm.length))]
    return sorted({part.params.artifact for part in parts if hasattr(part.params, "artifact")})


def automatic_names() -> list[str]:
    """Who chooses by itself whether to draft and keeps the text; those that cannot run here included."""
    return [name for name, each in contenders().items() if each.automatic and each.lossless]
