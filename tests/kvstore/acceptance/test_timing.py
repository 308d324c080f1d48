"""What one tenant can learn of another's prompts from how long its own take: nothing, unless they share."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from kvstore.fakes import RecordingStore
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.acceptance.workers import Worker, working
from tests.kvstore.prefixes import soon
from tests.telling import tell
from training.random_models import llama_config

LENGTH = 257
# Wide enough that computing a prompt takes clearly longer than fetching it, with few keys and values a token.
BROAD = llama_config(
    60,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    pad_token_id=0,
    eos_token_id=1,
)
BROAD_CHUNK = 64
PROBES = 500
MOST_PRIVATE, LEAST_SHARED = 0.55, 0.9
PRIVATE: dict[str, Any] = {}
GROUP = {name: {"policy": "group", "group": "team"} for name in ("victim", "attacker")}


def auc(sent: list[float], unsent: list[float]) -> float:
    """How well times tell prompts that were sent from others: 0.5 not at all, 1 without error, either way round."""
    ranked = sorted([(each, True) for each in sent] + [(each, False) for each in unsent])
    ranks = sum(place for place, (_, was_sent) in enumerate(ranked, 1) if was_sent)
    share = (ranks - len(sent) * (len(sent) + 1) / 2) / (len(sent) * len(unsent))
    return max(share, 1.0 - share)


class Attack:
    """Probes of prompts that the victim has sent, or has not but sent others like them.

    Args:
        worker: that serves both.
        tier: "device": everything the engine has; "redis": its pool is emptied before a probe.
        seed: of the prompts, which must not have been asked before.
    """

    def __init__(self, worker: Worker, tier: str, seed: int = 0) -> None:
        self._worker = worker
        self._tier = tier
        self._rng = random.Random(seed)

    def prompt(self) -> list[int]:
        return [self._rng.randrange(2, 59) for _ in range(LENGTH)]

    async def ask(self, prompt: list[int], tenant: str) -> tuple[float, int]:
        """(Seconds to the first token, tokens that were not computed)."""
        seq = self._worker.sequence(prompt, tenant)
        began = time.perf_counter()
        await self._worker.model.extend(seq)
        took = time.perf_counter() - began
        self._worker.model.release(seq)
        return took, seq.meter.models["m"].cached_tokens

    async def probe(self, was_sent: bool) -> tuple[float, int]:
        """As `ask`, of the attacker."""
        probed = self.prompt()
        await self.ask(probed if was_sent else self.prompt(), "victim")
        await self._worker.settle()
        if self._tier == "redis":
            await self._worker.forget()
        return await self.ask(probed, "attacker")

    async def score(self, probes: int) -> float:
        """The classifier's area under the curve over `probes` probes of each kind, in random order."""
        kinds = [True, False] * probes
        self._rng.shuffle(kinds)
        times: dict[bool, list[float]] = {True: [], False: []}
        for was_sent in kinds:
            times[was_sent].append((await self.probe(was_sent))[0])
        return auc(times[True], times[False])


@pytest.mark.parametrize("tier", ["device", "redis"])
@pytest.mark.parametrize(("tenants", "shared"), [(PRIVATE, False), (GROUP, True)], ids=["private", "group"])
async def test_a_probe_does_the_same_work_whether_the_victim_sent_it(
    store: RedisStore, tier: str, tenants: dict[str, Any], shared: bool
) -> None:
    """Nothing found, and the same commands in the same order; among those who share, the opposite."""
    recorded = RecordingStore(store)
    work: dict[bool, set[Any]] = {True: set(), False: set()}
    async with working(recorded, tenants=tenants) as worker:
        attack = Attack(worker, tier)
        for was_sent in [True, False] * 3:
            cached = await _cached(attack, recorded, was_sent, work)
            assert (cached > 0) == (shared and was_sent)
    assert (work[True] == work[False]) == (not shared)


async def _cached(attack: Attack, recorded: RecordingStore, was_sent: bool, work: dict[bool, set[Any]]) -> int:
    probed = attack.prompt()
    await attack.ask(probed if was_sent else attack.prompt(), "victim")
    await attack._worker.settle()
    if attack._tier == "redis":
        await attack._worker.forget()
    before = len(recorded.calls)
    _, cached = await attack.ask(probed, "attacker")
    done = recorded.calls[before:]
    await attack._worker.settle()
    asked = tuple((call.name, len(call.keys), call.sizes) for call in done if call.name in ("count_prefix", "read"))
    # Writes are behind the request; how many of them there are by then is chance. The first asks are not.
    work[was_sent].add((cached, asked[:1]))
    return cached


@pytest.mark.bench
@pytest.mark.parametrize("tier", ["device", "redis"])
async def test_a_classifier_of_times_learns_nothing_from_strangers(store: RedisStore, tier: str) -> None:
    found = {}
    for name, tenants in {"private": PRIVATE, "group": GROUP}.items():
        store.script("return redis.call('flushall')", [], [], soon())
        async with working(store, tenants=tenants, shape=BROAD, chunk=BROAD_CHUNK) as worker:
            await Attack(worker, tier, 1).score(20)  # until everything has been met once
            found[name] = await Attack(worker, tier, 2).score(PROBES)
    tell(f"timing classifier, {tier}, {PROBES} probes of each kind: AUC {found}")
    assert found["private"] <= MOST_PRIVATE
    assert found["group"] > LEAST_SHARED


def test_the_classifier_is_one() -> None:
    assert auc([1.0, 2.0], [3.0, 4.0]) == auc([3.0, 4.0], [1.0, 2.0]) == 1.0
    assert auc([1.0, 4.0], [2.0, 3.0]) == 0.5
