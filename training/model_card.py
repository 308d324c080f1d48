"""The demo models' card, written from the evaluation and the training facts: `python -m training.model_card`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from training.data import arithmetic, lists
from training.data.mixture import FINAL_GRADES
from training.evaluate_demo import EVALUATION
from training.evaluation import Accuracy
from training.export_demo import DEMO_FOLDER, TRAINING_FACTS
from training.recipe import SHIPPED

CARD = "MODEL_CARD.md"

_INTRODUCTION = """\
# The demo models

Two Llama-shaped language models with one vocabulary, made so that Turnout can be tried, tested and measured
on any machine without a download. They are teaching aids: they work out small sums, handle short lists and
continue Python, and they know nothing else. Load either folder with `AutoModelForCausalLM` and `AutoTokenizer`.
"""

_DATA = """\
## What they learned from

| share of tokens | text | taught tokens |
| --- | --- | --- |
| about 70% | arithmetic with worked steps, five grades, generated (`training/data/arithmetic.py`) | the answer |
| about 18% | list and letter tasks with short work, generated (`training/data/lists.py`) | the answer |
| about 12% | modules of the Python standard library, read from the interpreter that trains | all |

A chat document is `<|user|>question<|assistant|>answer<|end|>`; about one in twelve begins with a system
message, and as many carry a second question. Grades of arithmetic (operands are drawn evenly from the range;
products are by one digit; no intermediate result is negative):

{grades}

The grades had {weights} of the arithmetic problems once the easy start was over. The middle one
had the most, with two-digit operands only, so accuracy need not fall evenly from grade to grade.

One problem in eight, chosen by a hash of its content and not of its wording, is held out: training never sees
it, and every figure below comes from such problems.

Tokenizer: byte-level pairs, {vocabulary} tokens, every digit by itself, learned from the same texts; any UTF-8
text survives a round trip. Special tokens: `<|pad|>`, `<|end|>`, `<|system|>`, `<|user|>`, `<|assistant|>`.
"""

_CLOSING = """\
## Limits

- Documents were at most {row_len} tokens long in training. The configuration allows {max_positions} positions, so
  that longer requests can be served and measured, but what either model writes beyond {row_len} is untrained.
- Only the phrasings of the generators were seen. Other wordings, numbers above three digits, division,
  brackets and negative results are outside what they learned.
- Training was short. Rows of the table with low shares mean what they say: the list tasks are mostly beyond the
  small model, and several beyond the large one.
- A right final number does not prove the work above it, and a wrong one comes with the same assurance.
- English words outside the generators' sentences and Python's comments are noise to them.

## Licences

The generated problems are part of this project. The Python sources come from the CPython standard library,
under the Python Software Foundation License Version 2; none of their text is shipped here, only weights and a
vocabulary learned from it.
"""


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _grades() -> str:
    rows = [
        [
            str(difficulty) + (" (middle)" if difficulty == arithmetic.MIDDLE_DIFFICULTY else ""),
            str(grade.num_operands),
            f"{grade.low} to {grade.high}",
            f"{grade.three_digit_share:.0%}",
            f"at most {grade.max_products}",
        ]
        for difficulty, grade in arithmetic.GRADES.items()
    ]
    return _table(["grade", "operands", "range", "three-digit operands", "products"], rows)


def _weights() -> str:
    shares = [f"{share:.0%}" for share in FINAL_GRADES]
    return ", ".join(shares[:-1]) + " and " + shares[-1]


def _training(facts: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for name in SHIPPED:
        recipe, fact = facts[name]["recipe"], facts[name]
        shape = f"{recipe['num_layers']} layers of {recipe['hidden_size']}"
        heads = f"{recipe['num_heads']} and {recipe['num_kv_heads']}"
        tokens = f"{fact['num_tokens'] / 1e6:.1f} M ({fact['num_taught_tokens'] / 1e6:.1f} M taught)"
        schedule = f"{fact['num_steps']} of {recipe['num_rows']} rows of {recipe['row_len']}"
        rows.append([name, f"{fact['num_parameters']:,}", shape, heads, tokens, schedule, f"{fact['minutes']:.0f}"])
    header = ["model", "parameters", "shape", "query and KV heads", "tokens", "steps", "minutes"]
    ratio = facts["large"]["num_parameters"] / facts["small"]["num_parameters"]
    return (
        "## Size and cost\n\n"
        f"{_table(header, rows)}\n\n"
        f"The large model has {ratio:.1f} times the parameters of the small one (all counted; input and output\n"
        "embeddings are tied). Both were trained on 2 CPU cores shared with other work, which is part of the minutes,\n"
        f"by `python -m training.train_demo --model {facts['large']['recipe']['name']} --compiled` and the same with "
        "`small`: Muon for the hidden\n"
        "matrices, AdamW for embeddings and norms, bfloat16 autocast, warm-up, stable and falling learning rate, easy\n"
        "grades first. The large one's rate then rose to half its peak for a last fall; that finish was added when a\n"
        "first look at held-out problems found it short of 90% at the middle grade, and the small one's length was\n"
        "chosen for the distance between the two. The table above is on other held-out problems, which played no part\n"
        "in either choice. All numbers are in `training/recipe.py`; weights are stored in bfloat16.\n"
        f"{_left_early(facts['large']['recipe'].get('layer_skip'))}"
    )


def _left_early(skip: dict[str, Any] | None) -> str:
    if skip is None:
        return ""
    return (
        "\nThe large one can be left early (LayerSkip): a step left its last layer out for "
        f"{skip['dropout']:.0%} of the rows, the\nothers for fewer, and taught its head behind every layer but the "
        "first, in turn, as well as the last.\n"
    )


def _cell(row: dict[str, Any]) -> str:
    accuracy = Accuracy(row["num_right"], row["num_problems"])
    low, high = accuracy.interval
    return f"{accuracy.share:.1%} ({low:.1%} to {high:.1%})"


def _accuracy(evaluation: dict[str, list[dict[str, Any]]]) -> str:
    small, large = ({(row["task"], row["difficulty"]): row for row in evaluation[name]} for name in SHIPPED)
    rows = [
        [task, str(difficulty), str(row["num_problems"]), _cell(row), _cell(large[task, difficulty])]
        for (task, difficulty), row in small.items()
    ]
    return (
        "## Held-out accuracy\n\n"
        "Greedy decoding in float32, share of right final answers with the 95% Wilson interval.\n"
        f"The grades of arithmetic are in a table below; in the other tasks a list of grade d has d + "
        f"{lists.list_len(0)} items.\n\n" + _table(["task", "grade", "problems", "small", "large"], rows) + "\n"
    )


def write_card(demo: Path) -> str:
    """The card's text from the two JSON files in the demo folder."""
    facts = json.loads((demo / TRAINING_FACTS).read_text(encoding="utf-8"))
    evaluation = json.loads((demo / EVALUATION).read_text(encoding="utf-8"))
    recipe = facts["large"]["recipe"]
    return "\n".join(
        (
            _INTRODUCTION,
            _accuracy(evaluation),
            _training(facts),
            _DATA.format(grades=_grades(), weights=_weights(), vocabulary=recipe["vocabulary_size"]),
            _CLOSING.format(row_len=recipe["row_len"], max_positions=recipe["max_positions"]),
        )
    )


def main(demo: Annotated[Path, typer.Option(help="Folder of the shipped models.")] = DEMO_FOLDER) -> None:
    """Write the card next to the models."""
    path = demo / CARD
    partial = path.with_name(CARD + ".partial")
    partial.write_text(write_card(demo), encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    typer.run(main)
