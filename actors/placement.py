"""Which process of a pool's replica runs where: the bundles of its placement group, and who lies in which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnout.config import ModelConfig, PoolConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.pool_config import LARGE, PREFILL

REPLICA = 0  # its bundle


@dataclass(frozen=True, slots=True)
class Slot:
    """One actor process of a replica.

    Attributes:
        bundle: its place in the placement group.
        model: name of its model.
        role: the model's role, whose resources it asks of a node; of several the large one, or the first.
        copy: 0 is the member itself, from 1 on the actors that only compute prompts.
        rank: in the tensor-parallel group of its copy.
        world: ranks of that group.
    """

    bundle: int
    model: str
    role: str
    copy: int
    rank: int
    world: int


def slots(pool: PoolConfig, config: TurnoutConfig) -> list[Slot]:
    """All actors of a replica in the order of their bundles: the ranks of each role's model, then prefill ranks.

    A model with several roles has one set of ranks. Empty where the models run in the replica's own process.
    """
    if pool.placement.models != "actors":
        return []
    copies = [(_role_of(model, pool), model, 0) for model in pool.members]
    copies += [(PREFILL, pool.large, 1 + i) for i in range(pool.placement.prefill)]
    found: list[Slot] = []
    for role, model, copy in copies:
        world = config.models[model].tensor_parallel
        found += [Slot(REPLICA + 1 + len(found) + rank, model, role, copy, rank, world) for rank in range(world)]
    return found


def _role_of(model: str, pool: PoolConfig) -> str:
    """The role of a member: the large one where it has that among others, else its first."""
    return LARGE if model == pool.large else next(role for role, name in pool.roles.items() if name == model)


def bundles(pool: PoolConfig, config: TurnoutConfig) -> list[dict[str, float]]:
    """What the placement group of one replica asks for: first the replica, then its actors as in `slots`."""
    return [{"CPU": 1.0}, *(_bundle(slot, pool, config.models[slot.model]) for slot in slots(pool, config))]


def _bundle(slot: Slot, pool: PoolConfig, settings: ModelConfig) -> dict[str, float]:
    resources = pool.placement.resources
    wanted: dict[str, float] = {"CPU": pool.placement.cpus}
    if settings.device != "cpu":
        wanted["GPU"] = 1.0
    roles = [slot.role] if slot.copy else [role for role, model in pool.roles.items() if model == slot.model]
    for role in roles:
        for name, amount in resources.get(role, {}).items():
            wanted[name] = max(amount, wanted.get(name, 0.0))
    return wanted


def strategy(pool: PoolConfig) -> str:
    """How the bundles lie on nodes, as Ray names it."""
    return pool.placement.strategy


def options(slot: Slot, pool: PoolConfig, config: TurnoutConfig, group: PlacementGroup) -> dict[str, Any]:
    """Return options for `ray.remote`: the actor's bundle; Ray never restarts it, `Launcher` starts a new one."""
    wanted = _bundle(slot, pool, config.models[slot.model])
    return {
        "num_cpus": wanted.pop("CPU"),
        "num_gpus": wanted.pop("GPU", 0.0),
        "resources": wanted,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=slot.bundle,
            placement_group_capture_child_tasks=False,
        ),
    }


def device_settings(settings: ModelConfig) -> ModelConfig:
    """A model's settings as its actor sees them: of all GPUs Ray shows it one, which is the first."""
    return settings if settings.device == "cpu" else settings.model_copy(update={"device": "cuda"})


def check_hosts(pool: str, wanted: Sequence[Mapping[str, float]], nodes: Iterable[Mapping[str, float]]) -> None:
    """Refuse bundles that no node of a cluster could ever host, each looked at alone.

    Args:
        pool: its name.
        wanted: as `bundles` gives them.
        nodes: what each node offers in all, free or not.

    Raises:
        TurnoutError: UNAVAILABLE, naming the bundle, what the nodes offer, and what to do.
    """
    offers = [dict(node) for node in nodes]
    for bundle in wanted:
        if not any(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in offers):
            raise no_host(pool, bundle, offers)


def no_host(pool: str, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> TurnoutError:
    """The refusal of a bundle that is too large for every node."""
    short = _short(bundle, nodes)
    message = f"pool {pool!r} needs a node with {shown(bundle)}; {short_of(bundle, nodes)}; {offers(nodes)}"
    field = f"pools.{pool}.placement"
    # The device of a model is what asks for a GPU, wherever the model is placed.
    change = "models.*.device" if "GPU" in short else f"{field}.resources" if short - {"CPU"} else field
    return TurnoutError(Code.UNAVAILABLE, f"{message}: add such a node, or change {change}", field)


def not_free(
    pool: str, wanted: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]], time_s: float
) -> TurnoutError:
    """The refusal of bundles that nodes could host, were they not taken, or all of them together too many."""
    message = f"pool {pool!r} found no room in {time_s:g} s for {' and '.join(map(shown, wanted))}; {offers(nodes)}"
    remedy = f"others may have taken it (see `ray status`): add nodes, or change pools.{pool}.placement"
    return TurnoutError(Code.UNAVAILABLE, f"{message}: {remedy}", f"pools.{pool}.placement")


def short_of(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """For people: of which resources no node has as much as a bundle asks for."""
    named = [
        f"{name} is short ({bundle[name]:g} asked, {max((node.get(name, 0.0) for node in nodes), default=0.0):g} there)"
        for name in sorted(_short(bundle, nodes))
    ]
    return " and ".join(named) or "no node has all of it at once"


def _short(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> set[str]:
    return {name for name, amount in bundle.items() if all(node.get(name, 0.0) < amount for node in nodes)}


def offers(nodes: Sequence[Mapping[str, float]]) -> str:
    """For people: what nodes have of the resources that people ask for."""
    kinds = {shown({name: node[name] for name in node if _is_asked(name)}) for node in nodes}
    return f"nodes offer {', '.join(sorted(kinds)) or 'nothing'}"


def _is_asked(name: str) -> bool:
    """Whether a resource is one that people ask for; Ray adds some for every node and placement group."""
    return not name.startswith(("node:", "object_store_memory", "memory", "bundle_", "accelerator_type:")) and (
        "_group_" not in name
    )


def shown(resources: Mapping[str, float]) -> str:
    """For people: resources and amounts."""
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(resources.items())) + "}"
