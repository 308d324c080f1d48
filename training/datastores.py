"""Datastores of the contrasts knn_lm (paper #174) and caad (paper #94), read along texts by a frozen model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from decoding.artifacts import Artifact
from decoding.contrast._stores import CHUNK, LAST, ROLE, Datastore, weights_of
from decoding.contrast.caad import LogitStore
from decoding.contrast.knn_lm import TokenStore
from decoding.model import Model, Readout, ReadSpec
from decoding.read_spec import FEED_FORWARD
from decoding.sequence import Sequence
from pool.text import TextTokenizer
from training.head_runs import Advance, Trained
from turnout.calls import ChatMessage
from turnout.errors import invalid
from turnout.types import SamplingParams

FEWEST = 8  # texts, of which every eighth is held out
MEASURED = 2000  # most held-out tokens
WEIGHT, NEIGHBOURS = 0.25, 1024  # with which a datastore of tokens is measured
TEMPERATURES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that a model reads.

    Attributes:
        tokens: ids.
        first: the first of them, at least 1, that is to be predicted from those before it.
    """

    tokens: tuple[int, ...]
    first: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - self.first)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a datastore.

    Attributes:
        layer: whose output is the key; -1: after the last norm; -2: what goes into the last feed-forward block.
        most: entries.
        window: tokens of a context, of texts; the second half is predicted from the first.
    """

    layer: int = LAST
    most: int = 100_000
    window: int = 256


def texts_of(path: Path) -> list[str]:
    """Read the texts of a file, which blank lines separate.

    Raises:
        TurnoutError: INVALID_ARGUMENT: there are fewer than `FEWEST`, or it is no text.
    """
    found = [each.strip() for each in _content(path, "texts").replace("\r\n", "\n").split("\n\n")]
    kept = [each for each in found if each]
    if len(kept) < FEWEST:
        raise invalid("texts", f"there are {len(kept)}, between blank lines; at least {FEWEST} are needed")
    return kept


def answers_of(path: Path) -> list[tuple[str, str]]:
    """Read questions with their answers: a file of JSON objects, one a line, with `question` and `answer`.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a line is something else, or there is none.
    """
    found = []
    for number, line in enumerate(_content(path, "answers").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            question, answer = value["question"], value["answer"]
        except (ValueError, KeyError, TypeError):
            raise invalid("answers", f"line {number}: must be an object with `question` and `answer`") from None
        if not (isinstance(question, str) and isinstance(answer, str) and answer.strip()):
            raise invalid("answers", f"line {number}: `question` and `answer` must be texts, the answer not empty")
        found.append((question, answer))
    if not found:
        raise invalid("answers", "there are none; at least one is needed")
    return found


def _content(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(field, f"cannot read {path.name!r} as UTF-8: {error}") from None


def windows(tokens: list[int], window: int) -> list[Passage]:
    """Cut a text into passages whose halves overlap, so that every token but the first is predicted once."""
    half = window // 2
    made = [Passage(tuple(tokens[:window]), 1)]
    made += [Passage(tuple(tokens[at - half : at + half]), half) for at in range(window, len(tokens), half)]
    return [each for each in made if len(each)]


def answered(question: str, answer: str, tokenizer: TextTokenizer) -> Passage:
    """Return a question, as a chat where there is a template, with its answer, which is to be predicted."""
    if tokenizer.has_chat_template:
        prompt = tokenizer.encode_chat([ChatMessage("user", question)])
    else:
        prompt = tokenizer.encode(f"{question}\n")
    return Passage((*prompt, *tokenizer.encode(answer, parse_special=False, add_special=False)), max(1, len(prompt)))


async def build_tokens(
    model: Model, tokenizer: TextTokenizer, texts: list[str], settings: Settings, advance: Advance = lambda *_: None
) -> Trained:
    """Make the datastore of knn_lm, and measure what it does to held-out texts, token by token.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the model lacks the layer.
    """
    _check(model, settings)
    passages = [windows(tokenizer.encode(text), min(settings.window, model.max_length - 1)) for text in texts]
    held = [each for place, group in enumerate(passages) if place % FEWEST == FEWEST - 1 for each in group]
    rest = [each for place, group in enumerate(passages) if place % FEWEST != FEWEST - 1 for each in group]
    states, tokens = list[torch.Tensor](), list[int]()
    async for each, rows in _read(model, rest, settings.most, settings.layer, advance):
        states += [_state(row, settings.layer) for row in rows]
        tokens += each.tokens[each.first :][: len(rows)]
    if not tokens:
        raise invalid("texts", "no text has two tokens")
    store = TokenStore(len(tokens), len(states[0]), settings.layer)
    _fill(store, torch.stack(states), centred=True)
    store.values.copy_(torch.tensor(tokens))
    report = {
        "entries": len(store),
        "left_out": sum(map(len, rest)) - len(store),
        **await _measured(model, store, held, settings, advance),
    }
    return Trained(_artifact("knn_lm", store, model, settings, texts), report)


async def build_logits(
    model: Model,
    tokenizer: TextTokenizer,
    answers: list[tuple[str, str]],
    settings: Settings,
    advance: Advance = lambda *_: None,
) -> Trained:
    """Make the datastore of caad, and say how similar contexts of different answers are.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the model lacks the layer, or an example does not fit its context.
    """
    _check(model, settings)
    passages = [answered(*each, tokenizer) for each in answers]
    for number, each in enumerate(passages, 1):
        if len(each.tokens) > model.max_length:
            fitting = f"at most {model.max_length} fit the context"
            raise invalid("answers", f"example {number} has {len(each.tokens)} tokens; {fitting}")
    places = {each: number for number, each in enumerate(passages)}
    states, logits, examples = list[torch.Tensor](), list[torch.Tensor](), list[int]()
    async for passage, rows in _read(model, passages, settings.most, settings.layer, advance, logits=True):
        states += [_state(row, settings.layer) for row in rows]
        logits += [row.logits.to("cpu", torch.float16) for row in rows if row.logits is not None]
        examples += [places[passage]] * len(rows)
    store = LogitStore(len(states), len(states[0]), len(logits[0]), settings.layer)
    _fill(store, torch.stack([store.key_of(state) for state in states]))
    store.values.data = torch.stack(logits)
    cosines = _of_others(store.keys, torch.tensor(examples))
    report = {
        "entries": len(store),
        "left_out": sum(map(len, passages)) - len(store),
        "examples": len(set(examples)),
        "cosine_of_other_examples": float(cosines.median()) if len(set(examples)) > 1 else None,
    }
    return Trained(_artifact("caad", store, model, settings, answers), report)


def _of_others(keys: torch.Tensor, examples: torch.Tensor) -> torch.Tensor:
    """Return the greatest cosine that each key has with one of another example: float32 [entries]."""
    made = []
    for part, of_part in zip(torch.split(keys, CHUNK), torch.split(examples, CHUNK), strict=True):
        best = torch.full((len(part),), -1.0)
        for other, of_other in zip(torch.split(keys, CHUNK), torch.split(examples, CHUNK), strict=True):
            same = of_part[:, None] == of_other
            best = torch.maximum(best, (part @ other.T).masked_fill(same, -1.0).amax(-1))
        made.append(best)
    return torch.cat(made)


def _check(model: Model, settings: Settings) -> None:
    if settings.layer > model.num_layers:
        raise invalid("layer", f"layer {settings.layer}; allowed: {FEED_FORWARD} to {model.num_layers}")


async def _read(
    model: Model, passages: list[Passage], most: int, layer: int, advance: Advance, logits: bool = False
) -> Any:
    """Yield passages with a row for each of their predicted tokens, in order, up to `most` rows in all."""
    want = ReadSpec(draw=None, hidden=frozenset({layer}), logits=logits)
    done, total = 0, min(most, sum(map(len, passages)))
    for each in passages:
        if done >= most:
            return
        last = min(len(each.tokens), each.first + most - done)
        seq = Sequence(list(each.tokens[: each.first]), SamplingParams(max_tokens=1), 0)
        try:
            rows = await model.extend(seq, each.tokens[each.first : last - 1], want, every=True)
        finally:
            model.release(seq)
        if any(layer not in row.hidden for row in rows):
            raise invalid("layer", f"layer {layer} cannot be read of {model.name!r}")
        done += len(rows)
        advance("reading", done, total)
        yield each, rows


def _state(row: Readout, layer: int) -> torch.Tensor:
    return row.hidden[layer].to("cpu", torch.float32)


def _fill(store: Datastore, states: torch.Tensor, centred: bool = False) -> None:
    if centred:
        store.centre.copy_(states.mean(0))
    store.keys.data = states.sub_(store.centre)


def _artifact(kind: str, store: Datastore, model: Model, settings: Settings, data: Iterable[Any]) -> Artifact:
    digest = hashlib.blake2b(json.dumps(list(data)).encode(), digest_size=16).hexdigest()
    about = {"head": store.settings, "recipe": asdict(settings), "data": digest}
    return Artifact(kind, "training.datastores", about, {ROLE: model.digest}, dict(store.state_dict()))


async def _measured(
    model: Model, store: TokenStore, held: list[Passage], settings: Settings, advance: Advance
) -> dict[str, Any]:
    """Mean surprise of held-out tokens with and without the neighbours, and the share of them that it harms.

    The temperature is the one that is best for the mean, of `TEMPERATURES`; distances are squared.
    """
    own, found, nearest = list[float](), list[list[float]](), list[float]()
    async for passage, rows in _read(model, held, MEASURED, settings.layer, lambda *_: None, logits=True):
        for token, row in zip(passage.tokens[passage.first :], rows, strict=False):
            own.append(float(row.logits.float().log_softmax(-1)[token].exp()))
            places, distances = store.nearest(store.key_of(row.hidden[settings.layer]), NEIGHBOURS)
            right = (store.values[places] == token).float()
            found.append([float((right * weights_of(-distances, each)).sum()) for each in TEMPERATURES])
            nearest.append(float(distances[0]))
        advance("measuring", len(own), min(MEASURED, sum(map(len, held))))
    if not own:
        return {"heldout_tokens": 0}
    plain = torch.tensor(own, dtype=torch.float64).clamp_min(1e-30)
    laws = torch.tensor(found, dtype=torch.float64)
    mixed = WEIGHT * laws + (1.0 - WEIGHT) * plain[:, None]
    surprise = -mixed.log().mean(0)
    best = int(surprise.argmin())
    return {
        "heldout_tokens": len(own),
        "weight": WEIGHT,
        "temperature": TEMPERATURES[best],
        "nats_per_token": float(-plain.log().mean()),
        "nats_per_token_mixed": float(surprise[best]),
        "tokens_harmed": float((mixed[:, best] < plain).double().mean()),
        "squared_distance_of_nearest": float(torch.tensor(nearest).median()),
    }
