"""Who and what a story can be about: people, animals, places, seasons, things, dishes."""

from collections.abc import Collection
from dataclasses import dataclass

from .language import Person, Thing
from .random_source import RandomSource

GIRLS = """Mia Lucy Anna Ella Rosie Clara Nora Ivy Lily Hazel Molly Ruby Sara Tess Wendy Zoe Daisy Emma Flora Grace Holly
Jane Kate Lena Maya Nina Olive Penny Susie Tilly Vera Willa Amy Bella Carla Dora Edith Fern Greta Hannah""".split()
BOYS = """Tom Ben Sam Max Leo Jack Finn Oscar Hugo Peter Noah Luke Adam Billy Charlie Danny Eddie Felix George Henry
Ian Jonas Kim Louis Martin Ned Otto Paul Quinn Robin Simon Theo Victor Will Arthur Bruno Casper Dylan Elias Fred""".split()
ANIMAL_GIRLS = """Pip Poppy Clover Maple Dot Honey Pearl Misty Berry Nutmeg Snowdrop Tansy Bramble Minnow Plum Sorrel Sunny
Twinkle Velvet Wren Cinnamon Dahlia Primrose Pebble""".split()
ANIMAL_BOYS = """Rusty Bumble Acorn Biscuit Patch Moss Barley Bobbin Chester Cricket Dusty Fidget Ginger Hopper Jasper Mossy
Nibble Pepper Rolo Scamper Thistle Tumble Waffle Whiskers""".split()

# Adjective and what such a character tends to do.
TRAITS = [
    ("curious", "{hero.He} [asked questions about everything|wanted to know how everything worked|looked under every stone]."),
    ("cheerful", "{hero.He} [hummed a little tune|whistled a song|sang] wherever {hero.he} went."),
    ("shy", "{hero.He} [did not talk much|spoke in a very small voice|often hid when strangers came], but {hero.he} noticed everything."),
    ("brave", "{hero.He} [was not afraid of the dark|climbed the tallest trees|always went first]."),
    ("kind", "{hero.He} [always shared {hero.his} lunch|said good morning to everyone|never forgot to say thank you]."),
    ("clumsy", "{hero.He} [often tripped over {hero.his} own feet|dropped at least one thing every day|bumped into nearly everything]."),
    ("dreamy", "{hero.He} [liked to lie on the grass and watch the clouds|often forgot what {hero.he} was doing|told stories to the stars]."),
    ("stubborn", "When {hero.he} had an idea, [nobody could change {hero.his} mind|{hero.he} never let it go]."),
    ("clever", "{hero.He} [could solve almost any riddle|always had a plan|was good at fixing things]."),
    ("playful", "{hero.He} [made a game out of everything|loved to jump and roll in the grass|could play all day long]."),
    ("impatient", "{hero.He} [hated to wait for anything|wanted everything right now|could never sit still]."),
    ("quiet", "{hero.He} [liked to listen more than to talk|could sit still for a whole hour|loved small and gentle things]."),
    ("careful", "{hero.He} [checked everything twice|put every toy back in its place|never ran on wet stones]."),
    ("proud", "{hero.He} [thought that {hero.he} was the best at everything|did not like to ask for help|never said that {hero.he} was wrong]."),
    ("gentle", "{hero.He} [never stepped on a beetle|spoke softly to every flower|was good to all small creatures]."),
    ("busy", "{hero.He} [was always making something|never had an empty hand|had ten new ideas every morning]."),
    ("sleepy", "{hero.He} [loved a nap more than anything|yawned before every meal|could fall asleep almost anywhere]."),
    ("merry", "{hero.He} [laughed louder than anyone else|knew a joke for every day|danced when nobody was looking]."),
]
FRIEND_TRAITS = "kind clever funny patient quiet friendly wise gentle cheerful careful helpful lively".split()


@dataclass(frozen=True)
class Setting:
    """A place where stories happen; `spots` are phrases that tell where something can be."""

    human: bool
    home: str  # follows "lived"
    houses: tuple[str, ...]  # what the hero goes home to
    places: tuple[str, ...]  # where one can go
    spots: tuple[str, ...]
    helpers: tuple[tuple[str, str, str], ...]  # adjective, noun, gender
    kinds: tuple[str, ...] = ()


SETTINGS = [
    Setting(False, "in a [deep|quiet|great green] forest", ("the burrow", "the hollow tree", "the den"),
            ("the stream", "the clearing", "the old oak", "the blackberry hill", "the mossy path"),
            ("under a pile of leaves", "behind the old oak", "beside the stream", "inside a hollow log", "under a fern",
             "between two mossy stones", "at the foot of a tall pine", "in a patch of clover", "near the anthill"),
            (("old", "owl", "she"), ("gray", "badger", "he"), ("tall", "deer", "she"), ("tiny", "beetle", "he"),
             ("busy", "woodpecker", "he"), ("slow", "snail", "she"), ("old", "raven", "he")),
            ("fox", "rabbit", "bear", "squirrel", "hedgehog", "mouse", "badger", "raccoon", "wolf")),
    Setting(False, "[beside|near|on the edge of] a wide pond", ("the nest", "the reed house", "the cozy bank"),
            ("the lily pads", "the muddy bank", "the willow tree", "the wooden bridge", "the tall reeds"),
            ("under the wooden bridge", "behind the willow tree", "among the tall reeds", "on a lily pad", "in the soft mud",
             "under a flat stone", "beside the old boat", "between the roots of the willow", "in the long grass"),
            (("old", "turtle", "he"), ("white", "swan", "she"), ("green", "dragonfly", "she"), ("long-legged", "heron", "he"),
             ("fat", "toad", "he"), ("blue", "kingfisher", "she"), ("brown", "water rat", "he")),
            ("duckling", "frog", "otter", "beaver", "turtle", "goose", "newt")),
    Setting(False, "on a [busy|sunny|small] farm", ("the barn", "the warm stable", "the straw bed"),
            ("the meadow", "the orchard", "the duck pond", "the vegetable garden", "the hay field"),
            ("behind the barn", "under the hay cart", "beside the well", "in the tall corn", "under the apple tree",
             "inside an empty bucket", "near the garden gate", "behind the water trough", "under a cabbage leaf"),
            (("old", "horse", "he"), ("brown", "cow", "she"), ("speckled", "hen", "she"), ("gray", "donkey", "he"),
             ("white", "goat", "she"), ("proud", "rooster", "he"), ("sleepy", "dog", "he")),
            ("puppy", "kitten", "lamb", "piglet", "pony", "chick", "calf")),
    Setting(False, "in a [wide|sunny|flowery] meadow", ("the burrow", "the grass nest", "the round house under the hill"),
            ("the daisy field", "the brook", "the stone wall", "the lonely tree", "the green hill"),
            ("under a big daisy", "behind the stone wall", "beside the brook", "in a tuft of grass", "under a red mushroom",
             "at the foot of the hill", "behind a molehill", "among the poppies", "near the lonely tree"),
            (("old", "mole", "he"), ("yellow", "butterfly", "she"), ("wise", "stork", "she"), ("green", "grasshopper", "he"),
             ("spotted", "ladybug", "she"), ("brown", "hare", "he"), ("busy", "bee", "she")),
            ("mouse", "rabbit", "hedgehog", "mole", "hamster", "lizard", "sparrow")),
    Setting(True, "in a [small|quiet|pretty] village", ("the house", "the cottage", "the little yellow house"),
            ("the market", "the mill", "the village green", "the church hill", "the stone bridge"),
            ("behind the bakery", "under the stone bridge", "beside the well", "in the tall grass", "under a bench",
             "near the mill wheel", "behind a barrel", "on the garden wall", "under the chestnut tree"),
            (("old", "baker", "he"), ("kind", "miller", "he"), ("friendly", "shoemaker", "she"), ("tall", "farmer", "he"),
             ("young", "teacher", "she"), ("busy", "gardener", "she"), ("old", "postman", "he"))),
    Setting(True, "by the [sea|wide blue sea]", ("the house", "the blue cottage", "the house on the cliff"),
            ("the beach", "the harbor", "the lighthouse", "the tide pools", "the white dunes"),
            ("under an old boat", "behind a big rock", "in a tide pool", "beside the fishing nets", "under the pier",
             "in the soft sand", "near the lighthouse door", "between two white shells", "behind a heap of seaweed"),
            (("old", "fisherman", "he"), ("kind", "sailor", "he"), ("gray", "gull", "she"), ("tiny", "crab", "he"),
             ("young", "lighthouse keeper", "she"), ("old", "boat builder", "he"), ("friendly", "seal", "she"))),
    Setting(True, "in a [big|busy|noisy] town", ("the apartment", "the house", "the tall brick house"),
            ("the park", "the library", "the playground", "the toy shop", "the river walk"),
            ("under a park bench", "behind the fountain", "beside the slide", "in the sandbox", "under the big maple tree",
             "near the bus stop", "behind the flower pots", "on the library steps", "under the swing"),
            (("old", "librarian", "she"), ("friendly", "bus driver", "he"), ("tall", "policeman", "he"), ("busy", "florist", "she"),
             ("kind", "street sweeper", "he"), ("young", "painter", "she"), ("old", "clockmaker", "he"))),
    Setting(True, "on a farm [at the end of a long road|between two hills|near a dark wood]", ("the farmhouse", "the house", "the red farmhouse"),
            ("the orchard", "the hay barn", "the duck pond", "the pumpkin field", "the sheep pasture"),
            ("behind the hay barn", "under the tractor", "beside the pump", "in the pumpkin field", "under the plum tree",
             "inside the chicken coop", "near the wooden gate", "behind the rain barrel", "in a pile of straw"),
            (("old", "shepherd", "he"), ("kind", "neighbor", "she"), ("brown", "horse", "he"), ("speckled", "hen", "she"),
             ("young", "milkmaid", "she"), ("gray", "donkey", "he"), ("old", "beekeeper", "he"))),
    Setting(True, "high up in the mountains", ("the cabin", "the wooden house", "the little stone house"),
            ("the waterfall", "the goat path", "the pine wood", "the mountain lake", "the rope bridge"),
            ("behind the waterfall", "under a fallen pine", "beside the goat path", "in a small cave", "between two rocks",
             "near the rope bridge", "under the wooden stairs", "behind the woodpile", "at the edge of the lake"),
            (("old", "goatherd", "he"), ("kind", "innkeeper", "she"), ("white", "goat", "she"), ("great", "eagle", "he"),
             ("young", "woodcutter", "he"), ("old", "weaver", "she"), ("small", "marmot", "he"))),
]


@dataclass(frozen=True)
class Season:
    name: str
    sky: tuple[str, ...]  # whole sentences
    days: tuple[str, ...]  # adjective of a day
    clothes: str


SEASONS = [
    Season("spring", ("The snow was gone and the first flowers were out.", "The air smelled of rain and new grass.",
                      "Birds were singing in every tree.", "A soft wind blew the blossoms about."),
           ("spring", "fresh spring", "bright spring", "breezy"), "jacket"),
    Season("summer", ("The sun was warm and the sky was blue.", "There was not a cloud in the sky.", "Bees buzzed in the warm air.",
                      "It was so hot that even the flies were slow."), ("summer", "warm summer", "long summer", "hot"), "straw hat"),
    Season("autumn", ("Red and yellow leaves danced in the wind.", "The mornings were cold and the apples were ripe.",
                      "Fog lay over the fields.", "The wind blew hard and the clouds ran across the sky."),
           ("windy", "cool autumn", "gray autumn", "golden autumn"), "scarf"),
    Season("winter", ("Snow lay on every branch.", "The ground was white and the air was cold.", "Frost made flowers on the windows.",
                      "Big snowflakes fell without a sound."), ("winter", "cold winter", "snowy", "icy"), "woolen cap"),
]

_COLORS = ("red", "blue", "green", "yellow", "purple", "orange", "white", "striped")
_METALS = ("silver", "golden", "shiny", "brass", "copper")
_WOODEN = ("wooden", "red", "painted", "carved", "yellow")
_CLOTH = ("soft", "blue", "patched", "striped", "red", "green", "fluffy")

# noun, adjectives, use (infinitive without "to"), joy
THINGS = [
    ("kite", _COLORS, "fly it on the hill", "{hero.He} [flew it|ran with it] whenever the wind was strong."),
    ("ball", _COLORS, "bounce it against the wall", "{hero.He} [bounced it|threw it high into the air] a hundred times a day."),
    ("drum", _WOODEN, "play a loud song on it", "Boom, boom, boom, it went when {hero.he} played."),
    ("scarf", _CLOTH, "wear it in the cold wind", "It kept {hero.him} warm [on cold days|from morning to night]."),
    ("lantern", _METALS + ("little",), "light it in the evening", "It glowed like a [small star|little sun] in the evening."),
    ("boat", ("toy", "paper", "wooden", "little red", "little blue"), "sail it on the water",
     "{hero.He} [sailed it on every puddle|made it carry nuts and berries]."),
    ("bell", _METALS, "ring it every morning", "It rang so clearly that [even the birds stopped to listen|everyone smiled]."),
    ("basket", ("round", "big", "brown", "yellow", "little"), "fill it with berries", "{hero.He} carried it everywhere and filled it with treasures."),
    ("whistle", _METALS + ("wooden",), "blow it as loud as possible", "One short blow, and everyone knew that {hero.he} was near."),
    ("book", ("picture", "thick", "old", "little green", "blue"), "read it under a tree", "{hero.He} knew every [page|picture] by heart."),
    ("teddy bear", ("brown", "old", "soft", "little"), "hug it at night", "{hero.He} [could not sleep without it|told it all {hero.his} secrets]."),
    ("blanket", _CLOTH, "sleep under it", "It smelled of [home|lavender] and was as soft as a cloud."),
    ("cup", ("blue", "tiny", "tin", "painted", "white"), "drink cocoa from it", "Everything tasted better in it."),
    ("wagon", _WOODEN + ("blue",), "pull it down the path", "{hero.He} pulled it along and gave rides to {hero.his} friends."),
    ("flute", ("wooden", "silver", "reed", "little"), "play a soft song on it", "When {hero.he} played, [the birds sang along|everyone grew quiet]."),
    ("umbrella", _COLORS + ("spotted",), "walk under it in the rain", "{hero.He} [jumped over puddles with it|carried it even in the sun]."),
    ("feather", ("white", "blue", "long", "golden", "peacock"), "tickle {hero.his} friends with it", "It was so light that it danced on every breath."),
    ("marble", ("glass", "green", "blue", "shiny", "striped"), "roll it down the path", "When {hero.he} held it up to the light, it shone like the moon."),
    ("box", ("music", "tin", "wooden", "little blue", "secret"), "keep treasures in it", "{hero.He} kept [seven buttons and a snail shell|three acorns and a pebble] in it."),
    ("top", ("spinning",), "spin it on the floor", "It hummed like a bee when it turned."),
    ("puppet", ("funny", "wooden", "little", "striped"), "make it dance", "It could [dance|bow and wave] when {hero.he} pulled the strings."),
    ("hat", ("red", "straw", "tall", "blue", "pointed", "green"), "wear it every day", "It made {hero.him} feel [very grand|as tall as a tree]."),
    ("bucket", ("tin", "red", "yellow", "little blue"), "carry water in it", "{hero.He} [built towers with it|carried sand and water in it]."),
    ("compass", _METALS, "find the way home with it", "Its little needle always pointed north."),
    ("paintbrush", ("long", "soft", "new", "fine"), "paint pictures with it", "{hero.He} painted [clouds|flowers|funny faces] with it every day."),
    ("button", _METALS + ("big blue",), "wear it on a string", "{hero.He} [polished it|looked at it] every morning and every evening."),
]

# name, how one serving is called, three ingredients
DISHES = [
    ("berry pie", "a berry pie", ("flour", "butter", "a basket of berries")), ("carrot soup", "a pot of carrot soup", ("carrots", "onions", "a pinch of salt")),
    ("honey cake", "a honey cake", ("honey", "flour", "three eggs")), ("apple tart", "an apple tart", ("apples", "sugar", "butter")),
    ("pumpkin bread", "a loaf of pumpkin bread", ("a pumpkin", "flour", "nuts")), ("plum jam", "a jar of plum jam", ("plums", "sugar", "a lemon")),
    ("mushroom stew", "a pot of mushroom stew", ("mushrooms", "potatoes", "parsley")), ("nut bread", "a loaf of nut bread", ("nuts", "flour", "milk")),
    ("pear pudding", "a pear pudding", ("pears", "milk", "cinnamon")), ("corn cake", "a corn cake", ("corn", "milk", "two eggs")),
    ("cherry pie", "a cherry pie", ("cherries", "flour", "sugar")), ("potato soup", "a pot of potato soup", ("potatoes", "cream", "a bit of thyme")),
]
SNACKS = ["apple", "pear", "plum", "carrot", "cookie", "bun", "peach", "nut cake"]

_HUMAN_ELDERS = [("Grandma", "she", "grandmother"), ("Grandpa", "he", "grandfather"), ("Mom", "she", "mother"), ("Dad", "he", "father"),
                 ("Aunt Rosa", "she", "aunt"), ("Uncle Joe", "he", "uncle")]
_ANIMAL_ELDERS = [("Grandma", "she", "grandmother"), ("Grandpa", "he", "grandfather"), ("Mama", "she", "mother"), ("Papa", "he", "father"),
                  ("Aunt Willow", "she", "aunt"), ("Uncle Bark", "he", "uncle")]
_SIZES = ["little", "small", "young", "tiny"]


def make_hero(random: RandomSource, setting: Setting) -> Person:
    gender = random.pick(["he", "she"])
    trait, habit = random.pick(TRAITS)
    if setting.human:
        kind = "boy" if gender == "he" else "girl"
        name = random.pick(BOYS if gender == "he" else GIRLS)
        return Person(name, gender, kind, "", f"a(n) {trait} [little|young|] {kind} named {name}", trait, habit)
    kind, look = random.pick(setting.kinds), random.pick(_SIZES)
    name = random.pick(ANIMAL_BOYS if gender == "he" else ANIMAL_GIRLS)
    return Person(name, gender, kind, look, f"a(n) {trait} [{look}|] {kind} named {name}", trait, habit)


def make_friend(random: RandomSource, setting: Setting, hero: Person) -> Person:
    """A second character who can always be told apart from the hero by name and by kind."""
    trait = random.pick([trait for trait in FRIEND_TRAITS if trait != hero.trait])
    if setting.human:
        gender = "she" if hero.gender == "he" else "he"
        kind = "boy" if gender == "he" else "girl"
        name = random.pick(BOYS if gender == "he" else GIRLS)
        return Person(name, gender, kind, "", f"a(n) {trait} {kind} named {name}", trait)
    other = "she" if hero.gender == "he" else "he"
    gender = other if random.chance(75) else hero.gender
    kind = random.pick([kind for kind in setting.kinds if kind != hero.kind])
    name = random.pick([name for name in (ANIMAL_BOYS if gender == "he" else ANIMAL_GIRLS) if name != hero.name])
    return Person(name, gender, kind, "", f"a(n) {trait} {kind} named {name}", trait)


def make_elder(random: RandomSource, setting: Setting) -> Person:
    name, gender, kind = random.pick(_HUMAN_ELDERS if setting.human else _ANIMAL_ELDERS)
    return Person(name, gender, kind)


def make_helper(random: RandomSource, setting: Setting, taken: set[str]) -> Person:
    look, noun, gender = random.pick([helper for helper in setting.helpers if helper[1] not in taken])
    return Person(f"the {noun}", gender, noun, look, f"a(n) {look} {noun}")


def make_thing(random: RandomSource, taken: Collection[str] = ()) -> Thing:
    noun, adjectives, use, joy = random.pick([thing for thing in THINGS if thing[0] not in taken])
    return Thing(noun, random.pick(adjectives), use, joy)
