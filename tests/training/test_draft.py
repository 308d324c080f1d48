"""Draft models cut from a target: what is cut, which layers, what training brings, and that a killed run continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils.logging import disable_progress_bar

from decoding.drafters.base import DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.lengths.fixed import FixedLength
from decoding.sequence import Sequence
from tests.engine.test_text_side import VISION
from tests.engine.test_unlisted import config_of
from tests.training.draft_target import ENGINE, WEAK, load_tiny, questions, save_tiny, tiny_model, tiny_plan
from training.draft.answers import TargetAnswers, collect
from training.draft.layers import eliminate_layers
from training.draft.lessons import SoftLoss, batches_of, chain_rounds
from training.draft.measure import DraftEngine
from training.draft.plan import DraftPlan, bundled_questions, text_rows
from training.draft.run import train_draft
from training.draft.shapes import candidate_depths, judged, predicted_speedup
from training.draft.student import Student, cut, cut_config
from training.draft.vocabulary import Sizes, frequency_order, kept_ids, mbsu, sweep
from training.fitting import fit
from training.head_runs import Questions
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

DEPTH = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=20)


@pytest.fixture(scope="module", autouse=True)
def short_races() -> Iterator[None]:
    """Speeds, which no test asserts, are measured on one prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.draft.run.WALL_CLOCK_PROMPTS", 1)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    return save_tiny(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def everything(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole run, with its target's answers to prompts to train on and its greedy ones to others."""
    place = tmp_path_factory.mktemp("runs")

    async def make() -> dict[str, Any]:
        target, plan = load_tiny(folder), tiny_plan()
        trained = await train_draft(target, plan, ENGINE, place / "whole")
        answers, heldout = (shards(place / "whole" / name) for name in ("answers", "heldout"))
        await target.close()
        return {"answers": answers, "heldout": heldout, "trained": trained, "place": place}

    return asyncio.run(make())


def shards(folder: Path) -> TargetAnswers:
    """Everything that is kept in a folder."""
    found = [TargetAnswers.load(file) for file in sorted(folder.iterdir())]
    return TargetAnswers.joined([each for each in found if each is not None])


def whole_student(model: Any) -> Student:
    return Student(model, torch.arange(model.config.vocab_size))


def answers_of(rows: list[tuple[list[int], list[int]]]) -> TargetAnswers:
    """Answers whose target was sure of every token."""
    tokens = torch.tensor([token for _, answer in rows for token in answer])
    return TargetAnswers(
        torch.tensor([len(prompt) for prompt, _ in rows]),
        torch.tensor([len(answer) for _, answer in rows]),
        torch.tensor([token for prompt, _ in rows for token in prompt]),
        tokens,
        tokens[:, None],
        torch.zeros(len(tokens), 1),
        torch.zeros(0, dtype=torch.float64),
    )


def test_the_memory_bound_speedup_is_the_papers() -> None:
    assert mbsu(2.5, 4, 0.05) == pytest.approx(2.5 / 1.2)
    assert mbsu(2.5, 4, 0.05) == pytest.approx(2.083, abs=5e-4)


def test_rounds_of_a_chain_by_hand() -> None:
    right = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    # Two are right and the third is not; four are right; one is left, which is the target's: no chain.
    assert chain_rounds(right[:9], [9], 4) == [2, 4]
    # The second answer begins with a mistake, and then has room for one token.
    assert chain_rounds(right, [9, 3], 4) == [2, 4, 0, 1]
    assert predicted_speedup(tau=3.0, depth=4, row_s=1.0, target_row_s=10.0, target_chain_s=11.0) == 2.0


def test_bytes_count_the_layers_and_the_rows_of_the_head_that_are_kept() -> None:
    model = tiny_model()
    layers = sum(each.numel() for each in model.model.layers.parameters()) + 32
    assert Sizes.of(model).read() == layers + 261 * 32
    assert Sizes.of(model).read(100) == layers + 100 * 32
    assert Sizes.of(cut(model, [0, 2])).read(0) == (layers - 32) // 2 + 32


def test_chosen_layers_are_copied_exactly() -> None:
    model = tiny_model()
    student = cut(model, [0, 2])
    theirs, ours = model.state_dict(), student.state_dict()
    assert len(student.model.layers) == 2
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name.replace("layers.1.", "layers.2.")])
    ids = torch.arange(12)[None]
    assert torch.equal(cut(model, range(4))(ids).logits, model(ids).logits)
    for wrong in ([], [2, 0], [0, 0], [0, 4], [-1, 2]):
        with pytest.raises(TurnoutError, match="layers: must be rising numbers from 0 to 3"):
            cut(model, wrong)


def test_settings_that_list_a_value_for_each_layer_keep_those_of_the_chosen() -> None:
    config = tiny_model().config
    config.layer_types = ["full_attention", "sliding_attention", "full_attention", "chunked_attention"]
    config.eos_token_id = [1, 2, 3, 4]
    made = cut_config(config, [1, 3])
    assert made.layer_types == ["sliding_attention", "chunked_attention"]
    assert (made.num_hidden_layers, made.eos_token_id) == (2, [1, 2, 3, 4])
    assert config.num_hidden_layers == 4


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama4_text"])
@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
def test_layers_with_experts_and_without_keep_theirs(kind: str, layers: list[int]) -> None:
    """The first has none in either; the configuration says so by layers' numbers."""
    model = random_model(config_of(kind), seed=1, spread=0.2)
    student = cut(model, layers)
    ids = torch.arange(1, 20)[None]
    if layers == [0, 1]:
        assert torch.equal(student(ids).logits, model(ids).logits)
    has_experts = [any("experts" in name for name in layer.state_dict()) for layer in student.model.layers]
    assert has_experts == [layer == 1 for layer in layers]


def test_layers_that_say_least_are_removed_first(everything: dict[str, Any]) -> None:
    model = tiny_model(weak=0.0)
    student = whole_student(model)
    steps = eliminate_layers(student, everything["answers"], 1)
    assert {step["removed"] for step in steps[:2]} == set(WEAK)
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[1]["layers"] == [0, 2]
    assert steps[2]["kl"] > 0.1
    assert len(model.model.layers) == 4


async def test_a_draft_of_all_layers_has_every_token_accepted(folder: Path, everything: dict[str, Any]) -> None:
    target, plan = load_tiny(folder), tiny_plan()
    heldout = target.source(plan.questions.heldout, GREEDY, 0)
    whole = await _acceptance(target, cut(tiny_model(), range(4)), torch.arange(261), heldout)
    assert whole.by_depth == [1.0] * DEPTH
    assert whole.accepted > DEPTH - 0.5  # chains at an answer's end have less room
    few = await _acceptance(target, cut(tiny_model(), range(4)), torch.arange(40), heldout)
    covered = chain_rounds(everything["heldout"].tokens < 40, everything["heldout"].lengths.tolist(), DEPTH)
    assert few.accepted == pytest.approx(sum(covered) / len(covered), abs=0.35)
    assert few.accepted < DEPTH
    await target.close()


async def test_a_head_of_all_ids_drafts_what_the_model_does(folder: Path) -> None:
    target = load_tiny(folder)
    trees: dict[int, list[tuple[int, ...]]] = {}
    for size in (0, 60, 261):
        draft = DraftEngine(target, cut(tiny_model(), [0, 2]), torch.arange(size or 1), ENGINE)
        if not size:
            draft.model.draft_vocabulary = None
        trees[size] = []
        for start in range(6):
            seq = Sequence([start, 70, 101], SamplingParams(temperature=0.0), 0)
            tree = await draft.model.propose(seq, ModelChainDrafter(), DraftBudget(DEPTH, DEPTH), FixedLength())
            trees[size].append(tuple(tree.tokens))
            draft.model.release(seq)
        await draft.close()
    await target.close()
    assert trees[261] == trees[0] != trees[60]
    assert all(token < 60 for tree in trees[60] for token in tree)


async def _acceptance(target: Any, student: Any, kept: torch.Tensor, source: Any) -> Any:
    draft = DraftEngine(target, student, kept, ENGINE)
    try:
        return await draft.acceptance(source, DEPTH)
    finally:
        await draft.close()


def test_training_brings_acceptance_and_so_do_the_targets_layers(everything: dict[str, Any]) -> None:
    stages = {stage["stage"]: stage["accepted"] for stage in everything["trained"].report["stages"]}
    fresh = random_model(cut(tiny_model(), [0, 2]).config, seed=5, spread=0.25)
    without = judged(whole_student(fresh), everything["heldout"], DEPTH) - 1
    assert stages["distillation"] > stages["initial"] + 0.1
    assert stages["initial"] > without + 0.2


def test_the_targets_own_answers_teach_more_than_other_texts(everything: dict[str, Any]) -> None:
    answers, generator = everything["answers"], torch.Generator().manual_seed(0)
    other = answers.tokens[torch.randperm(len(answers.tokens), generator=generator)]
    texts = TargetAnswers(**{**vars(answers), "tokens": other, "top_ids": other[:, None]})
    texts = TargetAnswers(**{**vars(texts), "top_logprobs": torch.zeros(len(other), 1)})
    found = []
    for lessons in (answers, texts):
        student = whole_student(cut(tiny_model(), [0, 2]))
        loss = SoftLoss(student, lessons, 1024)
        fit(student.trained, loss, len(loss), tiny_plan(steps=15).schedule(1.0))
        found.append(judged(student, everything["heldout"], DEPTH))
    assert found[0] > found[1]


def test_the_report_follows_from_what_was_measured(everything: dict[str, Any]) -> None:
    trained = everything["trained"]
    report, ids = trained.report, trained.vocabulary.ids
    assert report["layers"] == report["elimination"][1]["layers"] == [0, 2]
    own, target = Sizes.of(trained.model), Sizes.of(tiny_model())
    assert report["c"] == pytest.approx(own.read(len(ids)) / target.read())
    assert report["mbsu"] == pytest.approx(mbsu(1 + report["accepted"], DEPTH, report["c"]))
    assert report["vocabulary"]["ids"] == len(ids)
    table = report["vocabulary"]["sweep"]
    assert [row["ids"] for row in table] == [64, 128, 256, 261]
    assert max(table, key=lambda row: row["mbsu"])["ids"] == len(ids)
    assert 256 in ids  # ends the answer
    assert table[-1]["coverage"] == 1.0
    assert table[-1]["tau"] == pytest.approx(1 + report["stages"][-1]["accepted"], abs=0.2)


async def test_a_killed_run_continues_to_the_same_draft(
    folder: Path, everything: dict[str, Any], tmp_path: Path
) -> None:
    class KilledError(Exception):
        pass

    for stage in ("answering", "distillation"):
        target = load_tiny(folder)

        def kill(what: str, done: int, total: int, stage: str = stage) -> None:
            if what.startswith(stage) and done >= total // 2:
                raise KilledError

        with pytest.raises(KilledError):
            await train_draft(target, tiny_plan(), ENGINE, tmp_path, kill)
        await target.close()
    (tmp_path / "distillation.partial").write_bytes(b"half")  # what a kill leaves of a file that was being written
    target = load_tiny(folder)
    resumed = await train_draft(target, tiny_plan(), ENGINE, tmp_path)
    await target.close()
    for name, tensor in everything["trained"].model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert torch.equal(resumed.vocabulary.ids, everything["trained"].vocabulary.ids)
    timed = ("shapes", "answers", "tokens_per_second", "stages")  # hold times
    one, other = ({**each.report, **dict.fromkeys(timed)} for each in (everything["trained"], resumed))
    assert one == other


async def test_a_run_folder_belongs_to_one_plan(folder: Path, everything: dict[str, Any]) -> None:
    target = load_tiny(folder)
    with pytest.raises(TurnoutError, match="holds a run with other settings"):
        await train_draft(target, tiny_plan(steps=31), ENGINE, everything["place"] / "whole")
    await target.close()


async def test_shards_are_kept_with_the_time_they_took_and_damaged_ones_answered_again(
    folder: Path, tmp_path: Path
) -> None:
    target, plan = load_tiny(folder), tiny_plan()
    short = GREEDY.model_copy(update={"max_tokens": 4})
    sources = [target.source(plan.questions.heldout, short, seed) for seed in range(3)]
    whole = await collect(target.model, sources, tmp_path)
    assert len(whole) == 24
    assert torch.equal(whole.best, whole.tokens)
    some = await collect(target.model, sources, tmp_path, seconds=float(whole.seconds[:2].sum()))
    assert len(some) == 16  # time ends the answers after a shard
    files = await asyncio.to_thread(lambda: list(tmp_path.iterdir()))
    assert len(files) == 3
    files[0].write_bytes(files[0].read_bytes()[:-7])
    again = await collect(target.model, sources, tmp_path)
    await target.close()
    assert torch.equal(again.tokens, whole.tokens)
    assert TargetAnswers.load(files[0]) is not None


def test_places_that_predict_an_answer() -> None:
    answers = answers_of([([7, 8], [1, 2, 3]), ([9], [4])])
    [batch] = batches_of(answers, 100)
    assert batch.rows.tolist() == [[9, 4, 0, 0, 0], [7, 8, 1, 2, 3]]
    assert batch.places.tolist() == [0, 6, 7, 8]
    assert answers.tokens[batch.targets].tolist() == [4, 1, 2, 3]
    assert [len(each.rows) for each in batches_of(answers, 5)] == [1, 1]


def test_the_loss_is_the_cross_entropy_with_what_the_target_found_probable() -> None:
    model = tiny_model()
    ids = torch.tensor([[5, 6, 7]])
    answers = answers_of([([5, 6], [7])])
    seen = {"top_ids": torch.tensor([[7, 9, 200]]), "top_logprobs": torch.tensor([[0.5, 0.2, 0.3]]).log()}
    top = TargetAnswers(**{**vars(answers), **seen})
    kept = torch.arange(100)
    logprobs = model(ids).logits[0, 1, :100].log_softmax(-1)
    picked = torch.tensor([0])
    soft = SoftLoss(Student(model, kept), top, 64)(picked)
    torch.testing.assert_close(soft, -(0.5 * logprobs[7] + 0.2 * logprobs[9]))  # 200 is not kept
    mixed = SoftLoss(Student(model, kept), top, 64, hard=0.25)(picked)
    torch.testing.assert_close(mixed, 0.75 * soft - 0.25 * logprobs[7])


def test_ids_are_ordered_by_how_probable_the_target_found_them() -> None:
    answers = answers_of([([1], [3, 3, 2])])
    probs = torch.tensor([[0.6, 0.4], [0.9, 0.05], [0.7, 0.1]])
    top = torch.tensor([[3, 4], [3, 4], [2, 5]])
    seen = TargetAnswers(**{**vars(answers), "top_ids": top, "top_logprobs": probs.log()})
    assert frequency_order(seen, 7, frozenset({6, 99})).tolist() == [6, 3, 2, 4, 5, 0, 1]
    assert kept_ids(torch.tensor([6, 3, 2]), 2).tolist() == [3, 6]


def test_every_size_of_head_is_judged_as_if_it_were_the_drafts(everything: dict[str, Any]) -> None:
    model, heldout = cut(tiny_model(), [0, 2]), everything["heldout"]
    order = frequency_order(everything["answers"], 261, frozenset({256}))
    for row in sweep(whole_student(model), heldout, order, DEPTH, Sizes.of(tiny_model())):
        student = Student(model, kept_ids(order, int(row["ids"])))
        assert row["tau"] == pytest.approx(judged(student, heldout, DEPTH))


def test_plain_text_is_learnt_token_by_token(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("ab" * 200, encoding="utf-8")
    target = load_tiny(folder)
    rows = text_rows(file, target.tokenizer)
    asyncio.run(target.close())
    assert rows.lengths.tolist() == [255, 143]
    assert (len(rows.prompts), len(rows.tokens)) == (2, 398)
    file.write_text("a", encoding="utf-8")
    with pytest.raises(TurnoutError, match=r"text: .* at least two tokens"):
        text_rows(file, target.tokenizer)


def test_bundled_prompts_are_several_hundred_and_apart() -> None:
    found = bundled_questions()
    assert 250 < len(found.training) < 400
    assert not {each.text for each in found.training} & {each.text for each in found.heldout}
    assert any("\ndef average(numbers):\n" in each.text for each in found.training + found.heldout)


def test_candidates_are_a_few_small_parts_of_the_target() -> None:
    assert candidate_depths(30) == [2, 4, 6, 9]
    assert candidate_depths(2) == [1]
    assert json.loads(json.dumps(candidate_depths(4))) == [1]


async def test_a_draft_is_cut_from_the_text_side_of_a_wrapper(tmp_path: Path) -> None:
    torch.manual_seed(1)
    text = llama_config(num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    config = AutoConfig.for_model("llava", text_config=text.to_dict(), vision_config=VISION)
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = load_tiny(tmp_path)
    few = Questions(questions().training[:2], questions().heldout[:1])
    plan = DraftPlan(few, layers=1, steps=1, temperatures=(1.0,), max_tokens=4)
    trained = await train_draft(target, plan, ENGINE, tmp_path / "run")
    assert (trained.model.config.model_type, trained.model.config.num_hidden_layers) == ("llama", 1)
    await target.close()


def test_a_saved_draft_is_an_ordinary_checkpoint(folder: Path, everything: dict[str, Any], tmp_path: Path) -> None:
    from training.draft.export import export

    about = {"identity": "i", "digest": "d", "name": "tiny"}
    for _ in range(2):  # the second replaces the first
        report = export(everything["trained"], folder, about, torch.float32, tmp_path / "draft")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    for name, tensor in everything["trained"].model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert json.loads((tmp_path / "draft" / "draft.json").read_text(encoding="utf-8")) == report
    assert "Draft model for tiny" in (tmp_path / "draft" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
