"""Times llguidance and xgrammar on one schema and vocabulary, in an environment that has both and nothing of ours.

`python time_masks.py FILE`: reads `tokenizer` (definition, as JSON of the tokenizers library), `end`, `size`, `schema`,
`form` (blanks in it, as llguidance calls them) and `texts` from the file; writes microseconds of CPU, by library, to
standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import llguidance.numpy
import xgrammar

COMPILED, WALKED = 15, 30
Timed = dict[str, list[float]]


def timed(work: Callable[[], Any], times: list[float]) -> Any:
    """The result of some work, how much CPU it took kept in `times`."""
    began = time.process_time_ns()
    result = work()
    times.append((time.process_time_ns() - began) / 1000)
    return result


def with_llguidance(tokenizer: llguidance.LLTokenizer, schema: str, form: Any, answers: list[list[int]]) -> Timed:
    """What compiling takes, and each mask with the step after it."""
    found: Timed = {"compile": [], "step": []}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=form)
    bits = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
    for _ in range(COMPILED):
        timed(lambda: llguidance.LLMatcher(tokenizer, grammar), found["compile"])
    for answer in answers * WALKED:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        for token in answer:

            def step(matcher: Any = matcher, token: int = token) -> bool:
                llguidance.numpy.fill_next_token_bitmask(matcher, bits)
                return bool(matcher.consume_token(token))

            assert timed(step, found["step"]), matcher.get_error()
    return found


def with_xgrammar(info: xgrammar.TokenizerInfo, schema: str, form: Any, answers: list[list[int]]) -> Timed:
    """The same; as a server would, one thread a schema, none of which was seen before."""
    found: Timed = {"compile": [], "step": []}
    separators = (form["item_separator"], form["key_separator"])
    bits = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    for _ in range(COMPILED):
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

        def compile_it(compiler: xgrammar.GrammarCompiler = compiler) -> Any:
            return compiler.compile_json_schema(schema, any_whitespace=False, separators=separators)

        compiled = timed(compile_it, found["compile"])
    for answer in answers * WALKED:
        matcher = xgrammar.GrammarMatcher(compiled)
        for token in answer:

            def step(matcher: Any = matcher, token: int = token) -> bool:
                matcher.fill_next_token_bitmask(bits)
                return bool(matcher.accept_token(token))

            assert timed(step, found["step"])
    return found


def main(path: Path) -> None:
    """Both, one after the other."""
    given = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = llguidance.LLTokenizer(given["tokenizer"], eos_token=given["end"])
    words = [tokenizer.decode_bytes([token]) for token in range(given["size"])]
    info = xgrammar.TokenizerInfo(words, vocab_size=given["size"], stop_token_ids=[given["end"]])
    answers = [tokenizer.tokenize_bytes(text.encode()) for text in given["texts"]]
    schema, form = json.dumps(given["schema"]), given["form"]
    result = {
        "llguidance": with_llguidance(tokenizer, schema, form, answers),
        "xgrammar": with_xgrammar(info, schema, form, answers),
        "tokens": [len(answer) for answer in answers],
    }
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
