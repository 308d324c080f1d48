import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.fakes import ListText
from decoding.model import Decision, Readout
from decoding.switching.mean_entropy import MeanEntropySwitch
from decoding.switching.random_run import RandomRunSwitch, mean_runs
from decoding.switching.sentence import WORD, SentenceSwitch, SentenceTracker, sentence_marks


def owners(rule, rows, token=0) -> str:
    """Who writes each token when the rule sees these rows; a dropped token's row is used up."""
    written = ""
    for row in rows:
        writer = rule.active[0].upper()
        if rule.observe(token, row) is not Decision.DROP:
            written += writer
    return written


def entropies(*bits: float) -> list[Readout]:
    return [Readout(token=0, entropy_bits=value) for value in bits]


def runs(written: str) -> list[int]:
    return [len(list(group)) for _, group in itertools.groupby(written)]


def test_hand_example():
    rule = MeanEntropySwitch(window=2, min_stay=3, threshold=1.0)
    assert owners(rule, entropies(0.2, 1.4, 1.8, 0.5, 0.3, 0.4, 0.1)) == "SSSLLLS"


def test_effect_current_drops_the_token_that_tips():
    rule = MeanEntropySwitch(window=2, min_stay=3, threshold=1.0, effect="current")
    decisions = [rule.observe(0, row) for row in entropies(0.2, 1.4, 1.8, 0.5)]
    # After three kept tokens the fourth may tip: (1.8 + 0.5) / 2 > 1.
    assert decisions == [Decision.GO_ON] * 3 + [Decision.DROP]
    assert rule.active == "large"


def test_thresholds_at_the_extremes():
    rows = entropies(*[0.0, 3.0] * 20)
    assert owners(MeanEntropySwitch(window=5, min_stay=10, threshold=64.0), rows) == "S" * 40
    assert owners(MeanEntropySwitch(window=5, min_stay=10, threshold=-1.0), rows) == "S" * 10 + "L" * 30
    current = MeanEntropySwitch(window=5, min_stay=10, threshold=-1.0, effect="current")
    assert owners(current, rows) == "S" * 10 + "L" * 29
    start = MeanEntropySwitch(window=5, min_stay=1, threshold=64.0, active="large")
    assert owners(start, rows) == "L" + "S" * 39


def test_a_small_model_that_need_not_stay_writes_no_token_that_it_is_unsure_of():
    rule = MeanEntropySwitch(window=1, min_stay=2, min_stay_small=0, threshold=1.0, effect="current", clear=False)
    decisions = [rule.observe(0, row) for row in entropies(2.0, 3.0, 3.0, 0.5, 1.5, 0.2)]
    # Its first token is dropped; the large model stays for two, and its third is dropped; then again.
    go_on, drop = Decision.GO_ON, Decision.DROP
    assert decisions == [drop, go_on, go_on, drop, drop, go_on]
    bound = MeanEntropySwitch(window=1, min_stay=2, threshold=1.0, effect="current")
    assert owners(bound, entropies(2.0, 3.0, 0.5)) == "SSS"  # the published stay has it write both


def test_the_large_model_can_hand_back_without_a_token_to_drop():
    rule = MeanEntropySwitch(
        window=1, min_stay=1, min_stay_small=0, threshold=1.0, effect="current", effect_back="next"
    )
    decisions = [rule.observe(0, row) for row in entropies(0.1, 2.0, 0.5, 0.3, 2.0, 1.5, 0.2)]
    go_on, drop, stop = Decision.GO_ON, Decision.DROP, Decision.STOP
    assert decisions == [go_on, drop, stop, go_on, drop, go_on, stop]


def test_a_forced_token_neither_enters_the_window_nor_switches():
    """A structure allowed one token: 0 bits say nothing of a small model, and hand nothing back from a large one."""

    def rows(*bits: float | None) -> list[Readout]:
        return [Readout(entropy_bits=bit or 0.0, forced=bit is None) for bit in bits]

    rule = MeanEntropySwitch(window=2, min_stay=1, threshold=1.0)
    # Means: 0.8, then 1.3 of 0.8 and 1.8 with the forced ones passed over; with them 0.9 would not tip.
    assert owners(rule, rows(0.8, None, None, 1.8, 2.0)) == "SSSSL"
    held = MeanEntropySwitch(window=1, min_stay=1, threshold=1.0, active="large")
    assert owners(held, rows(None, None, None, 3.0, 0.5, 0.5)) == "LLLLLS"
    stays = MeanEntropySwitch(window=1, min_stay=3, threshold=1.0)
    assert owners(stays, rows(None, None, 2.0, 2.0)) == "SSSL"  # a forced token is a written one


def test_equality_does_not_tip_upwards_but_does_downwards():
    assert owners(MeanEntropySwitch(window=1, min_stay=1, threshold=1.0), entropies(1.0, 1.0)) == "SS"
    rule = MeanEntropySwitch(window=1, min_stay=1, threshold=1.0, active="large")
    assert owners(rule, entropies(1.0, 1.0)) == "LS"


def test_a_band_needs_a_lower_mean_to_go_back():
    rule = MeanEntropySwitch(window=1, min_stay=1, threshold=2.0, threshold_down=0.5)
    assert owners(rule, entropies(1.0, 2.1, 1.0, 0.6, 0.5, 1.9)) == "SSLLLS"


def test_the_window_is_cleared_only_where_two_models_would_mix():
    mixed = MeanEntropySwitch(window=3, min_stay=1, threshold=1.0, clear=False)
    clean = MeanEntropySwitch(window=3, min_stay=1, threshold=1.0)
    rows = entropies(4.0, 0.0, 0.0, 0.0)
    assert owners(mixed, rows) == "SLLL"  # the mean still holds the small model's 4.0: 2.0, then 4/3
    assert owners(clean, rows) == "SLSS"
    assert not MeanEntropySwitch(window=5, min_stay=5, threshold=0.0).clear


@given(
    bits=st.lists(st.floats(0, 10), max_size=120),
    window=st.integers(1, 8),
    min_stay=st.integers(1, 12),
    thresholds=st.tuples(st.floats(0, 10), st.floats(0, 10)),
    effect=st.sampled_from(["next", "current"]),
    cut=st.integers(0, 120),
)
def test_no_run_is_shorter_than_min_stay_and_state_survives_travel(bits, window, min_stay, thresholds, effect, cut):
    down, up = sorted(thresholds)

    def rule() -> MeanEntropySwitch:
        return MeanEntropySwitch(window=window, min_stay=min_stay, threshold=up, threshold_down=down, effect=effect)

    rows = entropies(*bits)
    written = owners(rule(), rows)
    assert all(length >= min_stay for length in runs(written)[:-1])
    travelling = rule()
    first = owners(travelling, rows[:cut])
    assert first + owners(pickle.loads(pickle.dumps(travelling)), rows[cut:]) == written


def test_a_row_without_entropy_is_an_error():
    with pytest.raises(ValueError, match="needs the entropy"):
        MeanEntropySwitch(window=1, min_stay=1, threshold=1.0).observe(0, Readout(token=0))


@pytest.mark.parametrize(("share", "mean_run", "min_stay"), [(0.3, 20, 10), (0.5, 4, 1), (0.43, 12.5, 10), (0.2, 5, 2)])
def test_random_runs_have_the_asked_share_and_lengths(share, mean_run, min_stay):
    rule = RandomRunSwitch(share=share, mean_run=mean_run, min_stay=min_stay, seed=3, position=10)
    written = owners(rule, [Readout()] * 150_000)
    lengths = runs(written)[:-1]
    assert min(lengths) >= min_stay
    assert written.count("L") / len(written) == pytest.approx(share, abs=0.02)
    assert sum(lengths) / len(lengths) == pytest.approx(mean_run, rel=0.04)


def test_random_runs_are_keyed():
    def written(seed: int) -> str:
        return owners(RandomRunSwitch(share=0.5, mean_run=4, min_stay=1, seed=seed, position=7), [Readout()] * 60)

    assert written(1) == written(1)
    assert len({written(seed) for seed in range(20)}) == 20
    starts = [written(seed)[0] for seed in range(400)]
    assert starts.count("L") == pytest.approx(200, abs=50)


@pytest.mark.parametrize(("start", "first"), [("small", "S"), ("large", "L")])
def test_random_runs_begin_with_the_model_they_are_given(start, first):
    def written(seed: int) -> str:
        rule = RandomRunSwitch(share=0.4, mean_run=8, min_stay=2, seed=seed, position=7, start=start)
        return owners(rule, [Readout()] * 40)

    answers = [written(seed) for seed in range(400)]
    assert {answer[0] for answer in answers} == {first}
    # Runs average 9.6 tokens of the small and 6.4 of the large model, so that 40 tokens hold more of the first.
    share = "".join(answers).count("L") / 16_000
    assert share < 0.37 if start == "small" else share > 0.43


def test_random_runs_at_the_ends_and_impossible_ones():
    for share, letter in ((0.0, "S"), (1.0, "L")):
        rule = RandomRunSwitch(share=share, mean_run=1, min_stay=10, seed=0, position=0)
        assert owners(rule, [Readout()] * 50) == letter * 50
        given = RandomRunSwitch(share=share, mean_run=1, min_stay=10, seed=0, position=0, start="small")
        assert owners(given, [Readout()] * 50) == letter * 50
    with pytest.raises(ValueError, match=r"runs of the large model average 4 tokens, below min_stay \(10\)"):
        mean_runs(0.1, 20, 10)


# ---- sentences ----


def tokenise(*texts: str) -> tuple[ListText, list[int]]:
    vocabulary = list(dict.fromkeys(texts))
    return ListText(vocabulary), [vocabulary.index(text) for text in texts]


def sentence_ends(*texts: str) -> str:
    """The stream with | after each token that ended a sentence and < before each that came after one."""
    tokens, ids = tokenise(*texts)
    marks, tracker = sentence_marks(tokens, len(tokens.texts)), SentenceTracker()
    shown = ""
    for token, text in zip(ids, texts, strict=True):
        mark = marks.get(token, WORD)
        shown += "<" if tracker.opens(mark) else ""
        shown += text + ("|" if tracker.feed(mark) else "")
    return shown


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("aa", ".", " bb", " cc", ".", " d"), "aa.| bb cc.| d"),
        (("So", " it", " is", "?", " Yes", "!"), "So it is?| Yes!|"),
        (("one", "\n", "two", "\n\n", "three"), "one\n|two\n\n|three"),
        (("pi", " is", " ", "3", ".", "14", ".", " Next"), "pi is 3.14.< Next"),
        (("pi", " is", " 3.14", " or", " so", "."), "pi is 3.14 or so.|"),
        (("it", " is", " ", "12", ".", " Next", "."), "it is 12.< Next.|"),
        (("it is 12. ", "Next"), "it is 12. |Next"),
        (("1", ".", " First", " thing", ".", "\n", "2", ".", " Second"), "1. First thing.|\n2. Second"),
        (("Steps", ":", "\n", " ", "10", ".", " Go"), "Steps:\n| 10. Go"),
        (("wait", ".", ".", ".", " Then", "."), "wait.|.. Then.|"),
        (("he said", '."', " Then", "..."), 'he said."| Then...|'),
        (("a.b", " and", " e.g", " x", "."), "a.b and e.g x.|"),
        (("the end. The start", " goes", "."), "the end. The start| goes.|"),
        (("\u4f60\u597d", "\u3002", "\u4f60\u597d", "\uff1f"), "\u4f60\u597d\u3002|\u4f60\u597d\uff1f|"),
        (("\n", "\n", " ", "word", "\n"), "\n\n word\n|"),
    ],
)
def test_sentence_ends(texts, expected):
    assert sentence_ends(*texts) == expected


def test_marks_leave_ordinary_words_out():
    tokens = ListText([" the", "!", "\n", "7", " ", "e.g", "\ufffd", "_x"])
    assert sentence_marks(tokens, 8) == {
        token: text.encode() for token, text in {1: "!", 2: "\n", 3: "7", 4: " ", 5: "e.g", 6: "\ufffd"}.items()
    }
    assert sentence_marks(tokens, 8) is sentence_marks(tokens, 8)


class ByteText(ListText):
    """One token a byte."""

    def __init__(self) -> None:
        super().__init__([])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def test_sentence_ends_are_found_in_characters_of_several_tokens():
    marks, tracker = sentence_marks(ByteText(), 256), SentenceTracker()
    text = "你好。Ja… 3。　1.5! "
    ended = [place for place, byte in enumerate(text.encode(), start=1) if tracker.feed(marks.get(byte, WORD))]
    assert [text.encode()[:end].decode() for end in ended] == ["你好。", "你好。Ja…", "你好。Ja… 3。", text[:-1]]


def sentence_rule(tokens: ListText, lead_tokens: int, probability: float = 1.0, end_ids=()) -> SentenceSwitch:
    return SentenceSwitch(
        lead_tokens=lead_tokens,
        lead_probability=probability,
        marks=sentence_marks(tokens, len(tokens.texts)),
        seed=5,
        position=3,
        end_ids=end_ids,
    )


def sentence_owners(rule: SentenceSwitch, ids: list[int]) -> str:
    """Who writes each token when both models write `ids`: a dropped token is written again."""
    written = ""
    for token in ids:
        writer = rule.active
        if rule.observe(token, Readout()) is Decision.DROP:
            assert rule.active != writer
            writer = rule.active
            assert rule.observe(token, Readout()) is not Decision.DROP
        written += writer[0].upper()
    return written


def test_scripted_stream():
    tokens, ids = tokenise("aa", ".", " bb", " cc", ".", " d")
    assert sentence_owners(sentence_rule(tokens, 1), ids) == "LSLSSL"
    assert sentence_owners(sentence_rule(tokens, 2), ids) == "LLLLSL"
    assert sentence_owners(sentence_rule(tokens, 10**6), ids) == "LLLLLL"
    assert sentence_owners(sentence_rule(tokens, 1, probability=0.0), ids) == "SSSSSS"


def test_the_leader_opens_after_a_number_too():
    tokens, ids = tokenise("is", " ", "3", ".", "14", ".", " Next", " one", ".", " d")
    assert sentence_owners(sentence_rule(tokens, 1), ids) == "LSSSSSLSSL"


def test_the_end_of_the_answer_is_honoured_whoever_writes_it():
    tokens, ids = tokenise("is", " ", "3", ".", "</s>")
    rule = sentence_rule(tokens, 1, end_ids=[ids[-1]])
    assert [rule.observe(token, Readout()) for token in ids][-1] is not Decision.DROP


def test_leading_is_a_keyed_coin_per_sentence():
    tokens, ids = tokenise("a", ".")
    stream = ids * 4_000
    led = sentence_owners(sentence_rule(tokens, 1, probability=0.3), stream)
    assert led[0::2].count("L") / 4_000 == pytest.approx(0.3, abs=0.03)
    assert set(led[1::2]) == {"S"}
    assert led == sentence_owners(pickle.loads(pickle.dumps(sentence_rule(tokens, 1, probability=0.3))), stream)
