"""The losslessness audit: answers that must equal plain decoding are computed again while the models are idle.

The large model reads the answer it is said to have given, and says at each place what it chooses there, with the same
noise. That is plain decoding, all of its steps at once: an answer is plain decoding's if and only if each of its
tokens is what the model chooses after those before it. So an audit costs about what a prompt of the same length does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoding.model import Model, ModelPool, ReadSpec
from decoding.sequence import Sequence
from pool.exactness import TIES, behind
from pool.processors import read_logits_only
from pool.text import TextTokenizer
from router.shadows import Shadows, deferring
from turnout.pool_stats import AuditDiff, AuditStats
from turnout.telemetry_config import AuditConfig
from turnout.types import Token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from pool.request_runner import RequestRunner

PIECE = 64  # tokens read between two looks at whether others wait
KEPT = 8  # mismatches that are reported in full
SEED = 1  # of the choice of answers: not those that routing shadows take
AUDIT_TENANT = "(audit)"  # its time on the models is no tenant's, and no tenant can be called that

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer to look at: its sequence before the first token, and its tokens."""

    index: int
    sequence: Sequence
    tokens: tuple[int, ...]


class Audits:
    """Audits a share of a pool's answers.

    An audit begins when its request has ended, and asks the model for something only while no more than
    `config.beside` requests are in progress (see `router.shadows.Shadows`); at each step it yields to others. It is
    no call: it is not billed, and no place of the pool is held. Where requests are always in progress, one audit runs
    in line with them each `config.floor_s`: else a server that is never idle would look at none of its answers.

    Answers that are audited are those whose next token depends only on tokens, seed and position: of lossless methods,
    greedy ones, and seeded ones under the match verifier. The others follow the law of the large model, which one
    answer cannot show. The prompt's cached blocks are used as they are.

    Args:
        config: how many, which share.
        models: the pool's.
        tokenizer: for the texts of what is reported.
        dtype: of the models: says what rounding may do.
    """

    def __init__(self, config: AuditConfig, models: ModelPool, tokenizer: TextTokenizer, dtype: str) -> None:
        self.config = config
        self._shadows = Shadows(config, SEED)
        self._models = models
        self._tokenizer = tokenizer
        self._tie_nats = config.tie_nats or TIES[dtype]
        self._equal = self._ties = self._mismatches = self._failed = self._tokens = 0
        self._last: deque[AuditDiff] = deque(maxlen=KEPT)
        self._owing_since: float | None = None  # when the first one was offered after the last one that was finished

    def during_request(self, full: Callable[[], bool]) -> AbstractContextManager[None]:
        """Count a request as in progress for as long as the context lasts; see `Shadows.during_request`."""
        return self._shadows.during_request(full)

    def stats(self) -> AuditStats:
        """What was found since the pool was loaded."""
        return AuditStats(
            self._equal,
            self._ties,
            self._mismatches,
            self._shadows.num_dropped,
            self._failed,
            self._tokens,
            len(self._shadows),
            tuple(self._last),
        )

    def offer(self, run: RequestRunner) -> None:
        """A call has been answered: audit it where it is one of the share, and its method keeps to plain decoding."""
        call, plan = run.prepared.call, run.prepared.plan
        if not self._shadows.wants(call.tenant, call.request_id) or call.cache != "exact" or call.delivered:
            return
        if plan is None or not plan.method.keeps_law(plan.params) or run.prepared.contrast is not None:
            return
        if not plan.method.continues(plan.params, call.sampling.greedy) or not read_logits_only(call.sampling):
            return
        # A method that can run over either model says which in `model`; all others keep the law of the large one.
        model = self._models.by_role(getattr(plan.params, "model", "large"))
        method, due = plan.method.name, self._is_due()
        self._shadows.offer(call.request_id, lambda: self._audit(call.request_id, method, model, run, due), due)

    def _is_due(self) -> bool:
        """Whether none has been finished for too long, though there were some to look at."""
        now = time.monotonic()
        if self._owing_since is None:
            self._owing_since = now
        if now - self._owing_since < self.config.floor_s:
            return False
        self._owing_since = now
        return True

    async def close(self) -> None:
        """End all and wait for it."""
        await self._shadows.close()

    async def _audit(self, request_id: str, method: str, model: Model, run: RequestRunner, due: bool) -> None:
        asked = model if due else deferring(self._models, self._shadows.gate).models[model.name]
        answers: list[_Answer] = []
        try:
            for written in run.answers:
                tokens = tuple(token.id for token in written.sequence.generated)
                sequence = run.fresh(written.index)[0]
                sequence.low_priority, sequence.tenant = not due, AUDIT_TENANT
                answers.append(_Answer(written.index, sequence, tokens))
            async with asyncio.timeout(self.config.timeout_s):
                for answer in answers:
                    await self._look(request_id, method, asked, answer)
            self._owing_since = None
        except TimeoutError:
            self._shadows.num_dropped += 1
        except Exception:
            self._failed += 1
            raise
        finally:
            for answer in answers:
                model.release(answer.sequence)

    async def _look(self, request_id: str, method: str, model: Model, answer: _Answer) -> None:
        seq, ties = answer.sequence, 0
        for piece in _pieces(answer.tokens):
            rows = await model.extend(seq, piece, ReadSpec(), every=True)
            for place, (token, row) in enumerate(zip(piece, rows, strict=False)):
                if row.token == token:
                    continue
                margin_nats = await behind(model, seq, piece[:place], token)
                if margin_nats < self._tie_nats:
                    ties += 1
                    continue
                position = len(seq) - seq.num_prompt_tokens + place
                self._report(request_id, method, model.name, answer.index, position, token, row.token, margin_nats)
                return
            for token in piece:
                seq.append(Token(token, model.name), model.num_parameters)
            self._tokens += len(piece)
        self._ties += ties > 0
        self._equal += ties == 0

    def _report(
        self,
        request_id: str,
        method: str,
        model: str,
        answer: int,
        position: int,
        wrote: int,
        expected: int,
        margin_nats: float,
    ) -> None:
        self._mismatches += 1
        self._tokens += 1
        name = self._tokenizer.name_of
        texts = (wrote, name(wrote)), (expected, name(expected))
        known = margin_nats if math.isfinite(margin_nats) else None
        self._last.append(AuditDiff(request_id, method, answer, position, *texts, known, model, time.time()))
        how = "excluded" if known is None else f"{known:.4f} nats behind"
        log.error(
            "audit: request %s: answer %d of %s is not what %s writes alone: token %d is %d, %s where it is %d",
            request_id, answer, method, model, position, wrote, how, expected,
        )  # fmt: skip


def _pieces(tokens: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return (tokens[start : start + PIECE] for start in range(0, len(tokens), PIECE))
