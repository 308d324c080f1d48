"""One model split over several processes, each with a device: tensor parallelism with rank 0 leading.

Every rank holds all layers, but only its share of their attention heads and of their MLPs, as transformers'
tensor-parallel plan of the architecture says, and the keys and values of its heads. The leader's `EngineModel` looks
like any other: it schedules, reads logits and samples. Every operation of its stack and of its KV pool is first sent to
the other ranks, which repeat it on their share; inside the layers all ranks add up through torch.distributed's default
group (gloo on CPUs, NCCL on GPUs).

    leader                                              every other rank
    group = join(0, world, address, port, ...)          group = join(rank, world, address, port, ...)
    checkpoint = load_sharded(group, name, ...)         follow(group, name, ...)
    model = EngineModel(name, checkpoint, ...)          (returns when the leader closes its group)
    group.close()                                       group.close()

All of these block: they belong on threads, never on an event loop. A rank that is lost cannot be replaced alone: the
leader's operations fail with `Interrupted` from then on, the other ranks' `follow` too, and all are started anew.
"""

from engine.parallel.group import Group, join
from engine.parallel.loading import check_split, load_sharded
from engine.parallel.worker import follow

__all__ = ["Group", "check_split", "follow", "join", "load_sharded"]
