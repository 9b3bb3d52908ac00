"""One story under construction: its cast and facts (the slots) and the text so far."""

from .language import Facts, Value, expand, expand_phrase
from .random_source import RandomSource
from .world import DISHES, SEASONS, SETTINGS, SNACKS, THINGS, make_elder, make_friend, make_helper, make_hero, make_thing

NUMBERS = ("two", "three", "four", "five", "six", "seven")


class Story:
    """Facts are drawn once, up front, so that every sentence speaks of the same cast, places and things."""

    def __init__(self, random: RandomSource, seasons: tuple[str, ...] | None = None) -> None:
        self.random = random
        self._paragraphs: list[list[str]] = [[]]
        setting = random.pick(SETTINGS)
        season = random.pick([season for season in SEASONS if seasons is None or season.name in seasons])
        hero = make_hero(random, setting)
        helper = make_helper(random, setting, set())
        helper2 = make_helper(random, setting, {helper.kind})
        thing = make_thing(random)
        dish, serving, ingredients = random.pick(DISHES)
        self.setting = setting
        self.slots = Facts()
        self.slots.met.add("hero")
        self.slots.update({
            "hero": hero,
            "friend": make_friend(random, setting, hero),
            "elder": make_elder(random, setting),
            "helper": helper,
            "helper2": helper2,
            "thing": thing,
            "thing2": make_thing(random, {thing.noun}),
            "season": season.name,
            "sky": random.pick(season.sky),
            "day": random.pick(season.days),
            "clothes": season.clothes,
            "house": random.pick(setting.houses),
            "dish": dish,
            "serving": serving,
            "snack": random.pick(SNACKS),
            "number": random.pick(NUMBERS),
        })
        self.slots["home"] = expand_phrase(setting.home, self.slots, random)
        self.slots["place"], self.slots["place2"] = random.sample(setting.places, 2)
        for name, spot in zip(("spot", "spot2", "spot3"), random.sample(setting.spots, 3)):
            self.slots[name] = spot
        for name, ingredient in zip(("need", "need2", "need3"), ingredients):
            self.slots[name] = ingredient

    def __setitem__(self, name: str, value: Value) -> None:
        self.slots[name] = value

    def draw(self, name: str, *options: Value) -> None:
        """Fixes the fact `name` to one of `options`; text options are expanded once, here."""
        value = self.random.pick(options)
        self.slots[name] = expand_phrase(value, self.slots, self.random) if isinstance(value, str) else value

    def choose_thing(self, *nouns: str) -> None:
        """Replaces the thing by one of the named kinds."""
        self.slots["thing"] = make_thing(self.random, {thing[0] for thing in THINGS} - set(nouns))

    def say(self, *variants: str) -> None:
        text = expand(self.random.pick(variants), self.slots, self.random)
        if text:
            self._paragraphs[-1].append(text)

    def maybe(self, percent: int, *variants: str) -> None:
        if self.random.chance(percent):
            self.say(*variants)

    def paragraph(self) -> None:
        if self._paragraphs[-1]:
            self._paragraphs.append([])

    def paragraphs(self) -> list[str]:
        return [" ".join(sentences) for sentences in self._paragraphs if sentences]

    def text(self) -> str:
        return "\n\n".join(self.paragraphs())

    # Openings and endings that every plot shares.

    def open(self, friend: bool = False, thing: bool = False) -> None:
        self.say(
            "Once upon a time, there was {hero.intro}. {hero.He} lived {home}.",
            "Once upon a time, {hero.intro} lived {home}.",
            "Once upon a time, {home}, there lived {hero.intro}.",
            "There once was {hero.intro} who lived {home}.",
            "{Home}, there lived {hero.intro}.",
            "{hero} was a(n) {hero.trait} {hero.look} {hero.kind} who lived {home}.",
            "Long ago, {hero.intro} lived {home}.",
            "This is the story of {hero}, a(n) {hero.trait} {hero.kind} who lived {home}.",
            "Do you know {hero}? {hero.He} was a(n) {hero.trait} {hero.kind} and lived {home}.",
        )
        self.maybe(60, self.slots["hero"].habit)
        if friend:
            self.say(
                "{hero.His} best friend was {friend.intro}.",
                "{hero} had a friend, {friend.intro}.",
                "Next door lived {friend.intro}, and the two were [good|best] friends.",
                "Every day {hero.he} played with {friend.intro}.",
                "{hero.He} and {friend.intro} [did everything together|were the best of friends].",
            )
        if thing:
            self.say(
                "{hero} had {a thing} that {hero.he} loved very much. {thing.joy}",
                "What {hero.he} loved most was {hero.his} {thing}. {thing.joy}",
                "{hero.His} {elder.kind} had given {hero.him} {a thing}. {thing.joy}",
                "For {hero.his} birthday, {hero} had gotten {a thing} from {hero.his} {elder.kind}. {thing.joy}",
                "{hero} owned only one treasure: {a thing}. {thing.joy}",
            )

    def close(self, *morals: str) -> None:
        self.say(*morals)
        self.maybe(
            35,
            "That night, {hero} [slept very well|fell asleep with a smile|dreamed of {place}].",
            "And [so the day ended well|that was the end of a very good day].",
            "{hero} was [happy|very happy|glad], and so was [everyone else|{hero.his} {elder.kind}].",
            "And if you ever come to {place}, you may meet {hero} there.",
            "{hero} told {elder} all about it [at supper|before bed].",
            "The end.",
        )
