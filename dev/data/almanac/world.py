"""The world that all documents of a seed share: coined names, and facts that never change.

A fact is met in many documents, so a model can learn it by heart; what a document alone decides can only be read in it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Sequence, TypeVar

from storybook.random_source import RandomSource

Item = TypeVar("Item")

TOWNS, PEOPLE, RIVERS, REGIONS = 1500, 3000, 240, 40
YEAR = 1900  # today's
WORLD_STREAM = 1 << 48  # of the random source; documents have the streams below

_ONSETS = ("b br c ch cl d dr f fl g gl gr h j k kr l m n p pr qu r s sh sk sl st sw t th tr v w y z").split()
_VOWELS = "a e i o u ai au ea ei ia io oa ou".split()
_CODAS = "b ck d ft g k l ld lk ll m mp n nd ng nt p r rd rk rn rt s sk ss st t th v x".split()
_TOWN_ENDS = "ford bridge ton ham wick stead mouth burgh dale field haven gate minster holm wood".split()
_FAMILY_ENDS = "er man son ley worth well ing wright ard ick ow ell".split()
_GIVEN_ENDS = {"she": "a ia elle ine y eth ora una".split(), "he": "o en us ric ald in ert an".split()}

CRAFTS = ("glass pottery rope lace leather paper clocks bells wool honey cider cheese salt copper candles ink boats saddles "
          "knives carpets mirrors barrels soap tiles flutes gloves hats wagons anchors lenses").split()
LANDMARKS = ("windmill|lighthouse|clock tower|stone bridge|old library|market hall|round church|salt gate|water wheel|town wall|"
             "glass house|stone circle|observatory|harbour crane|bell tower|royal garden|iron fountain|long pier").split("|")
TRADES = ("baker smith weaver miller teacher sailor carpenter mason doctor printer gardener shepherd tailor cooper glazier "
          "clerk fisher hunter painter brewer potter carter").split()
FOODS = ("plum cake|onion soup|rye bread|apple pie|roast duck|lentils|goat cheese|pickled herring|mushrooms|barley porridge|"
         "pear jam|walnuts|pancakes|smoked eel").split("|")
INSTRUMENTS = "fiddle harp flute drum horn lute organ whistle".split()
COLOURS = "red blue green yellow black white grey brown purple golden silver orange".split()
FEARS = "thunder|deep water|heights|spiders|the dark|geese|fire|crowds|horses|snakes|storms".split("|")


@dataclass(frozen=True)
class Town:
    name: str
    region: str
    river: str
    founded: int
    people: int  # how many live there
    craft: str
    landmark: str
    mayor: int  # a number of World.people
    near: int   # another town, and how many miles it is away
    miles: int


@dataclass(frozen=True)
class Person:
    given: str
    family: str
    gender: str  # "he" or "she"
    born: int
    trade: str
    home: int  # a number of World.towns
    friend: int
    food: str
    instrument: str
    colour: str
    fear: str

    @property
    def name(self) -> str:
        return f"{self.given} {self.family}"


class World:
    """Towns and people of a seed. The first ones of each list are met most often: pick_often()."""

    def __init__(self, seed: int) -> None:
        self._random, self._taken = RandomSource(seed, WORLD_STREAM), set[str]()
        random = self._random
        rivers = [self._coin(1, ["", "e", "en"]) for _ in range(RIVERS)]
        regions = [self._coin(1, ["ia", "land", "mark", "shire"]) for _ in range(REGIONS)]
        self.towns = [
            Town(self._coin(1, _TOWN_ENDS), random.pick(regions), random.pick(rivers), 900 + random.below(980),
                 200 * 2 ** random.below(9) + random.below(900), random.pick(CRAFTS), random.pick(LANDMARKS),
                 random.below(PEOPLE), random.below(TOWNS), 2 + random.below(70)) for _ in range(TOWNS)]
        given = {gender: [self._coin(1, ends) for _ in range(260)] for gender, ends in sorted(_GIVEN_ENDS.items())}
        families = [self._coin(1, _FAMILY_ENDS) for _ in range(900)]
        self.people = []
        for _ in range(PEOPLE):
            gender = random.pick(("he", "she"))
            self.people.append(Person(
                random.pick(given[gender]), random.pick(families), gender, YEAR - 14 - random.below(70), random.pick(TRADES),
                random.below(TOWNS), random.below(PEOPLE), random.pick(FOODS), random.pick(INSTRUMENTS),
                random.pick(COLOURS), random.pick(FEARS)))

    def _coin(self, syllables: int, ends: Sequence[str]) -> str:
        """A new name: syllables, then one of the ends."""
        while True:
            text = "".join(self._random.pick(_ONSETS) + self._random.pick(_VOWELS) + self._random.pick(_CODAS)
                           for _ in range(syllables)) + self._random.pick(ends)
            if text not in self._taken:
                self._taken.add(text)
                return text.capitalize()


@lru_cache(maxsize=2)
def world_of(seed: int) -> World:
    return World(seed)


def pick_often(random: RandomSource, items: Sequence[Item]) -> Item:
    """Item i of n with a probability of about log(n / i) / n: a few are met in most documents, all are met."""
    return items[random.below(random.below(len(items)) + 1)]
