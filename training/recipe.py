"""How each demo model is built and trained: one frozen record per model, every number in one place."""

from dataclasses import dataclass, replace

from training.layer_skip import MIN_LAYERS, LayerSkip
from training.tokenizer import MAX_POSITIONS, VOCABULARY_SIZE
from turnout.model_location import DEMO_PREFIX

SHIPPED = ("small", "large")


@dataclass(frozen=True)
class Shares:
    """What part of the tokens each kind of text gets, and how often chats carry more than one question.

    Attributes:
        python: part of the rows that are pieces of Python modules.
        chats: kind of question and its part of the tokens of all other rows.
        system_message: chance that a chat begins with one.
        second_turn: chance of a second question.
    """

    python: float = 0.12
    chats: tuple[tuple[str, float], ...] = (("arithmetic", 0.8), ("lists", 0.2))
    system_message: float = 0.08
    second_turn: float = 0.08


@dataclass(frozen=True)
class Recipe:
    """Shape, schedule, batch and texts of one model.

    Learning rate: warm-up, stable, straight line to zero; then, where `finish_steps` is not 0, a second
    line to zero from `finish_peak` of the peak over the last steps.
    Weights are drawn from the seed, or those of another recipe's or a shipped model where `begins_from` names one.
    `layer_skip` trains the model to be left early; None: every row runs through all layers and is judged there.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    total_steps: int
    decay_steps: int
    warmup_steps: int = 50
    finish_steps: int = 0
    finish_peak: float = 0.5
    curriculum_steps: int = 400
    num_rows: int = 32
    row_len: int = 256
    muon_lr: float = 0.02
    adamw_lr: float = 0.004
    weight_decay: float = 0.01
    seed: int = 20
    autocast: bool = True
    vocabulary_size: int = VOCABULARY_SIZE
    max_positions: int = MAX_POSITIONS
    begins_from: str = ""
    shares: Shares = Shares()
    layer_skip: LayerSkip | None = None

    def __post_init__(self) -> None:
        if not 0 < self.warmup_steps + self.decay_steps + self.finish_steps <= self.total_steps:
            raise ValueError("warmup_steps + decay_steps + finish_steps must be between 1 and total_steps")
        if self.layer_skip is not None and self.num_layers < MIN_LAYERS:
            raise ValueError(f"layer_skip needs num_layers of at least {MIN_LAYERS}, got {self.num_layers}")

    def lr_scale(self, step: int) -> float:
        """Factor on the peak learning rates at a step counted from 0."""
        first_end = self.total_steps - self.finish_steps
        if step >= first_end:
            return self.finish_peak * (self.total_steps - step) / self.finish_steps
        warming = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (first_end - step) / max(1, self.decay_steps)
        return min(warming, 1.0, left)


_LARGE = Recipe(
    name="large-sums",
    hidden_size=256,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=704,
    total_steps=940,
    decay_steps=200,
    finish_steps=180,
)
_SMALL = Recipe(
    name="small-sums",
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=384,
    total_steps=630,
    decay_steps=75,
    curriculum_steps=200,
)
# Sums stay the largest part: a rate and a share that let them go unlearn them within some hundred steps.
_ALL_KINDS = Shares(
    python=0.1,
    chats=(("arithmetic", 0.42), ("edits", 0.3), ("passages", 0.12), ("templates", 0.08), ("lists", 0.08)),
)
# A small model that is nearly as good at sums leaves nothing to decide, and edits are where its drafts are worth most.
_FEWER_SUMS = Shares(
    python=0.1,
    chats=(("arithmetic", 0.2), ("edits", 0.44), ("passages", 0.16), ("templates", 0.12), ("lists", 0.08)),
)


def _broadened(base: Recipe, shares: Shares, total_steps: int, decay_steps: int, finish_steps: int) -> Recipe:
    """The second course, on every kind of question and in longer rows, for a model that has learned sums."""
    return replace(
        base,
        name=base.name.removesuffix("-sums"),
        begins_from=base.name,
        shares=shares,
        seed=base.seed + 1,
        num_rows=16,
        row_len=512,
        curriculum_steps=0,
        muon_lr=0.01,
        adamw_lr=0.002,
        total_steps=total_steps,
        decay_steps=decay_steps,
        finish_steps=finish_steps,
    )


_BROAD_SMALL = _broadened(_SMALL, _FEWER_SUMS, 900, 300, 300)
_BROAD_LARGE = _broadened(_LARGE, _ALL_KINDS, 1600, 500, 500)
# In place of the course before, on the same texts: what it costs the whole model is seen by comparing the two.
_LEFT_EARLY = replace(_BROAD_LARGE, name="large-exits", layer_skip=LayerSkip())
# A short third course for a pair that is not shipped. What was learned is kept by a part of the texts before.
_SHEETS = Shares(python=0.0, chats=(("worksheets", 0.76), ("arithmetic", 0.14), ("edits", 0.1)))


def _on_worksheets(base: Recipe, total_steps: int) -> Recipe:
    """The course on worksheets, from a shipped model."""
    return replace(
        base,
        name=f"{base.name}-worksheets",
        begins_from=f"{DEMO_PREFIX}{base.name}",
        shares=_SHEETS,
        seed=base.seed + 1,
        num_rows=8,
        row_len=1024,
        total_steps=total_steps,
        decay_steps=total_steps // 2,
        finish_steps=0,
    )


WORKSHEETS = (_on_worksheets(_BROAD_SMALL, 700), _on_worksheets(_BROAD_LARGE, 350))
# Recipes whose model can be shipped as the large one.
LARGE = (_BROAD_LARGE.name, _LEFT_EARLY.name)
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (_SMALL, _LARGE, _BROAD_SMALL, _BROAD_LARGE, _LEFT_EARLY, *WORKSHEETS)
}
