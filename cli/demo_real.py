"""`make demo-real`: a chat with SmolLM2-135M-Instruct, alone and as the large half of a pair; then all stops."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from cli.ask import connect
from cli.demo import main
from cli.provenance import Marked, summary
from experiments import real_model
from experiments.pairs import REAL, open_pair
from turnout.calls import ChatMessage
from turnout.errors import TurnoutError
from turnout.free_ports import on_free_ports

if TYPE_CHECKING:
    from rich.console import Console

    from turnout.config import TurnoutConfig

TURNS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that checks whether a string is a palindrome.",
    "Explain in two sentences what your function does.",
)
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 160}


def real_config(paired: bool) -> TurnoutConfig:
    """The real model, alone or with its draft, on two ports that are free now.

    Raises:
        TurnoutError: what it serves is not there; names the command that makes it.
    """
    return on_free_ports(open_pair(REAL).config if paired else real_model.alone())


def chat(out: Console, address: str, pool: str, method: str) -> None:
    """Ask the turns one after the other, each with all that was said before it, and show the answers as they come.

    Raises:
        TurnoutError: the server refuses, or does not answer.
    """
    said: list[ChatMessage] = []
    with connect(address) as client:
        models = client.models()
        for text in TURNS:
            said.append(ChatMessage("user", text))
            out.print(f"\n> {text}", markup=False)
            marked = Marked(out, pool, marks=method != "plain")
            marked.announce(models)
            answer = ""
            with client.stream(messages=tuple(said), model=pool, method=method, **SAMPLING) as stream:
                for chunk in stream:
                    answer += chunk.text
                    marked.show(chunk)
                usage = stream.usage
            marked.finish()
            said.append(ChatMessage("assistant", answer))
            if usage is not None:
                speed = usage.completion_tokens / usage.wall_s
                out.print(f"{summary(usage)}; {speed:.0f} tokens/s", style="dim")


def serve(out: Console, paired: bool) -> None:
    """Start a server, chat, stop it.

    Raises:
        TurnoutError: as for `real_config` and `chat`, or the server did not start.
    """
    config = real_config(paired)
    started = time.monotonic()
    with out.status("starting Ray, Serve and the model"):
        from deployments.app import start

        server = start(config)
    try:
        pool = next(iter(config.pools))
        out.print(f"serving after {time.monotonic() - started:.1f} s: gRPC {server.grpc_address}")
        chat(out, server.grpc_address, pool, "speculative" if paired else "plain")
    finally:
        with out.status("stopping"):
            server.stop()


def run(out: Console) -> None:
    """Chat with the model alone, then with the pair, where its draft is there.

    Raises:
        TurnoutError: the model is not there, or a server did not start or answer.
    """
    started = time.monotonic()
    real_model.model_folder()
    out.print(f"{real_model.TITLE} alone, in bfloat16, greedy")
    serve(out, paired=False)
    try:
        real_model.draft_folder()
    except TurnoutError:
        out.print("\nno draft model yet: to chat with a pair, train one, and run this again:")
        out.print(real_model.training_command(), markup=False, soft_wrap=True)
    else:
        out.print(f"\n{real_model.TITLE} with its draft, speculative; marked: tokens that were not drafted")
        out.print("in bfloat16 a near tie can fall otherwise than in the chat above")
        serve(out, paired=True)
    out.print(f"\nall of it in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main(run))
