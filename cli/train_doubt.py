"""`turnout train semantic_entropy_probe` and `key_value_bottleneck`: what reads doubt from hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.train_judges import Count, Prompts, train_on_questions
from cli.train_options import AsJson, Config, Epochs, MaxTokens, Out, Pool, Seed, Temperature

if TYPE_CHECKING:
    from pool.local_pool import LocalPool
    from training.continuations import Made
    from training.data.problem import Problem
    from training.doubt import Doubts
    from training.length_data import Source
    from training.length_predictors import Advance

Reads = Annotated[Literal["small", "large"], typer.Option(help="Who answers, and whose hidden states are read.")]
Samples = Annotated[int, typer.Option(min=2, max=64, help="Answers sampled for the label of a question.")]
Judge = Annotated[
    str, typer.Option(help="Who tells whether samples mean the same: final_answer, asked, ...; parts entailment.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `turnout train`."""
    app.command("semantic_entropy_probe")(semantic_entropy_probe)
    app.command("key_value_bottleneck")(key_value_bottleneck)


def semantic_entropy_probe(
    out: Out,
    config: Config = None,
    pool: Pool = None,
    prompts: Prompts = None,
    count: Count = 256,
    max_tokens: MaxTokens = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answer that is read.")] = 0.1,
    samples: Samples = 10,
    judge: Judge = "final_answer",
    reads: Reads = "large",
    position: Annotated[
        Literal["prompt", "answer"] | None, typer.Option(help="Where it reads; absent: whichever is better.")
    ] = None,
    adjacent: Annotated[int, typer.Option(min=1, max=8, help="Layers read together.")] = 1,
    epochs: Epochs = 60,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the probe semantic_entropy_probe: semantic entropies of samples are its labels."""

    async def work(loaded: LocalPool, source: Source, problems: list[Problem], advance: Advance) -> Made:
        from training.doubt import PROBE, train_probe

        doubts = await _mined(loaded, source, reads, samples, judge, advance)
        model, schedule = loaded.model_pool.by_role(reads), replace(PROBE, seed=seed)
        about = _about(source, samples, judge)
        return train_probe(doubts, model, reads, position, adjacent, epochs, schedule, about)

    train_on_questions(work, (config, pool), out, (prompts, count, temperature, max_tokens, seed), as_json)


def key_value_bottleneck(
    out: Out,
    config: Config = None,
    pool: Pool = None,
    prompts: Prompts = None,
    count: Count = 256,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.1,
    samples: Samples = 10,
    judge: Judge = "final_answer",
    reads: Reads = "large",
    layer: Annotated[int, typer.Option(help="Whose states; negative: from the last.")] = -1,
    codebooks: Annotated[int, typer.Option(min=1, max=1024, help="Codebooks.")] = 64,
    keys: Annotated[int, typer.Option(min=2, max=4096, help="Keys of a codebook.")] = 64,
    key_size: Annotated[int, typer.Option(min=1, max=64, help="Numbers of a key.")] = 8,
    passes: Annotated[int, typer.Option(min=1, help="Passes over the questions, one at a time.")] = 4,
    rate: Annotated[float, typer.Option(min=1e-4, max=100.0, help="Learning rate of the values.")] = 1.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the estimator key_value_bottleneck: keys without labels, then values from semantic entropies."""

    async def work(loaded: LocalPool, source: Source, problems: list[Problem], advance: Advance) -> Made:
        from training.doubt import train_bottleneck

        doubts = await _mined(loaded, source, reads, samples, judge, advance)
        sizes = (layer, codebooks, keys, key_size, passes, rate, seed)
        about = _about(source, samples, judge)
        return train_bottleneck(doubts, loaded.model_pool.by_role(reads), reads, *sizes, about=about)

    train_on_questions(work, (config, pool), out, (prompts, count, temperature, max_tokens, seed), as_json)


async def _mined(loaded: LocalPool, source: Source, reads: str, samples: int, judge: str, advance: Advance) -> Doubts:
    from decoding.uncertainty.semantic_entropy import SemanticEntropy, SemanticEntropyParams
    from training.doubt import mine_doubts
    from turnout.part_choice import PartChoice

    asked = {"samples": samples, "temperature": 1.0, "judge": PartChoice(name=judge)}
    estimator = SemanticEntropy(SemanticEntropyParams(**asked))
    estimator.check(loaded.model_pool)
    return await mine_doubts(loaded.model_pool, reads, source, estimator, advance)


def _about(source: Source, samples: int, judge: str) -> dict[str, Any]:
    return {"data": source.digest, "samples": samples, "judge": judge}
