"""The folder of a finished draft model: checkpoint, tokenizer, vocabulary of drafts, report and card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from training.draft.run import TrainedDraft
from turnout.atomic_files import write_whole
from turnout.checkpoint_files import TEXT_FILES
from turnout.drafts import ABOUT

CARD = "README.md"


def export(trained: TrainedDraft, target: Path, about: dict[str, Any], dtype: torch.dtype, out: Path) -> dict[str, Any]:
    """Write an ordinary Hugging Face folder, whole or not at all; one that was there before is replaced.

    Args:
        trained: the draft.
        target: the target's folder.
        about: names the target: `identity`, `digest` and what else a reader should know.
        dtype: of the stored weights.
        out: the folder.

    Returns:
        The report, as it stands in the folder.

    Raises:
        OSError: it cannot be written.
    """
    report = {"format": 1, "trainer": "training.draft", "target": about, **trained.report}
    part, old = out.with_name(f".{out.name}.part"), out.with_name(f".{out.name}.old")
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    trained.model.to(dtype).save_pretrained(part)
    for pattern in TEXT_FILES:
        for file in sorted(target.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, part / file.name)
    trained.vocabulary.save(part)
    write_whole(part / ABOUT, (json.dumps(report, indent=2) + "\n").encode())
    write_whole(part / CARD, card(report).encode())
    if out.exists():
        out.rename(old)
    part.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    return report


def card(report: dict[str, Any]) -> str:
    """Return the model card of a draft, from its report."""
    target, sizes, speeds = report["target"], report["bytes_read"], report["tokens_per_second"]
    answers, last = report["answers"], report["stages"][-1]
    stages = "\n".join(
        f"| {stage['stage']} | {stage['steps']} | {stage.get('seconds', 0.0):.0f} | {stage['accepted']:.2f} |"
        for stage in report["stages"]
    )
    layers = ", ".join(map(str, report["layers"]))
    return f"""# Draft model for {target["name"]}

Drafts tokens for one target, which verifies them: alone it is not meant to answer. Made by `turnout train draft`
(paper #161, FastDraft; paper #189, VocabTrim).

- Target: {target["name"]}, identity `{target["identity"]}`.
- Layers: {layers} of the target's, then trained; embedding, head and tokenizer are the target's.
- Data: {answers["tokens"]} tokens of the target's own answers to {answers["answers"]} prompts.
- Ids that it drafts: {report["vocabulary"]["ids"]} (`draft_vocabulary.json`); other software reads the whole head.

| stage | steps | seconds | mean accepted tokens of a chain of {report["depth"]} |
| --- | --- | --- | --- |
{stages}

On {answers["heldout_tokens"]} held-out tokens, greedy: {report["accepted"]:.2f} of {report["depth"]} accepted,
{report["tau"]:.2f} tokens per forward of the target. It reads {sizes["draft"] / 1e6:.1f} MB per forward, the target
{sizes["target"] / 1e6:.1f} MB: memory-bound speed-up {report["mbsu"]:.2f}. Tokens per second where it was trained:
{speeds["plain"]:.1f} plain, {speeds["chain"]:.1f} with chains, {speeds["smartspec"]:.1f} with `smartspec`. The last
stage made {last.get("passes", 0.0):.1f} passes over the data. The target's license holds for its layers.
"""
