"""Faults that the tests named with them must catch: at least one for each group of tests that was merged or cut."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of the source that breaks what tests promise.

    Attributes:
        name: what is wrong, in a few words.
        file: path from the root of the repository.
        old: text that occurs there once.
        new: what is put in its place.
        tests: arguments of pytest that select the tests; at least one of them must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


IDENTITY = "tests/conformance/test_identity.py"
HOSTILE = "tests/engine/test_hostile_drafters.py"
TREES = "tests/decoding/test_model_trees.py"
FAULTS: tuple[Fault, ...] = (
    Fault(
        "a draft token stays without being what the target drew",
        "decoding/verifiers/match.py",
        "if draft.tokens[child] == row.token), None)",
        "if draft.tokens[child] >= row.token), None)",
        (IDENTITY, "-k", "test_seeded_text and model_chain"),
    ),
    Fault(
        "a drafted token is accepted too often",
        "decoding/verifiers/rejection.py",
        "* drawn_with < float(residual[token]):",
        "* drawn_with < 1.5 * float(residual[token]):",
        (TREES, "-k", "test_rejection_keeps_the_target_law and raw"),
    ),
    Fault(
        "an accepted branch keeps the keys and values of another one",
        "engine/cache/table.py",
        "self.store.move(sources, self.slots(base + start, len(nodes) - start))",
        "self.store.move(sources[:0], self.slots(base + start, 0))",
        (HOSTILE, "-k", "test_no_drafter_changes and rejection and knowing and greedy"),
    ),
    Fault(
        "a tree under a length policy is judged too mildly",
        "decoding/verifiers/rejection.py",
        "(residual - proposal.to(residual.device))",
        "(residual - 0.5 * proposal.to(residual.device))",
        ("tests/decoding/test_trees_by_length.py", "-k", "test_the_law_stays and rsd_s and not many"),
    ),
    Fault(
        "a verifier that keeps nearly best tokens keeps none but the best when it is asked for more",
        "decoding/verifiers/near_best.py",
        'as_greedy: ClassVar[Mapping[str, Any]] = {"candidates": 1}',
        'as_greedy: ClassVar[Mapping[str, Any]] = {"candidates": 3}',
        (IDENTITY, "-k", "test_greedy_text and near_best"),
    ),
    Fault(
        "a trained part does not say what its artifact holds",
        "decoding/lengths/specdecpp.py",
        "return Example(kind=cls.name, ",
        'return Example(kind="", ',
        (IDENTITY, "-k", "says_what_is_in_it"),
    ),
    Fault(
        "an actor keeps the sampling parameters of the first operation",
        "actors/sequence_replica.py",
        "None if seq.sampling is self.sampling else seq.sampling",
        "None",
        ("tests/actors/test_remote_protocol.py",),
    ),
    Fault(
        "weights that a checkpoint lacks are made up",
        "engine/checkpoints.py",
        'if missing := sorted(found["missing_keys"]):',
        'if missing := sorted(found["missing_keys"])[:0]:',
        ("tests/engine/test_checkpoints.py",),
    ),
    Fault(
        "measured step times leave out what is attended to",
        "engine/costs/probe.py",
        "g.sequences * (g.fed * g.context + g.fed * (g.fed + 1) // 2)",
        "g.sequences * (g.fed * (g.fed + 1) // 2)",
        ("tests/engine/test_step_time.py",),
    ),
    Fault(
        "a candidate of PEARL stays without being what the target drew",
        "decoding/methods/pearl.py",
        "        if own.id in candidate.tokens:\n",
        "        if len(candidate):\n            own = own._replace(id=candidate.tokens[0])\n",
        ("tests/decoding/test_pearl.py", "-k", "greedy_output_is_plain or match_equals_plain"),
    ),
    Fault(
        "a client gets the last token that it has once more",
        "pool/resume.py",
        "        return tuple(tokens[known:])\n",
        "        return tuple(tokens[max(known - 1, 0) :])\n",
        ("tests/pool/test_resume.py", "-k", "cut_off_anywhere and random_switch"),
    ),
    Fault(
        "a calibration stops at the first setting that it tries",
        "training/knob_calibration.py",
        "            if least <= beyond <= (0.0 if target.budget is not None else CLOSE):\n",
        "            if least <= beyond or turn >= 0:\n",
        ("tests/training/test_knob_calibration.py", "-k", "jumps_over or quality_and_budget"),
    ),
    Fault(
        "keys of short and long rotary frequencies are found under one hash",
        "engine/cache/hashes.py",
        "        if self.rope_length:\n",
        "        if self.rope_length < 0:\n",
        ("tests/engine/test_rope.py", "-k", "blocks_are_shared"),
    ),
    Fault(
        "a download is not compared with what the hub announced",
        "turnout/hub_models.py",
        "            self._check_content(name)\n",
        "            self._check_content\n",
        ("tests/turnout/test_hub_models.py", "-k", "test_bytes_that_are_not_those_announced"),
    ),
    Fault(
        "a copy that broke off is taken for a whole one",
        "turnout/model_files.py",
        "return path.is_file() and (size is None or path.stat().st_size == size)",
        "return path.is_file()",
        ("tests/turnout/test_hub_models.py", "-k", "test_an_interrupted_download_is_completed"),
    ),
    Fault(
        "a front end imports torch",
        "deployments/ingress.py",
        "from ray.serve.handle import DeploymentHandle\n",
        "from ray.serve.handle import DeploymentHandle\nimport torch\n",
        ("tests/deployments/test_app.py", "-k", "test_front_ends_do_not_import_torch"),
    ),
    Fault(
        "a context that a token never followed takes a share in FSD",
        "decoding/processors/fsd.py",
        "            if not count:\n                continue\n",
        "",
        ("tests/decoding/test_processors.py", "-k", "test_fsd_weighs"),
    ),
    Fault(
        "tokens of a draft are not counted",
        "decoding/processors/_counts.py",
        "    for token in context.path:\n",
        "    for token in context.path[1:]:\n",
        ("tests/conformance/test_processors.py", "-k", "test_hypothetical_tokens_count and penalties"),
    ),
    Fault(
        "listed processors act in the order of their names",
        "decoding/processor_chain.py",
        "return self.stage, self.rank, self.part.name",
        "return self.stage, min(self.rank, OWN), self.part.name",
        ("tests/decoding/test_processors.py", "-k", "test_listed_processors_act_in_their_order"),
    ),
)
