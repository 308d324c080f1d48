"""Look-ups that cannot pay are left out, and none is left out that can."""

from kvstore.lookup.controller import STREAK, TRIES, LookupGate


def misses(worth: LookupGate, count: int, seconds: float = 0.01, tenant: str = "a") -> None:
    for _ in range(count):
        worth.looked(tenant, found=False, seconds=seconds)


def test_a_tenant_of_whom_little_is_known_is_looked_up_for():
    worth = LookupGate()
    assert worth.pays("a", 0.0)
    misses(worth, STREAK - 1)
    assert worth.pays("a", 0.0)


def test_what_is_computed_sooner_than_found_is_not_looked_for():
    worth = LookupGate()
    misses(worth, 50)
    chance = 1.0 / (50 * 0.98**25 + 2.0)  # about: the older look-ups count less
    assert not worth.pays("a", 0.5 * 0.01 / chance / 2)
    assert worth.pays("a", 0.01 / chance * 2)


def test_long_prompts_are_looked_for_after_any_number_of_misses():
    worth = LookupGate()
    misses(worth, 10_000)
    assert worth.pays("a", 1.0)


def test_a_hit_brings_the_tenants_look_ups_back():
    worth = LookupGate()
    misses(worth, 50)
    assert not worth.pays("a", 0.001)
    worth.looked("a", found=True, seconds=0.01)
    assert worth.pays("a", 0.001)


def test_some_are_made_nevertheless():
    worth = LookupGate()
    misses(worth, 50)
    assert sum(worth.pays("a", 0.0) for _ in range(10 * TRIES)) == 10


def test_tenants_are_judged_apart_and_forgotten():
    worth = LookupGate()
    misses(worth, 50)
    assert worth.pays("b", 0.0)
    for number in range(2000):
        worth.looked(f"t{number}", found=False, seconds=0.01)
    assert worth.pays("a", 0.0)
