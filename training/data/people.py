"""Invented people and facts about them, from which passages and forms are made."""

import random
from dataclasses import dataclass

FIRST_NAMES = (
    "Ada", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Louis",
    "Maria", "Nina", "Oscar", "Paula", "Robin", "Sara", "Tomas", "Vera",
)  # fmt: skip
LAST_NAMES = (
    "Abel", "Brand", "Costa", "Dumont", "Egger", "Fischer", "Grant", "Holm", "Ivers", "Jensen", "Keller", "Lang",
    "Moreau", "Novak", "Olsen", "Price", "Quinn", "Rossi", "Stone", "Weber",
)  # fmt: skip
CITIES = (
    "Basel", "Bergen", "Cork", "Delft", "Ghent", "Graz", "Lille", "Lyon", "Malmo", "Nantes", "Oslo", "Porto",
    "Riga", "Siena", "Turin", "Vienna",
)  # fmt: skip
TRADES = (
    "baker", "carpenter", "doctor", "driver", "farmer", "gardener", "judge", "lawyer", "nurse", "painter", "pilot",
    "plumber", "sailor", "teacher", "weaver", "writer",
)  # fmt: skip
ANIMALS = ("cat", "dog", "goat", "hen", "horse", "parrot", "rabbit", "sheep")
COLOURS = ("black", "blue", "brown", "green", "grey", "red", "white", "yellow")
GOODS = ("books", "candles", "chairs", "cups", "lamps", "maps", "pens", "plates", "shirts", "tables")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


@dataclass(frozen=True)
class Person:
    """One invented person."""

    name: str
    city: str
    trade: str
    animal: str
    colour: str
    birth_year: int


def draw_person(rng: random.Random, taken: frozenset[str] = frozenset()) -> Person:
    """A person whose first name is not among `taken`."""
    first = rng.choice([name for name in FIRST_NAMES if name not in taken])
    return Person(
        f"{first} {rng.choice(LAST_NAMES)}",
        rng.choice(CITIES),
        rng.choice(TRADES),
        rng.choice(ANIMALS),
        rng.choice(COLOURS),
        rng.randint(1940, 2005),
    )


def draw_date(rng: random.Random) -> str:
    """A day of a year, such as 4 May 2017."""
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(2000, 2029)}"
