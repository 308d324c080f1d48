"""The page of results: scores side by side, and what the load tool said."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.foreign.compare import Comparison
from benchmarks.foreign.load import OUTPUT_TOKENS, PROMPT_TOKENS, Figures
from benchmarks.harness import Report
from experiments.pairs import Pair

HEAD = (
    "Tools as they come from the package index, run against `turnout serve` with the {pair} in float32. Written by"
    " `make check-foreign`, which fails where scores differ by more than their standard error or a request fails."
)
SCORES = (
    "{version}. The same {count} held-out problems (middle grade, `benchmarks/foreign/tasks`) with the tool's own"
    " Hugging Face backend and with its clients of the endpoint. `worked`: the sum is worked out greedily, and the last"
    " number must be right. `chosen`: of the right working and three with a slip in one step, the right one must be the"
    " likeliest; what is scored comes from `echo` and `logprobs` of `/v1/completions`. `{pool}` is the pair, which"
    " decodes speculatively: its answers are to be the large model's."
)
LOADS = (
    "{version}. Streamed chats of {prompt} synthetic tokens, {output} tokens each, the pair's own tokenizer. First"
    " token and gaps between tokens as the tool measured them: median and 95th percentile, milliseconds. It shares the"
    " machine with the server, and they show that it works rather than how fast it is."
)
BY_HAND = """\
With a pool `chat` of your own, whose tokenizer lies in `/models/large`, from an environment with the tools:

```console
$ lm_eval run --tasks gsm8k_cot_zeroshot --apply_chat_template --model local-completions --model_args \\
    model=chat,base_url=http://localhost:8000/v1/completions,tokenizer=/models/large,num_concurrent=8
$ guidellm run --backend kind=openai_http,target=http://localhost:8000,model=chat --tokenizer \\
    kind=huggingface_auto,model=/models/large --data kind=synthetic_text,prompt_tokens=64,output_tokens=32 \\
    --profile kind=concurrent,streams=8 --constraint kind=max_requests,count=100
```

lm-evaluation-harness sends prompts as token ids by default, and with a chat template it has to: in the text of a
prompt, `/v1/completions` takes the spelling of a special token for ordinary characters.
"""


def page(
    machine: dict[str, str],
    versions: dict[str, str],
    count: int,
    comparisons: list[Comparison],
    loads: list[tuple[str, Figures]],
    pair: Pair,
) -> Report:
    """The report.

    Args:
        machine: what it ran on.
        versions: of the tools.
        count: problems of a task.
        comparisons: one for each row of scores.
        loads: model and figures for each row of load.
        pair: that was served.
    """
    report = Report("Foreign evaluation and load tools", HEAD.format(pair=pair.title), machine=machine)
    report.section("lm-evaluation-harness")
    report.text(SCORES.format(version=versions["lm-eval"], count=count, pool=pair.pool))
    report.table(
        None,
        comparisons,
        {
            "task": lambda row: row.task,
            "served as": lambda row: row.served_as,
            "asked through": lambda row: row.backend,
            "own backend": lambda row: f"{row.reference.score:.1%} ± {row.reference.stderr:.1%}",
            "served": lambda row: f"{row.served.score:.1%}",
            "same text": lambda row: f"{row.same_texts} of {len(row.reference.texts)}" if row.reference.texts else None,
            "largest difference, nats": lambda row: f"{row.logprob_gap:.1e}" if row.reference.logprobs else None,
        },
    )
    report.section("GuideLLM")
    report.text(LOADS.format(version=versions["guidellm"], prompt=PROMPT_TOKENS, output=OUTPUT_TOKENS))
    report.table(
        "loads",
        [{"model": model, **asdict(figures)} for model, figures in loads],
        {
            "model": lambda row: row["model"],
            "streams": lambda row: row["streams"],
            "requests": lambda row: row["successful"],
            "errors": lambda row: row["errored"],
            "cut off": lambda row: row["incomplete"],
            "tokens": lambda row: row["output_tokens"],
            "first token": lambda row: "{:.0f} / {:.0f}".format(*row["ttft_ms"]),
            "gap": lambda row: "{:.0f} / {:.0f}".format(*row["itl_ms"]),
            "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
        },
    )
    report.section("By hand")
    report.text(BY_HAND.strip())
    report.failures += _failures(comparisons, loads)
    return report


def _failures(comparisons: list[Comparison], loads: list[tuple[str, Figures]]) -> list[str]:
    found = [
        f"{each.task} of {each.served_as} through {each.backend}: the score differs from the tool's own backend's"
        for each in comparisons
        if not each.agrees
    ]
    lost = sum(each.errored + each.incomplete for _, each in loads)
    return [*found, f"{lost} requests failed"] if lost else found
