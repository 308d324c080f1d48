"""The page of results: scores side by side, and what the load tool said."""

from __future__ import annotations

from benchmarks.foreign.compare import Comparison
from benchmarks.foreign.load import OUTPUT_TOKENS, PROMPT_TOKENS, Figures
from experiments.machine import one_line

HEAD = """\
# Foreign evaluation and load tools

Tools as they come from the package index, run against `turnout serve` with the demo pair in float32.
Written by `make check-foreign`, which fails where scores differ by more than their standard error or a request fails.
"""
SCORES = """\
## lm-evaluation-harness

{version}. The same {count} held-out problems (middle grade, `benchmarks/foreign/tasks`) with the harness's own Hugging
Face backend and with its clients of the endpoint. `worked`: the sum is worked out greedily, and the last number must be
right. `chosen`: of the right working and three with a slip in one step, the right one must be the likeliest; what is
scored comes from `echo` and `logprobs` of `/v1/completions`. `demo` is the pair, which decodes speculatively: its
answers are to be the large model's.

| task | served as | asked through | own backend | served | same text | largest difference, nats |
| --- | --- | --- | --- | --- | --- | --- |
"""
LOADS = """\
## GuideLLM

{version}. Streamed chats of {prompt} synthetic tokens, {output} tokens each, the demo's own tokenizer; so many at a
time. First token and gaps between tokens as the tool measured them: median and 95th percentile, milliseconds. It shares
the machine with the server, and they show that it works rather than how fast it is.

| model | streams | requests | errors | cut off | tokens | first token | gap | tokens/s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""

BY_HAND = """\
## By hand

With a pool `chat` of your own, whose tokenizer lies in `/models/large`, from an environment with the tools:

```console
$ lm_eval run --tasks gsm8k_cot_zeroshot --apply_chat_template --model local-completions --model_args \\
    model=chat,base_url=http://localhost:8000/v1/completions,tokenizer=/models/large,num_concurrent=8
$ guidellm run --backend kind=openai_http,target=http://localhost:8000,model=chat --tokenizer \\
    kind=huggingface_auto,model=/models/large --data kind=synthetic_text,prompt_tokens=64,output_tokens=32 \\
    --profile kind=concurrent,streams=8 --constraint kind=max_requests,count=100
```

The harness sends prompts as token ids unless it is told otherwise, and with a chat template it has to: in the text of a
prompt, `/v1/completions` takes the spelling of a special token for ordinary characters.
"""


def to_markdown(
    machine: dict[str, str],
    versions: dict[str, str],
    count: int,
    comparisons: list[Comparison],
    loads: list[tuple[str, Figures]],
) -> str:
    """The whole page.

    Args:
        machine: what it ran on.
        versions: of the tools.
        count: problems of a task.
        comparisons: one for each row of scores.
        loads: model and figures for each row of load.
    """
    parts = [HEAD, one_line(machine) + ".\n"]
    parts.append(SCORES.format(version=versions["lm-eval"], count=count) + "".join(map(_score_row, comparisons)))
    head = LOADS.format(version=versions["guidellm"], prompt=PROMPT_TOKENS, output=OUTPUT_TOKENS)
    parts.append(head + "".join(_load_row(model, figures) for model, figures in loads))
    return "\n".join([*parts, BY_HAND])


def _score_row(each: Comparison) -> str:
    own, served = each.reference, each.served
    texts = f"{each.same_texts} of {len(own.texts)}" if own.texts else ""
    gap = f"{each.logprob_gap:.1e}" if own.logprobs else ""
    return (
        f"| {each.task} | {each.served_as} | {each.backend} | {own.score:.1%} ± {own.stderr:.1%} | {served.score:.1%} "
        f"| {texts} | {gap} |\n"
    )


def _load_row(model: str, each: Figures) -> str:
    first, gap = (f"{median:.0f} / {late:.0f}" for median, late in (each.ttft_ms, each.itl_ms))
    return (
        f"| {model} | {each.streams} | {each.successful} | {each.errored} | {each.incomplete} | {each.output_tokens} "
        f"| {first} | {gap} | {each.tokens_per_s:.0f} |\n"
    )
