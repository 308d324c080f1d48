"""The demo models' tokenizer: byte-level pairs, one token per digit, chat marks and the chat template."""

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.data import arithmetic, lists
from training.data.python_sources import read_sources

VOCABULARY_SIZE = 1024
PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT)
MAX_POSITIONS = 2048
_SAMPLE_PROBLEMS = 4000
_SAMPLE_SEED = "tokenizer-sample"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<|system|>' + message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ raise_exception('role must be system, user or assistant, got ' + message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _sample_texts() -> list[str]:
    rng = random.Random(_SAMPLE_SEED)
    texts: list[str] = []
    for _ in range(_SAMPLE_PROBLEMS):
        for draw in (arithmetic.draw_training, lists.draw_training):
            problem = draw(rng, rng.choice(arithmetic.DIFFICULTIES))
            texts.extend((problem.prompt, problem.answer))
    return texts + read_sources()


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of exactly VOCABULARY_SIZE tokens learned from the training texts; deterministic."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_sample_texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_or_train(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in `folder`; trains and saves it there first when the folder has none."""
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_tokenizer().save_pretrained(folder)
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded
