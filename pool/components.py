"""Components of a pool other than its models: made from the configuration alone, wherever the models run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from decoding.artifacts import Artifacts
from decoding.calibrated_params import check_method
from engine.checkpoints import reading
from pool.audit import Audits
from pool.code_execution import SandboxedPython
from pool.concurrency import ConcurrencyLimiter
from pool.pool import DefaultMethod, Pool
from pool.reasoning import thinking_of
from pool.request_defaults import RequestDefaults
from pool.routing import PoolRouting
from pool.text import TextTokenizer
from turnout.config import PoolConfig, TurnoutConfig, artifacts_path, model_path
from turnout.cost import Price
from turnout.drafts import find_draft
from turnout.endpoint_config import FREE
from turnout.errors import Code, TurnoutError, invalid, not_found
from turnout.model_fetching import revision_of
from turnout.pool_config import SMALL
from turnout.registry import get_method


@dataclass(frozen=True, slots=True)
class Parts:
    """For the constructor of an `Pool`.

    Attributes:
        config: the pool's.
        roles: role -> model name.
        tokenizer: the large model's, which is that of all but `foreign`.
        folder: where it lies.
        places: how many calls are worked on at once.
        default: for requests that name no method.
        artifacts: what was trained for the models.
        foreign: tokenizers of the models with another vocabulary, by model name.
        notes: what the person who runs the pool should know of its files.
    """

    config: PoolConfig
    roles: dict[str, str]
    tokenizer: TextTokenizer
    folder: Path
    places: ConcurrencyLimiter
    default: DefaultMethod
    artifacts: Artifacts
    foreign: dict[str, TextTokenizer] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        """Names of the pool's models, each once: the small one first."""
        return list(dict.fromkeys(self.roles.values()))


def pool_of(name: str, config: TurnoutConfig) -> PoolConfig:
    """A configured pool.

    Raises:
        TurnoutError: NOT_FOUND.
    """
    if name not in config.pools:
        raise not_found("pools", name, list(config.pools))
    return config.pools[name]


def open_parts(name: str, config: TurnoutConfig) -> Parts:
    """Make them; the tokenizers of all models are read and compared.

    Raises:
        TurnoutError: NOT_FOUND: no such pool; INVALID_ARGUMENT: its models have different vocabularies, and a tokenizer
            that cannot be drafted with, or a default method or routing that needs one vocabulary.
    """
    pool = pool_of(name, config)
    folder = model_path(config.models[pool.large], f"models.{pool.large}.path", weights=False)
    tokenizer = _tokenizer_of(pool.large, config)
    notes = list(tokenizer.notes)
    if not tokenizer.has_chat_template:
        notes.append(
            f"{pool.large} has no chat template, so that conversations are refused; plain prompts are answered"
        )
    if pool.draft is not None:  # it stays where no draft was found
        found, reason = find_draft(folder, f"models.{pool.large}")
        notes.append(reason or f"no draft model is used: the one in {found} was not there when the file was read")
    foreign: dict[str, TextTokenizer] = {}
    for member in pool.members:
        if member != pool.large:
            other = _tokenizer_of(member, config)
            if apart := difference(other, tokenizer):
                check_drafting(name, {member: other, pool.large: tokenizer}, apart)
                foreign[member] = other
                notes.append(
                    f"{member} and {pool.large} do not share one vocabulary ({apart}): `speculative` drafts with"
                    f" {member} by text_chain or shared_vocabulary, and no other method can ask it"
                )
            else:
                notes += _differing_ends(member, pool.large, other, tokenizer)
    check_uses(name, pool, {role: member for role, member in pool.roles.items() if member in foreign})
    return Parts(
        config=pool,
        roles=pool.roles,
        tokenizer=tokenizer,
        folder=folder,
        places=ConcurrencyLimiter(name, pool.max_ongoing_requests, pool.max_queued_requests),
        default=DefaultMethod(pool.default.name, pool.default.params),
        artifacts=Artifacts(artifacts_path(pool)),
        foreign=foreign,
        notes=notes,
    )


def _tokenizer_of(model: str, config: TurnoutConfig) -> TextTokenizer:
    """A configured model's own.

    Raises:
        TurnoutError: INVALID_ARGUMENT, its files cannot be read.
    """
    field = f"models.{model}.path"
    folder = model_path(config.models[model], field, weights=False)
    with reading(folder, field):
        return TextTokenizer(folder)


def _differing_ends(member: str, large: str, mine: TextTokenizer, other: TextTokenizer) -> list[str]:
    """A note where a checkpoint does not end texts as the pool's large one does."""
    if mine.eos_ids == other.eos_ids:
        return []
    here, there = (f"{sorted(each.eos_ids)} ({each.ends.source or 'none named'})" for each in (mine, other))
    return [f"{member} ends texts with tokens {here}, {large} with {there}, which hold for both"]


def larger_draft(pool: PoolConfig, sizes: Mapping[str, int]) -> list[str]:
    """A note where a pool's small model is larger than its large one.

    Args:
        pool: the pool's configuration.
        sizes: parameters by model; of models that are not in it nothing is said.
    """
    small, large = sizes.get(pool.small), sizes.get(pool.large)
    if small is None or large is None or small <= large:
        return []
    return [
        f"{pool.small}, the small model, has {small:,} parameters, and {pool.large}, the large one, {large:,}: a draft"
        " costs more than what it drafts for; exchange the two"
    ]


def prepare(loaded: Pool, config: TurnoutConfig) -> None:
    """Check the default method against the loaded models; open the routing and the audits where there are any.

    Raises:
        TurnoutError: a calibration, a policy, an artifact or the log's file is at fault; names the field.
    """
    pool = config.pools[loaded.name]
    loaded.defaults = RequestDefaults.of(pool, loaded.tokenizer.generation)
    loaded.tokenizer.tool_format = pool.tool_format
    loaded.thinking = thinking_of(pool.reasoning, loaded.tokenizer)
    loaded.revisions = {name: revision_of(config.models[name].path) for name in pool.members}
    loaded.prices = prices_of(config, pool.members)
    loaded.model_pool.code_executor = SandboxedPython(pool.sandbox) if pool.sandbox is not None else None
    place = f"pools.{loaded.name}.default"
    default = get_method(pool.default.name, f"{place}.name").parse(pool.default.params, f"{place}.params")
    check_method(loaded.model_pool, pool.default.name, default, f"{place}.params")
    if pool.routing is not None:
        alone = pool.replicas == 1 and pool.autoscaling is None
        loaded.routing = PoolRouting(pool.routing, loaded.name, loaded.model_pool, alone=alone)
        loaded.routing.check(loaded.intake())
    if config.telemetry.audit is not None:
        dtype = config.models[pool.large].dtype
        loaded.audits = Audits(config.telemetry.audit, loaded.model_pool, loaded.tokenizer, dtype)


def prices_of(config: TurnoutConfig, members: Iterable[str]) -> dict[str, Price]:
    """Prices of the models whose tokens cost money, by name."""
    prices = {name: config.models[name].price for name in members}
    return {name: price for name, price in prices.items() if price != FREE}


def difference(mine: TextTokenizer, other: TextTokenizer) -> str:
    """Return a token on which two tokenizers disagree, and how; empty: they have the same vocabulary."""
    ours, theirs = mine.vocabulary(), other.vocabulary()
    if ours == theirs:
        return ""
    apart = min((token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)), key=str)
    return f"{apart!r} is {ours.get(apart, 'absent')} in one and {theirs.get(apart, 'absent')} in the other"


def check_drafting(pool: str, tokenizers: Mapping[str, TextTokenizer], apart: str) -> None:
    """Refuse models with different vocabularies where text cannot be carried from one to the other.

    Args:
        pool: named in the refusal.
        tokenizers: of one of its models and of the large one, by name.
        apart: how they differ.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming a tokenizer whose tokens have no bytes of their own.
    """
    for model, tokenizer in tokenizers.items():
        if tokenizer.drafting_vocabulary is None:
            one, other = map(repr, tokenizers)
            message = (
                f"pools.{pool}: {one} and {other} do not share one vocabulary ({apart}), and {model!r} has no fast"
                " tokenizer (tokenizer.json), which drafting across vocabularies needs"
            )
            raise TurnoutError(Code.INVALID_ARGUMENT, message, f"pools.{pool}")


def check_uses(name: str, pool: PoolConfig, foreign: Mapping[str, str]) -> None:
    """Refuse a default method or a routing that asks a model with another vocabulary for tokens of the large one.

    Args:
        name: the pool's.
        pool: its configuration.
        foreign: the models with another vocabulary, by role.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field and the model.
    """
    place = f"pools.{name}.default"
    method = get_method(pool.default.name, f"{place}.name")
    method.check_vocabularies(method.parse(pool.default.params, f"{place}.params"), foreign, place)
    if pool.routing is not None and SMALL in foreign:
        message = f"needs one vocabulary, and that of {pool.small!r} (small) is not that of {pool.large!r}"
        raise invalid(f"pools.{name}.routing", message)
