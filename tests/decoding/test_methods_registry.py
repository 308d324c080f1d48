import annotated_types
import pytest

from decoding.switching.base import other
from turnout.errors import Code, TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import METHODS_PACKAGE, all_methods, get_method, load, names

METHODS = names(METHODS_PACKAGE)
PARTS = tuple(f"decoding.{slot}" for slot in ("verifiers", "drafters", "lengths", "selectors", "scorers", "monitors"))


def test_the_methods_that_exist():
    assert {"plain", "speculative", "entropy_adaptive", "sentence_lead", "random_switch"} <= set(METHODS)
    assert [info.name for info in all_methods()] == METHODS
    papers = {name: get_method(name).papers for name in ("speculative", "entropy_adaptive", "sentence_lead")}
    assert papers == {"speculative": (111,), "entropy_adaptive": (2,), "sentence_lead": (202,)}


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_has_a_description_bounds_and_a_default(name):
    info = get_method(name)
    assert len(info.summary) > 10
    for key, field in info.params.model_fields.items():
        assert field.description, key
        assert not field.is_required(), key
        kinds = {type(entry) for entry in field.metadata}
        if any(number in str(field.annotation) for number in ("int", "float")):
            assert {annotated_types.Ge, annotated_types.Gt} & kinds, key
            assert {annotated_types.Le, annotated_types.Lt} & kinds, key
    assert info.parse({}) == info.params()


@pytest.mark.parametrize("name", METHODS)
def test_unknown_parameters_are_refused_with_the_allowed_ones(name):
    info = get_method(name)
    with pytest.raises(TurnoutError) as caught:
        info.parse({"no_such_thing": 1})
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.field == "method.params.no_such_thing"
    for key in info.params.model_fields:
        assert key in caught.value.message


@pytest.mark.parametrize(
    ("name", "values", "field", "says"),
    [
        ("speculative", {"draft_length": 0}, "draft_length", "greater than or equal to 1"),
        ("speculative", {"verifier": "guess"}, "verifier", "rejection, spectr"),
        ("speculative", {"drafter": "guess"}, "drafter", "model_chain"),
        ("speculative", {"drafter": []}, "drafter", "at least one"),
        ("speculative", {"drafter": ["model_chain", "guess"]}, "drafter.1", "model_chain"),
        ("speculative", {"drafter": {"name": "jacobi", "window": 0}}, "drafter.window", "greater than or equal to 1"),
        ("speculative", {"length": {"name": "fixed", "least": 1}}, "length.least", "unknown; allowed here: most"),
        ("speculative", {"nodes": 10_000}, "nodes", "less than or equal to 512"),
        ("entropy_adaptive", {"min_stay": 0}, "min_stay", "greater than or equal to 1"),
        ("entropy_adaptive", {"threshold": float("inf")}, "threshold", "finite"),
        ("entropy_adaptive", {"threshold": 1, "threshold_down": 2}, "", "threshold_down must be at most threshold"),
        ("random_switch", {"share": 0.1}, "", "below min_stay"),
        ("sentence_lead", {"catch_up": "never"}, "catch_up", "'lazy', 'eager' or 'shadow'"),
        ("plain", {"model": "the medium one"}, "model", "pattern"),
    ],
)
def test_bad_values_are_refused_by_name(name, values, field, says):
    with pytest.raises(TurnoutError) as caught:
        get_method(name).parse(values)
    assert caught.value.field == ".".join(part for part in ("method.params", field) if part)
    assert says in caught.value.message


def test_unknown_names_list_the_known_ones():
    with pytest.raises(TurnoutError, match="plain") as caught:
        get_method("nothing")
    assert caught.value.code is Code.NOT_FOUND
    with pytest.raises(TurnoutError, match="rejection") as caught:
        PartChoice(name="nothing").find("decoding.verifiers", "verifier")
    assert caught.value.code is Code.NOT_FOUND


@pytest.mark.parametrize(
    ("package", "attribute"),
    [*((package, "PART") for package in PARTS), ("decoding.switching", "RULE")],
)
def test_every_module_of_a_slot_names_its_class(package, attribute):
    found = names(package)
    assert found
    for name in found:
        assert getattr(load(package, name, "slot"), attribute).name == name
    assert {other("small"), other("large")} == {"small", "large"}


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in PARTS for name in names(package)])
def test_every_parameter_of_a_part_has_a_description_bounds_and_a_default(package, name):
    part = load(package, name, "slot").PART
    assert len((part.__doc__ or "").split("\n")[0]) > 10
    for key, field in part.Params.model_fields.items():
        assert field.description, key
        assert not field.is_required(), key
        kinds = {type(entry) for entry in field.metadata}
        if any(number in str(field.annotation) for number in ("int", "float")):
            assert {annotated_types.Ge, annotated_types.Gt} & kinds, key
            assert {annotated_types.Le, annotated_types.Lt} & kinds, key


@pytest.mark.parametrize("name", names("decoding.verifiers"))
def test_verifiers_say_whether_they_are_exact(name):
    verifier = PartChoice(name=name).make("decoding.verifiers", "verifier")
    assert isinstance(verifier.lossless, bool)
    assert verifier.want.probs or verifier.want.draw is not None
