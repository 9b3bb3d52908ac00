"""The kinds of documents. Each says what a reader could work out from the document itself or knows of the world."""

from typing import Callable

from storybook import plots
from storybook.language import Facts, expand
from storybook.random_source import RandomSource

from .world import COLOURS, CRAFTS, FOODS, INSTRUMENTS, TRADES, YEAR, Person, Town, World, pick_often, world_of

Kind = Callable[["Page"], None]
KINDS: list[Kind] = []

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
THINGS = ("kettle lamp ladder basket rope hammer mirror chair drum coat shovel bucket map compass book key ring spoon saw clock brush "
          "saddle blanket boot candle jug needle whistle trunk kite pillow umbrella wheel purse pencil statue vase anchor helmet").split()
LOOKS = "small large old new broken painted heavy light rusty shiny wooden plain round narrow strange".split()
SPOTS = ("under the bed|behind the stove|on the top shelf|in the cellar|beside the well|in the garden shed|under the stairs|in the attic|"
         "on the window sill|inside the oven|behind the door|in the barn|near the gate|beneath the table|in the hay loft").split("|")
ANIMALS = "cat dog goat cow horse duck goose sheep pig hen donkey rabbit".split()
SMALL = "zero one two three four five six seven eight nine ten eleven twelve".split()


def kind(weight: int) -> Callable[[Kind], Kind]:
    """Registers a kind of document; one of a larger weight is written more often."""

    def register(function: Kind) -> Kind:
        KINDS.extend([function] * weight)
        return function

    return register


def in_words(number: int) -> str:
    return SMALL[number] if number < len(SMALL) else str(number)


def listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def plural(noun: str) -> str:
    irregular = {"goose": "geese", "sheep": "sheep"}
    return irregular.get(noun, noun + ("es" if noun.endswith(("x", "s", "sh", "ch")) else "s"))


class Page:
    """A document under way: lines, and sentences of the current line."""

    def __init__(self, random: RandomSource, world: World) -> None:
        self.random, self.world = random, world
        self.lines: list[str] = []
        self._sentences: list[str] = []

    def say(self, *templates: str, **slots: object) -> None:
        """One of the templates (storybook/language.py) as a sentence of the paragraph; slots become text."""
        facts = Facts()
        facts.update({name: str(value) for name, value in slots.items()})
        self._sentences.append(expand(self.random.pick(templates), facts, self.random))

    def line(self, *templates: str, **slots: object) -> None:
        """A line of its own."""
        self.end()
        self.say(*templates, **slots)
        self.end()

    def end(self) -> None:
        """Ends the paragraph."""
        if self._sentences:
            self.lines.append(" ".join(self._sentences))
        self._sentences = []

    def text(self) -> str:
        self.end()
        return "\n".join(self.lines)

    # ---- what is drawn

    def below(self, bound: int) -> int:
        return self.random.below(bound)

    def town(self) -> Town:
        return pick_often(self.random, self.world.towns)

    def person(self) -> Person:
        return pick_often(self.random, self.world.people)

    def persons(self, count: int) -> list[Person]:
        """Different people with different given names."""
        chosen: list[Person] = []
        while len(chosen) < count:
            person = self.person()
            if person.given not in [other.given for other in chosen]:
                chosen.append(person)
        return chosen

    def date(self) -> tuple[int, int]:
        month = self.below(12)
        return 1 + self.below(LENGTHS[month]), month

    def home(self, person: Person) -> Town:
        return self.world.towns[person.home]


def he(person: Person) -> str:
    return person.gender


def his(person: Person) -> str:
    return "his" if person.gender == "he" else "her"


def him(person: Person) -> str:
    return "him" if person.gender == "he" else "her"


# ---- facts of the world ------------------------------------------------------------------------------------------------


def town_sentence(page: Page, town: Town, which: int) -> None:
    mayor, near = page.world.people[town.mayor], page.world.towns[town.near]
    if which == 0:
        page.say("{t} lies on the river {r} in {g}.", "{t} is a town in {g}, on the [banks of the |river ]{r}.",
                 "The river {r} runs through {t}[, a town in {g}|].", t=town.name, r=town.river, g=town.region)
    elif which == 1:
        page.say("It was founded in [the year |]{y}.", "The town was founded in {y}[, {a} years ago|].",
                 "{t} has been a town since {y}.", t=town.name, y=town.founded, a=YEAR - town.founded)
    elif which == 2:
        page.say("About {n} people live [there|in {t}].", "{t} has {n} inhabitants.", t=town.name, n=town.people)
    elif which == 3:
        page.say("{t} is known for its {c}.", "[Most of its people make|Its workshops make|The town sells] {c}.",
                 "The {c} of {t} [is sold everywhere in {g}|can be bought in every market].", t=town.name, c=town.craft, g=town.region)
    elif which == 4:
        page.say("Travellers come to see the {l}.", "The {l} of {t} is [famous|very old|worth a visit].",
                 "In the middle of the town stands the {l}.", t=town.name, l=town.landmark)
    elif which == 5:
        page.say("The mayor is {m}, a {d}.", "{m}, who [works|once worked] as {a d}, is the mayor of {t}.", t=town.name, m=mayor.name,
                 d=mayor.trade)
    else:
        page.say("It is {n} miles from {t} to {o}.", "{o} is {n} miles away.", "The road to {o} is {n} miles long.", t=town.name,
                 n=town.miles, o=near.name)


def person_sentence(page: Page, person: Person, which: int) -> None:
    home, friend = page.home(person), page.world.people[person.friend]
    slots = dict(p=person.name, f=person.given, h=he(person), s=his(person))
    if which == 0:
        page.say("{p} was born in {y}[ in {t}|].", "{f} is {a} years old, for {h} was born in {y}.", y=person.born, t=home.name,
                 a=YEAR - person.born, **slots)
    elif which == 1:
        page.say("{p} is {a d} in {t}.", "{h} works as {a d}.", "{f} lives in {t} and earns {s} bread as {a d}.", d=person.trade,
                 t=home.name, **slots)
    elif which == 2:
        page.say("{s} best friend is {o}, {a d} from {t}.", "{f} and {o} have been friends for years.", o=friend.name, d=friend.trade,
                 t=page.home(friend).name, **slots)
    elif which == 3:
        page.say("{f} likes nothing better than {e}.", "{s} favourite [food|dish] is {e}.", e=person.food, **slots)
    elif which == 4:
        page.say("In the evening {h} plays the {i}.", "{f} [plays|has learned to play] the {i}.", i=person.instrument, **slots)
    elif which == 5:
        page.say("{f} always wears something {c}.", "{s} door is painted {c}.", "{s} favourite colour is {c}.", c=person.colour, **slots)
    else:
        page.say("{h} is afraid of {e}.", "There is only one thing that {h} fears: {e}.", e=person.fear, **slots)


@kind(3)
def gazetteer(page: Page) -> None:
    town = page.town()
    page.line("{t}", t=town.name)
    town_sentence(page, town, 0)
    for which in page.random.sample(range(1, 7), 3 + page.below(4)):
        town_sentence(page, town, which)
    page.end()
    if page.random.chance(60):
        other = page.world.towns[town.near]
        town_sentence(page, other, 0)
        for which in page.random.sample(range(1, 6), 2 + page.below(3)):
            town_sentence(page, other, which)
        older, younger = (town, other) if town.founded <= other.founded else (other, town)
        page.say("Of the two, {o} is the older town[, by {n} years|].", "{o} is {n} years older than {y}.", o=older.name,
                 y=younger.name, n=younger.founded - older.founded)
        larger = town if town.people >= other.people else other
        page.say("{l} is the larger one.", "More people live in {l}.", l=larger.name)


@kind(3)
def biography(page: Page) -> None:
    person = page.person()
    page.say("{p} is {a d} from {t}.", "This is the story of {p}, {a d} of {t}.", p=person.name, d=person.trade, t=page.home(person).name)
    for which in page.random.sample(range(7), 4 + page.below(4)):
        person_sentence(page, person, which)
    page.end()
    town_sentence(page, page.home(person), 1 + page.below(6))
    if page.random.chance(50):
        friend = page.world.people[person.friend]
        for which in page.random.sample(range(7), 3):
            person_sentence(page, friend, which)


@kind(3)
def questions(page: Page) -> None:
    """Questions whose answers are facts of the world."""
    page.line("[Questions and answers|A quiz|What do you know?]")
    for _ in range(5 + page.below(6)):
        if page.random.chance(50):
            town = page.town()
            mayor = page.world.people[town.mayor]
            question, answer = page.random.pick((
                (f"On which river does {town.name} lie?", f"On the {town.river}."),
                (f"In which region is {town.name}?", f"In {town.region}."),
                (f"When was {town.name} founded?", f"In {town.founded}."),
                (f"What is {town.name} known for?", f"For its {town.craft}."),
                (f"What do travellers visit in {town.name}?", f"The {town.landmark}."),
                (f"Who is the mayor of {town.name}?", f"{mayor.name}."),
                (f"How far is it from {town.name} to {page.world.towns[town.near].name}?", f"{town.miles} miles.")))
        else:
            person = page.person()
            question, answer = page.random.pick((
                (f"Where does {person.name} live?", f"In {page.home(person).name}."),
                (f"What is the trade of {person.name}?", f"{'He' if he(person) == 'he' else 'She'} is a {person.trade}."),
                (f"When was {person.name} born?", f"In {person.born}."),
                (f"What does {person.name} play?", f"The {person.instrument}."),
                (f"What is {person.name} afraid of?", f"Of {person.fear}."),
                (f"What does {person.name} like to eat?", f"{person.food.capitalize()}."),
                (f"Who is the best friend of {person.name}?", f"{page.world.people[person.friend].name}.")))
        page.lines += [f"Q: {question}", f"A: {answer}"]


# ---- facts of the document ---------------------------------------------------------------------------------------------


@kind(3)
def accounts(page: Page) -> None:
    """A bill: amounts are products, the total their sum."""
    buyer, seller = page.persons(2)
    day, month = page.date()
    page.line("[Bill|Account] of {b}, {t}, {d} {m} {y}", b=buyer.name, t=page.home(seller).name, d=day, m=MONTHS[month],
              y=YEAR - page.below(30))
    page.line("Bought from {s}, {a d}.", s=seller.name, d=seller.trade)
    total, bought = 0, []
    for number, thing in enumerate(page.random.sample(THINGS, 3 + page.below(5)), start=1):
        count, price = 1 + page.below(9), 2 + page.below(30)
        total += count * price
        bought.append((thing, count, price))
        name = thing if count == 1 else plural(thing)
        page.lines.append(f"{number}. {count} {name} at {price} crowns: {count * price} crowns, together {total}")
    page.lines.append(f"Total: {total} crowns")
    paid = total + page.below(60)
    page.say("{b} paid {p} crowns and [got back {r}|received {r} in return].", b=buyer.given, p=paid, r=paid - total)
    dearest = max(bought, key=lambda each: each[1] * each[2])
    page.say("Most of the money went for the {t}.", t=dearest[0] if dearest[1] == 1 else plural(dearest[0]))
    thing, count, price = page.random.pick(bought)
    page.say("How many {n} did {b} buy? {c}, for {a} crowns.", n=plural(thing), b=buyer.given, c=in_words(count).capitalize(), a=count * price)


@kind(4)
def hidden_things(page: Page) -> None:
    """People put things somewhere, move them, and are asked."""
    people = page.persons(3)
    things = [f"{page.random.pick(LOOKS)} {thing}" for thing in page.random.sample(THINGS, 4)]
    where: dict[str, str] = {}
    who: dict[str, Person] = {}
    for thing in things:
        person, spot = page.random.pick(people), page.random.pick(SPOTS)
        page.say("{p} [put|left|hid] the {t} {s}.", "The {t} was {s}, where {p} had [put|left] it.", p=person.given, t=thing, s=spot)
        where[thing], who[thing] = spot, person
    page.end()
    for _ in range(2 + page.below(5)):
        thing, person = page.random.pick(things), page.random.pick(people)
        spot = page.random.pick([spot for spot in SPOTS if spot != where[thing]])
        page.say("[Later|Then|After supper|In the morning|Next] {p} took the {t} from where it was, {o}, and put it {s}.",
                 "{p} found the {t} {o} and [carried it away|moved it]. Now it was {s}.", p=person.given, t=thing, o=where[thing], s=spot)
        where[thing], who[thing] = spot, person
        if page.random.chance(40):
            person_sentence(page, person, page.below(7))
    page.end()
    for thing in page.random.sample(things, 2 + page.below(3)):
        asks, answers = page.random.sample(people, 2)
        page.lines.append(f'"Where is the {thing}?" asked {asks.given}.')
        page.line('"It is {s}," said {a}. "{w} put it there."', s=where[thing], a=answers.given,
                  w="I" if who[thing] is answers else "You" if who[thing] is asks else who[thing].given)


@kind(2)
def family(page: Page) -> None:
    """Three generations with years of birth; ages follow."""
    names = page.persons(7)
    surname = names[0].family
    born = YEAR - 75 - page.below(15)
    old = [(names[0].given, born), (names[1].given, born + 1 + page.below(6))]
    middle = [(person.given, born + 22 + 3 * i + page.below(3)) for i, person in enumerate(names[2:4])]
    young = [(person.given, middle[0][1] + 21 + 2 * i + page.below(2)) for i, person in enumerate(names[4:7])]
    page.line("The {s} family", s=surname)
    page.say("{a} {s} was born in {x}, and {b} in {y}.", "{a} and {b} {s} were born in {x} and {y}.", a=old[0][0], b=old[1][0], x=old[0][1],
             y=old[1][1], s=surname)
    page.say("They had two children: {a}, born in {x}, and {b}, born in {y}.", a=middle[0][0], b=middle[1][0], x=middle[0][1], y=middle[1][1])
    page.say("{a} has three children: {l}.", a=middle[0][0], l=listed([f"{name}, born in {year}" for name, year in young]))
    page.end()
    for name, year in page.random.sample(old + middle + young, 3 + page.below(3)):
        page.say("In {y} {n} is {a} years old.", "{n} is {a} now.", y=YEAR, n=name, a=YEAR - year)
    child, parent, grandparent = page.random.pick(young), middle[0], page.random.pick(old)
    page.say("{p} was {a} when {c} was born.", p=parent[0], c=child[0], a=child[1] - parent[1])
    page.say("{g} is a grandparent of {c}, and {u} is the [aunt or uncle|child of {g} who has no children].", g=grandparent[0], c=child[0],
             u=middle[1][0])
    page.say("The youngest of the family is {n}.", n=young[-1][0] if young[-1][1] >= young[-2][1] else young[-2][0])


@kind(2)
def timetable(page: Page) -> None:
    """A coach with stops: arrival times add up."""
    stops = page.random.sample(page.world.towns[:400], 4 + page.below(3))
    hour, minute = 6 + page.below(6), 5 * page.below(12)
    coachman = page.person()
    page.line("[Coach|Timetable of the coach] from {a} to {b}", a=stops[0].name, b=stops[-1].name)
    time, times = hour * 60 + minute, []
    for number, stop in enumerate(stops):
        times.append(time)
        page.lines.append(f"{time // 60:02d}:{time % 60:02d} {stop.name}, {page.random.pick((stop.landmark, 'market', 'inn'))}")
        if number + 1 < len(stops):
            time += 20 + 5 * page.below(16)
    page.say("The coachman is {p}.", "{p} drives the coach.", p=coachman.name)
    page.say("The whole journey takes {n} minutes.", n=times[-1] - times[0])
    i = page.below(len(stops) - 1)
    page.say("From {a} to {b} it is {n} minutes.", a=stops[i].name, b=stops[i + 1].name, n=times[i + 1] - times[i])
    page.say("Who wants to be in {a} by {h} has to leave {b} at {g}.", a=stops[i + 1].name, b=stops[i].name,
             h=f"{times[i + 1] // 60:02d}:{times[i + 1] % 60:02d}", g=f"{times[i] // 60:02d}:{times[i] % 60:02d}")
    town_sentence(page, stops[-1], 1 + page.below(5))


@kind(3)
def letter(page: Page) -> None:
    writer, reader = page.persons(2)
    day, month = page.date()
    weekday = page.below(7)
    town, goal = page.home(writer), page.town()
    after = 2 + page.below(5)
    later, later_month = day + after, month
    if later > LENGTHS[month]:
        later, later_month = later - LENGTHS[month], (month + 1) % 12
    thing = f"{page.random.pick(LOOKS)} {page.random.pick(THINGS)}"
    page.lines.append(f"{town.name}, {DAYS[weekday]}, {day} {MONTHS[month]}")
    page.line("[Dear|My dear] {r},", r=reader.given)
    page.say("[thank you for your letter.|It is long since I wrote to you.|I hope that you are well.|I have news for you.]")
    page.say("On {w} I shall travel to {g}.", "I leave for {g} on {w}, the {d} of {m}.", w=DAYS[(weekday + after) % 7], g=goal.name, d=later,
             m=MONTHS[later_month])
    town_sentence(page, goal, page.below(5))
    page.say("I shall bring you {a t}.", "Please send me the {t} that I left with you.", "You asked for {a t}, and I have found one.", t=thing)
    page.end()
    for _ in range(1 + page.below(3)):
        other = page.person()
        page.say("Do you remember {p}?", "I have met {p}.", "{p} sends you greetings.", p=other.name)
        person_sentence(page, other, page.below(7))
    page.say("That is {n} days from now[, and I can hardly wait|].", n=in_words(after))
    page.say("Do not forget the {t}!", "I [wrap|keep] the {t} in paper[, so that it does not break|].", t=thing)
    page.end()
    page.line("Your [friend|faithful friend|old friend]")
    page.lines.append(writer.name)


@kind(2)
def recipe(page: Page) -> None:
    pairs = page.random.sample(("eggs", "cups of flour", "spoons of sugar", "onions", "cups of milk", "apples", "spoons of butter", "carrots",
                                "pinches of salt", "slices of bread", "walnuts", "cups of rice", "leeks", "plums"), 4 + page.below(3))
    amounts = [1 + page.below(6) for _ in pairs]
    people, factor = 2 + page.below(3), 2 + page.below(2)
    dish = page.random.pick(FOODS)
    cook = page.person()
    page.line("{d} as {p} makes it, for {n} people", d=dish, p=cook.name, n=in_words(people))
    page.lines += [f"- {amount} {name}" for amount, name in zip(amounts, pairs)]
    order = page.random.sample(range(len(pairs)), len(pairs))
    page.say("[First|To begin,] take the {a}[ and put them into a bowl|].", a=pairs[order[0]])
    for index in order[1:-1]:
        page.say("Add the {a}[ and stir well| slowly| while the pot is hot|].", "Then come the {n} {a}.", a=pairs[index], n=in_words(amounts[index]))
    page.say("[Last|At the end] add the {a}, and wait for {m} minutes.", a=pairs[order[-1]], m=5 * (1 + page.below(12)))
    page.end()
    page.say("For {n} people take {l}.", n=in_words(people * factor), l=listed([f"{amount * factor} {name}" for amount, name in zip(amounts, pairs)]))


@kind(3)
def sums(page: Page) -> None:
    """Arithmetic in small stories, with the working shown."""
    for _ in range(3 + page.below(4)):
        a, b = page.persons(2)
        thing, x, y, z = page.random.pick(THINGS + ANIMALS), 3 + page.below(60), 2 + page.below(40), 2 + page.below(8)
        many = plural(thing)
        slots = dict(a=a.given, b=b.given, n=many, x=x, y=y, z=z)
        which = page.below(4)
        if which == 0:
            page.say("{a} has {x} {n} and buys {y} more. How many {n} has {a} now? {x} + {y} = {r}. {a} has {r} {n}.", r=x + y, **slots)
        elif which == 1:
            page.say("{b} had {r} {n} and [sold|lost|gave away] {y}. {r} - {y} = {x}, so {x} {n} are left.", r=x + y, **slots)
        elif which == 2:
            page.say("{z} {t} each have {y} {n}. Together they have {z} x {y} = {r} {n}.", t=plural(page.random.pick(TRADES)), r=z * y, **slots)
        else:
            page.say("{a} and {b} share {r} {n}. Each gets {r} / 2 = {x}.", "{a} shares {r} {n} with {b}: each of them has {x}.", r=2 * x, **slots)
        page.end()


@kind(2)
def walk(page: Page) -> None:
    """Steps on a grid, and where they end."""
    person = page.person()
    x = y = 0
    page.say("{p} stands at the {l} of {t}.", p=person.name, l=page.home(person).landmark, t=page.home(person).name)
    for _ in range(4 + page.below(5)):
        step, direction = 1 + page.below(9), page.below(4)
        x += step * (direction == 1) - step * (direction == 3)
        y += step * (direction == 0) - step * (direction == 2)
        page.say("{h} [goes|walks] {n} steps {d}.", "[Then|Now|Next] {f} goes {n} steps {d}.", h=he(person), f=person.given,
                 n=in_words(step), d=("north", "east", "south", "west")[direction])
        page.say("{h} is at {x}, {y}.", "That is {x}, {y}.", h=he(person), x=x, y=y)
    page.end()
    sides = ([f"{abs(x)} steps {'east' if x > 0 else 'west'}"] if x else []) + ([f"{abs(y)} steps {'north' if y > 0 else 'south'}"] if y else [])
    page.say("In the end {f} is {s} of where {h} began.", "Now {h} is {s} of the beginning.", f=person.given, h=he(person),
             s=listed(sides) if sides else "no step")


@kind(3)
def conversation(page: Page) -> None:
    """Two people who tell each other what they have, want and plan, and take it up again."""
    a, b = page.persons(2)
    plans = {}
    page.say("{a} met {b} [in {t}|at the {l} of {t}|on the road to {t}].", a=a.name, b=b.name, t=page.home(a).name, l=page.home(a).landmark)
    page.end()
    for one, other in ((a, b), (b, a)):
        animal, count, town, day = page.random.pick(ANIMALS), 2 + page.below(11), page.town(), page.random.pick(DAYS)
        plans[one.given] = (plural(animal), count, town, day)
        page.line('"[Good morning|Good day|Hello], {o}. How are your {n}?" [asked|said] {p}.', o=other.given, p=one.given, n=plural(page.random.pick(ANIMALS)))
        page.line('"I have sold them," said {o}. "[And you|Now], what do you want in {t}?"', o=other.given, t=town.name)
        page.line('"I have {c} {n}, and on {d} I want to sell them in {t}. It is a good place for {k}, too," said {p}.', c=in_words(count),
                  n=plural(animal), d=day, t=town.name, k=town.craft, p=one.given)
    for one, other in page.random.sample(((a, b), (b, a)), 2):
        animals, count, town, day = plans[one.given]
        page.line('"So you will be in {t} on {d}, with {c} {n}," said {o}.', t=town.name, d=day, c=in_words(count), n=animals, o=other.given)
        if page.random.chance(50):
            sold = 1 + page.below(count)
            page.line('"If I sell {s}, I shall still have {r}," said {p}.', s=in_words(sold), r=in_words(count - sold), p=one.given)
        person_sentence(page, one, page.below(7))
        page.end()


@kind(2)
def register(page: Page) -> None:
    """A table, and what can be read from it."""
    people = page.persons(4 + page.below(5))
    column = page.random.pick(("sacks of grain", "hens", "loaves", "barrels", "days of work", "bricks"))
    rows = [(person, 3 + page.below(90), page.random.pick(COLOURS)) for person in people]
    page.lines.append(f"name | trade | {column} | mark")
    page.lines += [f"{person.name} | {person.trade} | {count} | {mark}" for person, count, mark in rows]
    most, least = max(rows, key=lambda row: row[1]), min(rows, key=lambda row: row[1])
    page.say("{p} has [the most|more than all others], {n}.", "With {n} {p} is first.", p=most[0].given, n=most[1])
    page.say("{p} has the fewest, {n}.", "Last is {p} with {n}.", p=least[0].given, n=least[1])
    page.say("Together that makes {n}.", n=sum(row[1] for row in rows))
    row = page.random.pick(rows)
    page.say("The mark of {p} is {m}.", p=row[0].name, m=row[2])
    page.say("In order: {l}.", l=listed([f"{person.given} {count}" for person, count, _ in sorted(rows, key=lambda row: -row[1])]))


@kind(2)
def program(page: Page) -> None:
    """A list of assignments, and what it prints."""
    names = page.random.sample([thing for thing in THINGS if len(thing) < 7], 3)
    values = {}
    for name in names:
        values[name] = 1 + page.below(40)
        page.lines.append(f"let {name} = {values[name]}")
    for _ in range(4 + page.below(6)):
        name, other, number = page.random.pick(names), page.random.pick(names), 1 + page.below(20)
        which = page.below(4)
        if which == 0:
            values[name] += number
            page.lines.append(f"let {name} = {name} + {number}")
        elif which == 1 and values[name] < 500:
            values[name] += values[other]
            page.lines.append(f"let {name} = {name} + {other}")
        elif which == 2 and values[name] > values[other]:
            page.lines.append(f"if {name} > {other}: print {name}")
            page.lines.append(f"> {values[name]}")
        else:
            page.lines.append(f"print {name}")
            page.lines.append(f"> {values[name]}")
    page.lines.append(f"print {', '.join(names)}")
    page.lines.append(f"> {', '.join(str(values[name]) for name in names)}")


@kind(2)
def lexicon(page: Page) -> None:
    """Coined words are explained, and then used in the place of what they mean."""
    start = page.below(len(page.world.people) - 8)
    words: dict[str, str] = {}
    for person in page.world.people[start:start + 3 + page.below(2)]:
        words.setdefault(person.family.lower()[:6], f"{page.random.pick(LOOKS)} {page.random.pick(THINGS)}")
    for word, meaning in words.items():
        page.line("{w}: {a m}[, as they say in {t}|].", w=word, m=meaning, t=page.town().region)
    for word, meaning in page.random.sample(list(words.items()), len(words)):
        person, spot = page.person(), page.random.pick(SPOTS)
        page.say("{p} has {a w} {s}.", "There is {a w} {s}, and it belongs to {p}.", p=person.name, w=word, s=spot)
        page.say("So what [lies|is] {s} is {a m}.", s=spot, m=meaning)
        page.end()


@kind(2)
def council(page: Page) -> None:
    """Minutes: motions, votes, results."""
    town = page.town()
    people = page.persons(5)
    day, month = page.date()
    page.line("Council of {t}, {d} {m}", t=town.name, d=day, m=MONTHS[month])
    page.line("Present: {m} as mayor, {l}", m=page.world.people[town.mayor].name, l=listed([person.name for person in people]))
    for number in range(1, 3 + page.below(3)):
        person = page.random.pick(people)
        yes = page.below(6)
        page.say("{n}. {p} wants [the town to buy {c}|to repair the {l}|more {k} for the market|a new road to {o}].", n=number, p=person.name,
                 c=page.random.pick(CRAFTS), l=town.landmark, k=town.craft, o=page.world.towns[town.near].name)
        against = page.random.pick(people)
        page.say("{p} [is against it|asks what it will cost|says that there is no money]: {m} crowns.", p=against.given, m=50 * (1 + page.below(40)))
        page.say("{y} for it, {n} against it: {r}.", y=in_words(yes).capitalize(), n=in_words(5 - yes), r="accepted" if yes > 2 else "refused")
        page.end()


@kind(2)
def orchestra(page: Page) -> None:
    """Who plays what is known of the world; what they play tonight is said here."""
    people = page.persons(4)
    town = page.town()
    pieces = [f"the {page.random.pick(COLOURS)} {page.random.pick(ANIMALS)}" for _ in people]
    page.say("Tonight there is music [in {t}|at the {l} of {t}].", t=town.name, l=town.landmark)
    for person, piece in zip(people, pieces):
        page.say("{p} comes from {t} and plays the {i}: a song called {s}.", p=person.name, t=page.home(person).name, i=person.instrument, s=piece)
    page.end()
    for number in page.random.sample(range(len(people)), len(people)):
        page.say("{s} is the song of {p}, on the {i}.", "Now {p} takes the {i} and plays {s}.", p=people[number].given, i=people[number].instrument,
                 s=pieces[number])
    if not any(person.instrument == INSTRUMENTS[0] for person in people):
        page.say("Nobody plays the {i}.", i=INSTRUMENTS[0])


@kind(3)
def story(page: Page) -> None:
    page.lines.append(plots.tell(page.below(1 << 30), page.below(1 << 30)))


def write_page(seed: int, index: int) -> str:
    """Document number `index` of the seed: the same text on every machine, whatever else is generated."""
    random = RandomSource(seed, index)
    page = Page(random, world_of(seed))
    random.pick(KINDS)(page)
    return page.text()
