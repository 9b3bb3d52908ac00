"""The plots. Each is a skeleton of steps; each step says one of several sentences about the same facts."""

from typing import Callable

from .random_source import RandomSource
from .story import Story
from .world import make_thing

Plot = Callable[[Story], None]
_TOYS_FOR_TWO = ("kite", "ball", "drum", "boat", "wagon", "marble", "top", "puppet", "book", "bell", "bucket", "flute")
_BIRDS = ("duckling", "goose", "chick", "sparrow")
_WARM = ("spring", "summer", "autumn")
PLOTS: list[tuple[Plot, tuple[str, ...] | None]] = []


def plot(seasons: tuple[str, ...] | None = None) -> Callable[[Plot], Plot]:
    """Registers a plot, and the seasons in which it can happen (None: all)."""

    def register(function: Plot) -> Plot:
        PLOTS.append((function, seasons))
        return function

    return register


def make_story(seed: int, index: int) -> Story:
    """Story number `index` of the seed: the same on every machine, whatever else is generated."""
    random = RandomSource(seed, index)
    function, seasons = random.pick(PLOTS)
    story = Story(random, seasons)
    function(story)
    return story


def tell(seed: int, index: int) -> str:
    return make_story(seed, index).text()


@plot()
def lost_thing(s: Story) -> None:
    s.open(thing=True)
    s.paragraph()
    s.say(
        "One {day} morning, the {thing.noun} was gone.",
        "But one {day} day, {hero} [could not find it|came home without it].",
        "One {day} morning, {hero} woke up and the {thing.noun} was not [there|in its place].",
    )
    s.say(
        '"Where is my {thing}?" {hero.he} [cried|asked]. [Nobody knew.|{elder} did not know.|{hero.He} felt like crying.]',
        "{hero} [turned the whole house upside down|looked in every corner], but the {thing.noun} was nowhere to be found.",
        '"Oh no!" said {hero}. "I [must|have to] find my {thing}!"',
    )
    s.say(
        "First {hero.he} looked {spot}. [There was only a spider.|It was not there.|There was nothing but an old shoe.]",
        "{hero.He} searched {spot}, but all {hero.he} found was [an old sock|a sleepy bug|a round pebble].",
        "{hero.He} went to {place} and looked {spot}. No {thing.noun}.",
    )
    s.say(
        "Then {hero.he} looked {spot2}. [Nothing there, either.|It was not there, either.]",
        "Next {hero.he} tried {spot2}. [Again, nothing.|Still no {thing.noun}.]",
        "{hero.He} even crawled about {spot2}, and got very dirty.",
    )
    s.paragraph()
    s.say(
        "{hero} sat down and [sighed|began to cry]. Just then, {helper} came by. \"Why are you so sad?\" \"I have lost my {thing},\" said {hero}.",
        "At {place2}, {hero} met {helper.intro}. \"You look sad,\" said {helper}. \"What is the matter?\" {hero} told {helper.him} about the {thing.noun}.",
        "On the way, {hero} met {helper.intro}. \"Have you seen my {thing}?\" {hero.he} asked.",
    )
    s.say(
        '"I saw something [strange|pretty|odd] {spot3}," said {helper}. "[Come, I will show you.|Go and look there.|Maybe that is it.]"',
        '{Helper} thought for a while. "Where did you play yesterday?" "Oh!" said {hero}. "I was playing {spot3}!"',
        '"The wind carried something away last night," said {helper}. "Look {spot3}."',
    )
    s.say(
        "{hero} ran as fast as {hero.he} could. And there, {spot3}, was the {thing}!",
        "They went there together, and there it was: the {thing}, {spot3}.",
        "{hero} looked {spot3}, and something was lying there. It was the {thing}!",
    )
    s.say(
        '"Thank you, thank you!" {hero} [cried|called] and hugged {helper}.',
        "{hero} [held the {thing.noun} tight|jumped for joy]. \"You are very kind,\" {hero.he} told {helper}.",
        "{hero} was so happy that {hero.he} gave {helper} {a snack}.",
    )
    s.close(
        "From that day on, {hero} always put the {thing.noun} back in its place.",
        "{hero} learned that it is good to ask for help.",
        "After that, {hero} took better care of {hero.his} things.",
        "\"A friend with good eyes is the best treasure of all,\" said {hero}.",
    )


@plot()
def sharing(s: Story) -> None:
    s.choose_thing(*_TOYS_FOR_TWO)
    s.open(friend=True, thing=True)
    s.paragraph()
    s.say(
        'One {day} day, {friend} [asked|said], "May I have the {thing.noun} for a while? I want to {thing.use} too."',
        'One {day} afternoon, they met at {place}. "Can I try your {thing}?" asked {friend}.',
        "On {a day} day, {friend} came to play. {friend.He} saw the {thing} and reached for it.",
    )
    s.say(
        '"No!" said {hero}. "It is mine!"',
        '{hero} held the {thing.noun} behind {hero.his} back. "You will break it," {hero.he} said.',
        '"It is my {thing.noun}, and only I may have it," said {hero}.',
    )
    s.say(
        "{friend} looked at the ground and went away.",
        "{friend}'s eyes filled with tears. {friend.He} walked home alone.",
        '"Then I will not play with you," said {friend}, and {friend.he} left.',
    )
    s.paragraph()
    s.say(
        "So {hero} played alone. But [it was no fun|it was not the same]. There was nobody to laugh with.",
        "Now {hero} had the {thing.noun} all to {hero.himself}. But soon {hero.he} felt lonely.",
        "{hero} took the {thing.noun} and tried to {thing.use}, but without {friend} it was dull.",
    )
    s.say(
        '"Why are you alone?" asked {elder}. {hero} told {elder.him} everything. "A toy gets better when two can play with it," said {elder}.',
        '{Helper} had seen it all. "What is the {thing.noun} worth without a friend?" asked {helper}.',
        "{hero} thought about {friend}, who always shared {friend.his} {snack} with {hero.him}. {hero} felt [ashamed|sorry].",
    )
    s.say(
        "{hero} took the {thing} and [ran|hurried] to find {friend}. {friend} was sitting {spot}.",
        "At once {hero} went to look for {friend} and found {friend.him} {spot}.",
    )
    s.say(
        '"I am sorry," said {hero}. "[Here, you can have the first turn.|Let\'s play together.|You can go first.]"',
        '"I was wrong," said {hero}. "Do you want to {thing.use} with me?"',
    )
    s.say(
        "{friend} [smiled|wiped {friend.his} tears]. They took turns until [the sun went down|it was time for supper].",
        "{friend}'s face lit up. All afternoon they [laughed and played|took turns], and it was [the best day of the {season}|twice as much fun].",
    )
    s.close(
        "From then on, the {thing.noun} belonged to both of them.",
        "{hero} learned that sharing makes everything more fun.",
        "A thing that is shared is twice as good.",
        "After that, {hero} never played alone again.",
    )


@plot()
def small_rescue(s: Story) -> None:
    s.open()
    winter = s.slots["season"] == "winter"
    s.draw("victim", "bird", "mouse", *(() if winter else ("butterfly", "ladybug", "bee", "snail", "beetle")))
    s.draw("trap", "caught in a thorn bush", "stuck in a crack", "tangled in a piece of string", "trapped under a stick",
           "lying on its back", "caught in a spider web")
    s.draw("color", "blue", "brown", "gray", "spotted", "golden")
    s.say(
        "One {day} day, {hero.he} walked to {place}. {sky}",
        "{sky} {hero} was on {hero.his} way to {place}.",
        "One {day} morning, {hero} went out to [play|look for adventures|visit {hero.his} {elder.kind}]. {sky}",
    )
    s.paragraph()
    s.say(
        "Suddenly {hero.he} heard a tiny voice. \"Help! Help!\" {Spot}, {hero.he} saw a small {color} {victim}. It was {trap}.",
        "{Spot}, something moved. It was a little {color} {victim}, and it was {trap}.",
        '"Please help me!" called a thin voice. {hero} looked around and saw {a color} {victim} {spot}. It was {trap}.',
    )
    s.say(
        '"[Do not be afraid|Don\'t worry]," said {hero}. "I will [help you|get you out]."',
        "{hero} was in a hurry, but {hero.he} could not leave the {victim} there.",
        '"You poor thing!" said {hero}. "Hold still."',
    )
    s.say(
        "Very gently, {hero.he} set the {victim} free.",
        "{hero} worked slowly and carefully. It took a long time, but at last the {victim} was free.",
        "{hero} used a [twig|long stalk|leaf], [pulled a little here and pushed a little there|and worked with great care], and soon the {victim} was free.",
    )
    s.say(
        '"Thank you," said the {victim}. "One day I will help you, too." {hero} [laughed|smiled]. How could such a small {victim} ever help {hero.him}?',
        '"I will never forget this," said the {victim}, and off it went.',
        'The {victim} bowed. "If you ever need me, just call," it said.',
    )
    s.paragraph()
    s.say(
        "A [few|{number}] days later, {hero} lost {hero.his} way in the fog near {place2}. {hero.He} could not see {hero.his} own feet.",
        "Not long after, {hero} stayed too long at {place2}. It grew dark, and {hero.he} could not find the path.",
        "Some days later, {hero} followed a strange sound past {place2} and soon did not know where {hero.he} was.",
    )
    s.say(
        '{hero.He} was [cold and scared|very frightened]. "What shall I do?" {hero.he} whispered.',
        "{hero} called for help, but nobody answered.",
    )
    s.say(
        'Then {hero.he} heard a small voice. "Follow me!" It was the {color} {victim}!',
        "Then something landed on {hero.his} shoulder. It was the {color} {victim}! \"Now it is my turn to help,\" it said.",
        'Something small came closer. "Do you remember me?" asked the {color} {victim}. "I know the way."',
    )
    s.say(
        "Step by step, the {victim} led {hero} [home|back to {house}].",
        "The {victim} went ahead, and {hero} followed until {hero.he} saw the lights of {house}.",
    )
    s.close(
        "No friend is too small to help.",
        "{hero} learned that kindness always comes back.",
        "From that day on, {hero} and the {victim} were friends.",
        "\"Thank you, little friend,\" said {hero}. \"You are small, but your heart is big.\"",
    )


@plot()
def learning(s: Story) -> None:
    s.open(friend=True)
    s.draw("skill", "whistle", "climb the tall tree", "tie a bow", "do a handstand", "juggle three balls", "jump across the ditch",
           "dance the round dance", "play the flute", "walk on stilts", *(() if s.slots["season"] == "winter" else ("swim", "skip stones")))
    s.draw("master", "{friend}", "{elder}", "the {helper.look} {helper.kind}")
    s.draw("mockers", "crows", "ducks", "geese")
    mocked = s.random.chance(40)
    s.say(
        "More than anything, {hero.he} wanted to learn to {skill}.",
        "There was one thing {hero.he} could not do: {hero.he} could not {skill}.",
        "Everybody could {skill}, only {hero} could not.",
        "One {day} day, {hero} saw {master} {skill}. \"I want to do that, too,\" {hero.he} said.",
    )
    s.paragraph()
    s.say(
        "So {hero} went to {place} and tried. {hero.He} tried once, and it did not work.",
        "On the first day, {hero.he} tried and [failed|fell over|got it all wrong].",
        "{hero} took a deep breath and tried. It went [terribly wrong|badly].",
    )
    s.say(
        "{hero.He} tried again, and again it went wrong.",
        "{hero.He} tried {number} more times. It was no use.",
        "On the second day, it was no better.",
    )
    s.say(
        'Some {mockers} laughed. "You will never learn it!" they called.',
    ) if mocked else s.say(
        '"I will never learn to {skill}," {hero} [sighed|said] and kicked a stone.',
        "{hero} was so angry that {hero.he} stamped {hero.his} foot.",
    )
    s.paragraph()
    s.say(
        '{Master} had been watching. "You are too fast," said {master}. "[Go slowly.|Take your time.] Do one small step after another."',
        'Then {master} came by. "Do you know how often I failed?" asked {master}. "A hundred times. Try once more."',
        '"Let me tell you a secret," said {master}. "It is not strong arms you need. It is patience."',
    )
    s.say(
        "So {hero} practiced every [morning|evening]. {hero.He} practiced in the sun and in the wind.",
        "{hero} nodded and tried it that way. A little better! {hero.He} tried again. Better still!",
        "Every day {hero} practiced {spot}, where nobody could see {hero.him}.",
    )
    s.say(
        "And one {day} day, it worked! {hero} could {skill}!",
        "After {number} days, {hero.he} tried once more, and suddenly it was easy.",
        "Then, all at once, {hero.he} could do it. \"Look, look!\" {hero.he} shouted.",
    )
    s.say(
        '"I knew you could do it," said {master}.',
        "{Master} clapped, and even the {mockers} said nothing more." if mocked else "{Master} [clapped|cheered|gave {hero} a big hug].",
        "{hero} was so proud that {hero.he} did it {number} times in a row.",
    )
    s.close(
        "If you want to learn something, you must not give up.",
        "Now {hero} knew: every master was once a beginner.",
        "From then on, when something was hard, {hero} just said, \"I can't do it yet.\"",
        "Soon {hero} showed [a small neighbor|the little ones] how to {skill}, and {hero.he} was very patient.",
    )


@plot()
def afraid(s: Story) -> None:
    s.open(friend=True)
    s.draw("fear", "the dark", "thunder", "high places", "the big dog at the gate", "loud noises",
           *(() if s.slots["season"] == "winter" else ("deep water",)))
    s.say(
        "{hero} was [afraid|very much afraid] of {fear}, but {hero.he} [told nobody|kept it a secret].",
        "Only one thing frightened {hero}, and that was {fear}.",
        "There was something that nobody knew: {hero} was afraid of {fear}.",
    )
    s.paragraph()
    fear = s.slots["fear"]
    scenes = {
        "the dark": ("One evening, the light went out. Everything was black.", "One {day} evening, {friend} asked {hero} to walk through the dark to {place}."),
        "thunder": ("One evening, black clouds came up, and a loud boom shook the roof.", "One night, a storm came. The thunder rolled over {place}."),
        "deep water": ("One {day} day, they had to cross the water near {place}. It was deep and green.",
                       "One {day} day, {friend} jumped into the deep water near {place}. \"Come in!\" {friend.he} called."),
        "high places": ("One {day} day, {friend} climbed up high near {place}. \"Come up!\" {friend.he} called.",
                        "One {day} day, the {thing.noun} of {friend} got stuck high up in a tree."),
        "the big dog at the gate": ("One {day} day, the only way to {place} went past the gate with the big dog.",
                                    "One {day} day, {friend}'s {thing.noun} rolled through the gate, right to the big dog's feet."),
        "loud noises": ("One {day} day, there was a feast at {place}, with drums and trumpets.",
                        "One {day} day, a great crash came from {place}."),
    }
    s.say(*scenes[fear])
    s.say(
        "{hero}'s knees began to shake. {hero.He} wanted to run away.",
        "{hero} [froze|turned pale] and could not say a word.",
        "{hero.His} heart went thump, thump, thump.",
    )
    s.say(
        '"Are you all right?" asked {friend}. "I... I am scared," {hero} whispered.',
        '"What is wrong?" asked {friend}. {hero} swallowed. "I am afraid of {fear}," {hero.he} said at last.',
    )
    s.say(
        '{friend} did not laugh. "I am afraid sometimes, too," {friend.he} said. "[Take my hand.|Hold on to me.|We will do it together.]"',
        '"That is nothing to be ashamed of," said {friend}. "I used to be afraid of {fear}, too. Count to {number} and breathe slowly."',
        '"Thank you for telling me," said {friend}. "Let\'s sing a song. It always helps me."',
    )
    s.say(
        "So they stood close together, and {hero} [breathed slowly|counted to {number}|hummed a tune].",
        "{hero} took one small step. Then another. {friend} stayed right beside {hero.him}.",
    )
    endings = {
        "the dark": "After a while, {hero} could see the stars, and the dark was not so black at all.",
        "thunder": "After a while, the thunder was only a far rumble, like a giant with a hungry belly.",
        "deep water": "After a while, {hero} noticed that the water was carrying {hero.him} [softly|like a big blue bed].",
        "high places": "Soon {hero} was at the top and could see all the way to {place2}. It was beautiful.",
        "the big dog at the gate": "The big dog sniffed at {hero} and wagged its tail. It only wanted to play!",
        "loud noises": "Soon {hero} found that a noise is only a noise, and {hero.he} even made one, too.",
    }
    s.say(endings[fear])
    s.close(
        "Being brave does not mean that you are never afraid. It means that you go on.",
        "{hero} was still a little afraid of {fear}, but now {hero.he} knew what to do.",
        "\"I did it!\" said {hero}. A fear that you share is only half as big.",
        "Since that day, {hero} was no longer ashamed of being afraid.",
    )


@plot()
def broken_cup(s: Story) -> None:
    s.open()
    s.draw("treasure", "blue vase", "china plate", "glass bowl", "painted jug", "old clock", "flower pot", "little mirror", "clay pitcher")
    s.say(
        "{hero.His} {elder.kind} had {a treasure}. [It stood on a shelf, and nobody was allowed to touch it.|It was very old, and {elder.he} loved it.]",
        "On the shelf in {house} stood {elder}'s {treasure}. \"Please be careful with it,\" {elder} always said.",
    )
    s.paragraph()
    s.say(
        "One {day} day, {hero} was alone and played with {hero.his} {thing.noun} inside. Crash! The {treasure} fell down and broke.",
        "One {day} afternoon, {hero} ran through {house} much too fast. {hero.He} bumped into the shelf, and the {treasure} fell to the floor.",
        "One {day} day, {hero} wanted to look at the {treasure}, just once. It slipped from {hero.his} hands and broke into {number} pieces.",
    )
    s.say(
        "{hero} [stared at the pieces|did not dare to breathe]. What would {elder} say?",
        '"Oh no, oh no," whispered {hero}. {hero.His} tummy felt cold.',
    )
    s.say(
        "Quickly, {hero.he} picked up the pieces and hid them {spot}.",
        "{hero} swept up the pieces and [carried them out and] put them {spot}.",
    )
    s.paragraph()
    s.say(
        'In the evening, {elder} asked, "Where is my {treasure}?" "I don\'t know," said {hero}, and {hero.he} looked at {hero.his} feet.',
        '"Has anybody seen my {treasure}?" asked {elder}. {hero} shook {hero.his} head. {hero.His} ears grew hot.',
        'When {elder} came home, {elder.he} saw the empty shelf. "Maybe the cat did it," said {hero} quickly.',
    )
    s.say(
        "But that night, {hero} could not sleep. The lie lay on {hero.his} heart like a stone.",
        "{hero} could not eat {hero.his} {snack}. {hero.He} could not play. {hero.He} thought only of the {treasure}.",
        "All night {hero} [tossed and turned|dreamed of broken things].",
    )
    s.say(
        'At last, {hero.he} went to {elder}. "It was me," {hero.he} said. "I broke the {treasure}, and I hid it {spot}. I am so sorry."',
        '"I have to tell you something," {hero.he} said to {elder} in the morning. "I broke your {treasure}, and then I lied. The pieces are {spot}."',
    )
    s.say(
        '{elder} was quiet for a moment. Then {elder.he} [hugged {hero}|took {hero} in {elder.his} arms]. "I am sad about the {treasure}," {elder.he} said, "but I am glad that you told me the truth."',
        '"Thank you for telling me," said {elder}. "A(n) {treasure} can be mended. [A lie is harder to mend.|So can a mistake.]"',
    )
    s.say(
        "Together they fetched the pieces and glued the {treasure}, piece by piece. It had some cracks now, but [it was still pretty|{elder} liked it even more].",
        "They [got some glue and] worked all afternoon, and in the end the {treasure} stood on the shelf again.",
        "{hero} gave {elder} {hero.his} own {thing} as a present. But {elder} smiled and gave it back.",
    )
    s.close(
        "The truth can be hard, but it makes the heart light.",
        "{hero} never hid a mistake again.",
        "After that, {hero} slept well again.",
        "It is brave to tell the truth.",
    )


@plot()
def birthday_cooking(s: Story) -> None:
    s.open()
    s.say(
        "It was {elder}'s birthday, and {hero} wanted to make {serving} for {elder.him}.",
        "One {day} day, {hero}'s {elder.kind} was sick in bed. \"I will make {elder.him} {serving},\" said {hero}.",
        "Tomorrow was a big feast at {place}, and {hero} had promised to bring {serving}.",
    )
    s.say(
        "{hero.He} needed {need}, {need2} and {need3}.",
        '"I need {need}, {need2} and {need3}," {hero.he} [counted|said].',
    )
    s.say(
        "{hero.He} found {need} in the kitchen. But there was no sign of {need2} or {need3}.",
        "In the kitchen there [was only|was nothing but] {need}." if not s.slots["need"].endswith("s")
        else "There were {need} in the basket, but nothing else.",
    )
    s.paragraph()
    s.say(
        'So {hero} went to {place2} and met {helper.intro}. "Do you have {need2}?" {hero.he} asked.',
        '{hero} knocked at the door of {helper.intro}. "Good morning," {hero.he} said. "Could you give me {need2}?"',
    )
    s.draw("chore", "carry my water", "find my glasses", "sweep my steps", "stack my firewood", "water my flowers", "mend my fence")
    s.say(
        '"Gladly," said {helper}, "if you {chore} for me." {hero} [set to work at once|worked hard], and then {helper} gave {hero.him} {need2}.',
        '"Of course," said {helper}. "But first, could you {chore}?" So {hero} did that, and [got|was given] {need2} for it.',
    )
    s.say(
        "For {need3}, {hero} asked {helper2.intro}. {Helper2} was glad to share.",
        'Next, {hero} met {helper2.intro}. "You want {need3}? Here you are, dear," said {helper2}. "You once helped me, too."',
        "{Helper2} had {need3} and asked for nothing but a song in return.",
        "{Helper2} heard the story and brought {need3} as a gift.",
    )
    s.paragraph()
    s.say(
        "Back at {house}, {hero} [stirred and baked|mixed and cooked|worked] all afternoon. There was a mess on the floor, on the table and even on {hero.his} nose.",
        "{hero} hurried home and began. {hero.He} stirred and tasted and stirred again. Soon {house} smelled wonderful.",
    )
    s.say(
        'The {dish} was a little [crooked|burnt on one side|too sweet], but {elder} [ate every bit|asked for more]. "This is the best {dish} of my life," {elder.he} said.',
        '"{hero}! You made this?" asked {elder}. {elder.He} took a bite and smiled. "It tastes of love."',
    )
    s.say(
        "{hero} invited {helper} and {helper2} as well, and there was enough for all.",
        "{Helper} and {helper2} got a piece, too, for without them there would have been no {dish}.",
        "Then {hero} brought {helper} a big piece to say thank you.",
    )
    s.close(
        "What many hands make tastes best of all.",
        "{hero} was tired, but very happy.",
        "The best gifts are the ones we make ourselves.",
        "If you help others, others will help you.",
    )


@plot()
def the_race(s: Story) -> None:
    s.open(friend=True)
    s.draw("prize", "golden cup", "big honey cake", "blue ribbon", "basket of cherries", "new {thing.noun}")
    s.say(
        "One {day} day, there was a [great|big] race from {place} to {place2}. The prize was {a prize}.",
        "Every {season}, there was a race from {place} to {place2}. This time, the winner would get {a prize}.",
    )
    s.say(
        '"I am the fastest," said {friend}. "I will win!" {hero} [said nothing|only smiled].',
        "{hero} had trained for {number} weeks. {hero.He} wanted to win more than anything.",
        '"May the best one win," said {friend}, and they shook hands.',
    )
    s.paragraph()
    s.say(
        "{Helper} counted, \"One, two, three!\" and off they went.",
        "{Helper} gave the sign, and everyone began to run.",
    )
    s.say(
        "At first, {friend} was ahead. But {hero} came closer and closer. Soon {hero.he} was in front.",
        "{hero} ran like the wind. Halfway, {hero.he} was far ahead of all the others.",
        "Side by side, {hero} and {friend} ran along. Then {hero} was one step ahead.",
    )
    s.say(
        "Then {hero} heard a cry. {friend} had [tripped|fallen] and was lying {spot}. {friend.He} held {friend.his} knee.",
        "Suddenly there was a thud behind {hero.him}. {friend} had fallen {spot} and could not get up.",
    )
    s.say(
        "{hero} could already see the end of the race. {hero.He} looked ahead, and {hero.he} looked back.",
        '"Run on!" called {friend}. "You are winning!"',
        "What should {hero.he} do? The prize was so near.",
    )
    s.say(
        "Then {hero.he} turned around and ran back. \"Lean on me,\" {hero.he} said.",
        '"A prize can wait," said {hero}. {hero.He} went back and helped {friend} up.',
    )
    s.say(
        "Slowly, arm in arm, they walked to {place2}. They came in last of all.",
        "All the others ran past them. {hero} and {friend} were the very last to reach {place2}.",
    )
    s.paragraph()
    s.say(
        "But everyone clapped and cheered. {Helper2} had won the race, but {helper2.he} gave the {prize} to {hero}. \"You are the true winner,\" {helper2.he} said.",
        'But {helper} held up the {prize}. "The fastest gets a handshake," said {helper}. "The kindest gets the prize."',
        "{hero} did not get the {prize}. But {friend} gave {hero.him} a hug, and that was worth more.",
    )
    s.close(
        "It is good to win, but it is better to be a good friend.",
        "{hero} and {friend} were better friends than ever.",
        "Nobody remembered who came first, but nobody forgot what {hero} had done.",
        "\"Next year we will run together,\" said {friend}.",
    )


@plot()
def lost_in_the_wood(s: Story) -> None:
    s.open()
    s.draw("lure", "blue butterfly", "rolling ball of wool", "strange song", "white feather", "tiny frog", "trail of footprints")
    s.say(
        '"Do not go past {place}," {elder} always said. But one {day} day, {hero} noticed {a lure} and forgot all about it.',
        "One {day} day, {hero} followed {a lure}. {hero.He} went past {place}, farther than ever before.",
    )
    s.say("{hero.He} ran on and on. When {hero.he} looked up, everything was strange.",
          "After a while, {hero.he} stopped. Where was {hero.he}? Where was the path?",
          "When {hero.he} wanted to go home, {hero.he} did not know the way.")
    s.paragraph()
    s.say("The sun went down. [Something rustled {spot}.|An owl called.|The shadows grew long.] {hero} was afraid.",
          "It grew dark, and {hero} shivered. {hero.He} sat down {spot} and hugged {hero.his} knees.")
    s.say('"If I [cry|run about], I will only get more lost," {hero.he} told {hero.himself}. "I must think."',
          "{hero.He} remembered what {elder} had said: \"If you are lost, stay where you are and call.\"",
          "{hero.He} wiped {hero.his} eyes and looked for a light.")
    s.draw("sign", "a light", "the sound of a bell", "smoke", "a friendly song")
    s.say("Then {hero.he} noticed {sign} far away. {hero.He} [walked|crept] toward it, step by step.",
          "Far off, there was {sign}. \"Hello!\" called {hero} as loud as {hero.he} could.")
    s.say('It came from {helper.intro}. "Who is out so late?" asked {helper}. {hero} told {helper.him} everything.',
          'There stood {helper.intro}. "You are far from home," said {helper}. "You must be {hero}. {elder} is looking for you."')
    s.say("{Helper} gave {hero} {a snack} and [a warm blanket|something hot to drink]. Then they set out together.",
          '"Come," said {helper}. "I know every path here, even at night."',
          "{Helper} showed {hero} the brightest star. \"Follow it, and you will always find {place},\" {helper.he} said.")
    s.paragraph()
    s.say("Soon they saw {house}. {elder} was standing at the door. {elder.He} ran to {hero} and held {hero.him} [tight|very close].",
          "At {place}, they met {elder}, who was calling {hero}'s name. What a joy that was!")
    s.say('"I am sorry," said {hero}. "I only wanted to follow the {lure}." "I was so worried," said {elder}, "but you are here now."',
          '"I was so frightened," said {hero}. "So was I," said {elder}. "Let\'s go in and [eat some soup|get warm]."',
          "{elder} thanked {helper} with {serving}.")
    s.close("After that, {hero} always told {elder} where {hero.he} was going.",
            "And {hero} never followed {a lure} again.",
            "It is easy to get lost, and it is good to have someone who looks for you.",
            "The next day, {hero} and {elder} walked past {place} together, and {hero} learned the way.")


@plot()
def building(s: Story) -> None:
    s.open(friend=True)
    winter = s.slots["season"] == "winter"
    if winter:
        s.draw("work", "snow castle", "big snowman", "snow hut")
        s.draw("stuff", "snow")
    else:
        s.draw("work", "tree house", "little raft", "tower", "small hut", "windmill", "bridge")
        s.draw("stuff", "branches and rope", "boards and nails", "sticks and stones")
    s.draw("bad", "a strong wind came up and blew it down", "it fell down with a crash", "a big branch fell on it and broke it",
           "it leaned to one side and broke apart")
    s.say("One {day} day, {hero} had an idea. \"Let's build {a work}!\" {hero.he} said to {friend}.",
          "\"I am bored,\" said {friend} on {a day} day. \"Then let's build {a work},\" said {hero}.",
          "One {day} morning, the two of them wanted to build {a work} near {place}.")
    s.paragraph()
    s.say("They gathered {stuff} and worked all morning." if not winter else "They rolled and pushed the snow all morning.",
          "{hero} [wanted to do it fast|made a plan], and {friend} brought {stuff}.")
    s.say("At noon, the {work} was done. It was crooked, but it was theirs. Then {bad}.",
          "Soon it was as tall as {elder}. \"We are the best builders in the world!\" said {hero}. Just then, {bad}.")
    s.say('"It is your fault!" cried {hero}. "No, it is yours!" cried {friend}. They [did not look at each other|turned their backs on each other].',
          "{hero} sat down and cried. All that work for nothing!",
          '"We will never make it," said {friend}.')
    s.paragraph()
    s.say('{Helper} came by and looked at the mess. "You started at the top," said {helper}. "A good {work} needs a strong bottom."',
          '{elder} brought them {a snack} each. "Why did it fall?" {elder.he} asked. They thought about it. "It was too thin at the bottom," said {hero}.',
          '"Do you know what builders do when something falls?" asked {helper}. "They laugh and begin again."')
    s.say("So they began again. This time, {hero} held everything in place while {friend} tied it." if not winter
          else "So they began again. This time, {hero} pressed the snow hard while {friend} brought more.",
          "They said sorry to each other and started once more. They made the bottom wide and strong.")
    s.say("It took [two whole days|until evening|{number} hours], but then the {work} stood, and it did not [move|shake] at all.",
          "In the evening the wind blew again, but the {work} did not fall.")
    s.say("They put {hero}'s {thing} on top, so that everyone could see it from {place2}.",
          "They invited {helper2}, who was [very] impressed.",
          '"This is our {work}," said {friend}, "and we made it together."')
    s.close("A good thing takes time, and a good friend.",
            "When something breaks, you can always begin again.",
            "{hero} learned that it is better to look for the reason than to look for someone to blame.",
            "They played there all {season} long.")


@plot()
def newcomer(s: Story) -> None:
    s.open()
    s.say("One {day} day, someone new came to {place}: {friend.intro}.",
          "One {day} day, {friend.intro} moved into the house next to {hero}'s." if s.setting.human else
          "One {day} day, {friend.intro} moved in near {place}.")
    s.say("{friend} stood alone {spot} and did not say a word.",
          "{friend.He} came from far away and knew nobody.",
          "The others played together, but {friend} only watched from far away.")
    s.say('"{friend.He} is strange," said the others. "{friend.He} never talks."',
          '"Why does {friend.he} not play with us?" the others asked.')
    s.paragraph()
    s.say("{hero} remembered how it felt to be alone. {hero.He} took {hero.his} {thing} and went over to {friend}.",
          "{hero} thought about it. Then {hero.he} picked up {a snack} and walked over.")
    s.say('"Hello, I am {hero}," {hero.he} said. "[Do you want to play?|What is your name?]" {friend} looked up. "I am {friend}," {friend.he} said very softly.',
          '"Hello," said {hero}. "Is this place taken?" {friend} shook {friend.his} head, and {hero} sat down beside {friend.him}.')
    s.draw("talent", "sing like a bird", "draw wonderful pictures", "tell the funniest stories", "make little boats out of leaves",
           "walk on {friend.his} hands", "find the best hiding places")
    s.say("They talked for a while, and {hero} found out that {friend} could {talent}.",
          "At first they were both quiet. But then {friend} showed {hero} that {friend.he} could {talent}.")
    s.say('"That is wonderful!" said {hero}. "You must show the others."',
          '"Can you teach me?" asked {hero}. {friend} smiled for the first time.')
    s.paragraph()
    s.say("{hero} took {friend} by the hand and led {friend.him} to the others. \"{friend} can {talent},\" {hero.he} said.",
          "The next day, {hero} brought {friend} along. Everyone wanted to see how {friend.he} could {talent}.")
    s.say("The others were amazed. They asked {friend} a hundred questions, and soon {friend.he} was laughing with them.",
          'Soon they were all friends. "We are sorry that we did not ask you before," they said.')
    s.say('"Thank you for coming over to me," said {friend} in the evening.',
          "When it got dark, nobody wanted to go home.")
    s.close("A friendly word can open every door.",
            "{hero} was glad that {hero.he} had said hello.",
            "Everyone is new somewhere, sometime.",
            "From then on, {hero} and {friend} met at {place} every day.")


@plot(("spring",))
def the_seed(s: Story) -> None:
    s.open()
    s.draw("spot", "in a sunny corner near {place}", "beside the path to {place}", "behind {house}", "next to the door")
    s.draw("plant", "sunflower", "pumpkin", "bean", "strawberry plant", "apple tree", "tomato plant", "rose bush")
    s.say("One spring morning, {helper.intro} gave {hero} a seed. \"Plant it and be patient,\" said {helper}.",
          "In the pocket of an old coat, {hero} found a seed. \"What will it be?\" {hero.he} asked {elder}. \"Plant it, and you will see,\" said {elder}.")
    s.say("{hero} dug a small hole {spot}, put the seed in and covered it with earth.",
          "{hero} planted it {spot} and gave it some water.")
    s.paragraph()
    s.say("The next day, {hero.he} ran out to look. Nothing. [The day after that, nothing again.|Only brown earth.]",
          "Every morning {hero.he} went to look, and every morning there was nothing.")
    s.say('"It does not work," said {hero}. {hero.He} wanted to dig the seed up again.',
          '"Grow, please!" {hero} told the seed. But the seed did not listen.',
          "{hero} sang to it and [talked to it|danced around it]. Nothing helped.")
    s.say('"Wait," said {elder}. "Good things grow in secret."',
          '"A seed cannot hurry," said {helper}. "Give it water and time."')
    s.say("So {hero} waited. {hero.He} gave it water when it was dry and pulled out the weeds.",
          "So {hero.he} watered it every evening, for {number} long weeks.")
    s.paragraph()
    s.say("Then, one morning, a tiny green leaf looked out of the earth. {hero} [shouted with joy|danced around it].",
          "And one day, after the rain, there was something green. It was as small as {hero.his} little finger.")
    s.say("It grew and grew. In summer, it was a [tall|big|fine] {plant}.",
          "Week by week it grew taller, and when summer came, everyone could see what it was: a [fine|big] {plant}!")
    s.draw("foe", "a hungry snail", "a storm", "a hot and dry week", "a goat")
    s.say("Once, {foe} nearly ruined it, but {hero} took good care of it.",
          "{hero} protected it from {foe}, and it grew even stronger.",
          "")
    s.say("{hero} invited {helper2} and {elder} to see it, and they all sat in front of it and ate {serving}.",
          "{hero} kept {number} of its seeds and gave them to {friend}. \"Plant them and be patient,\" {hero.he} said.")
    s.close("Whoever wants to see something grow must learn to wait.",
            "Patience is a kind of magic.",
            "{hero} still could not sit still, but now {hero.he} could wait." if s.slots["hero"].trait == "impatient" else
            "{hero} had learned to wait.",
            "And next spring, there was a whole row of them {spot}.")


@plot()
def the_trade(s: Story) -> None:
    s.open()
    s["thing3"] = make_thing(s.random, {s.slots["thing"].noun, s.slots["thing2"].noun})
    s.say("One {day} day, {hero} saw {a thing} at {helper}'s house. Oh, how {hero.he} wanted to have it!",
          "{Helper} had {a thing}, and {hero} wished for nothing more than to {thing.use}.")
    s.say('"I will give it to you," said {helper}, "if you bring me {a thing2}."',
          '"You can have the {thing}," said {helper}, "but I need {a thing2} for it."')
    s.say("But {hero} had no {thing2.noun}. So {hero.he} went to {helper2.intro}, who had one.",
          "{hero} knew who had {a thing2}: {helper2.intro}. So off {hero.he} went to {place}.")
    s.say('"My {thing2}?" said {helper2}. "I will trade it for {a thing3}."',
          '{Helper2} thought about it. "If you bring me {a thing3}, you can have the {thing2}," said {helper2}.')
    s.paragraph()
    s.say("Now {hero} needed {a thing3}. {hero.He} looked {spot}, and {hero.he} looked {spot2}, but there was none.",
          "Where could {hero.he} get {a thing3}? {hero} walked all the way to {place2}.")
    s.say('There {hero.he} met {friend.intro}. "I have {a thing3}," said {friend}, "but I am so hungry. Do you have anything to eat?"',
          'Then {hero.he} met {friend.intro}, who was carrying {a thing3}. "I would give it away for {a snack}," {friend.he} sighed.')
    s.say("{hero} had {a snack} in {hero.his} pocket. {hero.He} gave it to {friend} and got the {thing3}.",
          "Luckily, {hero} had {a snack} with {hero.him}. {friend} ate it in three bites and handed over the {thing3}.")
    s.say("{hero} brought the {thing3} to {helper2} and got the {thing2}. {hero.He} brought the {thing2} to {helper} and got the {thing}.",
          "{Helper2} was glad about the {thing3} and gave {hero} the {thing2}. Then {helper} was glad about the {thing2} and gave {hero} the {thing}.")
    s.paragraph()
    s.say("Now everybody had what they wanted. The {thing} was {hero}'s, and {hero.he} could {thing.use}.",
          "At last {hero} held the {thing} in {hero.his} hands. {thing.joy}")
    s.say('"And all that for {a snack}!" said {elder} and laughed.',
          "{hero} showed it to {friend}, and they became friends.",
          "{elder} could hardly believe the story.")
    s.close("Sometimes a long way leads to a small treasure.",
            "Whoever gives a little can get a lot.",
            "Nobody had lost anything, and everybody was happy.",
            "It all began with {a snack}.")


@plot(_WARM)
def too_much(s: Story) -> None:
    s.open(friend=True)
    s.draw("treat", "blackberries", "cherries", "honey cookies", "strawberries", "pancakes", "plums", "raisins", "sugar buns")
    baked = s.slots["treat"] in ("honey cookies", "pancakes", "sugar buns")
    amends = "{hero.He} helped {elder} to make new {treat} for everyone." if baked else \
        "{hero.He} gave {hero.his} {thing} to {friend} to make up for it." if s.slots["treat"] == "raisins" else \
        "{hero.He} went out and picked a new basket of fruit for {friend}."
    s["brought"] = "made" if baked else "brought"
    s.say("One {day} day, {hero} found a whole [heap|basket] of {treat} {spot}.",
          "One {day} day, {elder} {brought} a big bowl of {treat}. \"They are for everyone,\" {elder.he} said. \"Do not eat too many.\"")
    s.say('"Just one," said {hero}. But one was not enough. {hero.He} ate another, and another.',
          "{hero} tried one. Mmm! So sweet! {hero.He} took {number} more.")
    s.say('"Leave some for me," said {friend}. But {hero} did not listen.',
          '"Are you not full yet?" asked {friend}. "No," said {hero} with a full mouth.')
    s.say("Soon, there was not a single one left.",
          "{hero} ate until all the {treat} were gone.")
    s.paragraph()
    s.say('Then {hero.his} tummy began to [hurt|rumble and ache]. "Ow, ow," {hero.he} groaned and lay down {spot2}.',
          "But oh! How {hero.his} tummy hurt! {hero} [could not walk|rolled on the ground].")
    s.say('"What did you eat?" asked {helper}, who was passing by. "Too many {treat}," {hero} whispered.',
          '{friend} ran to fetch {elder}. "Where does it hurt?" asked {elder}. {hero} pointed to {hero.his} round tummy.')
    s.say("{friend} was not angry. {friend.He} brought a cup of tea and sat beside {hero} until evening.",
          "{elder} made some [mint|warm] tea and put {hero} to bed. There was a big feast that day, but {hero} could not go.")
    s.paragraph()
    s.say("The next morning, {hero} felt better. " + amends,
          '"I am sorry that I ate everything," {hero} told {friend} the next day. "Never mind," said {friend}.')
    s.say('"From now on we will share," said {hero}. "One for you, one for me."',
          "This time, {hero} took only {number}, and {hero.he} ate them slowly.")
    s.close("Too much of a good thing is not good.",
            "And do you know what? They tasted even better that way.",
            "Now {hero} knew when to stop.",
            "{hero} did not want to see any {treat} for a long, long time.")


@plot()
def treasure_hunt(s: Story) -> None:
    s.open(friend=True)
    s.draw("found", "a map", "an old letter", "a bottle with a note in it", "a piece of paper with a riddle")
    s.say("One {day} day, {hero} found {found} {spot}.",
          "{sky} {hero} and {friend} were playing near {place} when they found {found}.")
    s.say('"A treasure!" cried {friend}. "Let\'s look for it!"',
          "It told of a treasure. {hero}'s eyes grew wide.")
    s.paragraph()
    s.say('The first clue said, "Look {spot2}." There they found {a thing} with a note on it.',
          'It said, "Start {spot2}." They ran there and found {a thing}, and under it lay a second note.')
    s.say('"Go to {place2} and walk {number} steps to the [north|south|west]," {friend} read.',
          'The note said, "{Number} steps from {place2}, dig a hole."')
    s.say("They went to {place2} and counted the steps. \"One, two,\" said {hero}, and so on, up to {number}.",
          "At {place2}, they counted {number} steps and began to dig.")
    s.say("But {helper.intro} was sitting right there. \"You may dig here,\" said {helper}, \"if you can tell me what has [hands but cannot clap|a face but no mouth].\" \"A clock!\" said {friend}.",
          "{Helper} was sleeping on that very place. {hero} asked politely, and {helper} moved a little to the side.",
          "It was hard work. {friend} wanted to give up, but {hero} said, \"Just a little more.\"")
    s.draw("content", "a box full of old toys", "a jar of honey", "a tin of cookies", "a bag of colored stones", "a little mirror", "a heap of walnuts")
    s.paragraph()
    s.say("At last they found [a chest|something hard]. In it was {content}, and a letter.",
          "Then they saw it: {content}! There was a letter, too.")
    s["signature"] = "{elder}" if s.slots["elder"].kind in ("aunt", "uncle") else "Your {elder}"
    s.say('"Well done," it said. "Now share it. {signature}." It had been {elder} all along!',
          '"Whoever finds this should share it with a friend," {hero} read aloud.')
    s.say("{hero} and {friend} shared it fairly, and they gave {elder} some of it, too.",
          '"Half for you and half for me," said {hero}, and {friend} nodded.')
    s.close("But the best part was the search.",
            "The real treasure was the day they had spent together.",
            "Then they hid the {thing} {spot3} with a new riddle, for somebody else to find.",
            "They kept {found} forever.")


@plot()
def storm_shelter(s: Story) -> None:
    s.open()
    s.draw("shelter", "a small cave", "an old hut", "a hollow tree", "an empty barn", "a big upturned boat")
    s.draw("storm", *(("snowstorm", "storm") if s.slots["season"] == "winter" else ("hail", "rain", "storm")))
    countable = s.slots["storm"] in ("storm", "snowstorm")
    s.say("One {day} day, {hero} was far from home when dark clouds came. Soon a terrible {storm} began.",
          "{hero} was on the way to {place} when the sky turned black. \"A {storm} is coming!\" {hero.he} said." if countable else
          "{hero} was on the way to {place} when the sky turned black, and the {storm} began.")
    s.say("{hero.He} ran and ran until {hero.he} found {shelter}. It was dry inside and just big enough for one.",
          "Luckily, {hero.he} found {shelter}. {hero.He} crept inside and was happy to be dry.")
    s.paragraph()
    s.say('Then there was a knock. "May I come in?" asked {helper.intro}, dripping wet.',
          'A moment later, {helper.intro} looked in. "Is there room for me?" asked {helper}.')
    s.say('"It is very small," said {hero}, "but come in." {hero.He} moved over.',
          "{hero} [looked around|thought for a moment]. It would be tight. \"Come in,\" {hero.he} said.")
    s.say('Next came {helper2.intro}. "Is there room for one more?" "There is always room for one more," said {helper}, and they moved closer together.',
          'Soon there was another voice. It was {helper2.intro}. "Please, I am so cold!" They all moved closer together, and {helper2} came in, too.')
    s.say('At last, {friend.intro} came, too small to walk on in the wind. "No room, no room!" said {helper2}. But {hero} said, "{friend} can sit on my lap."' if not s.setting.human else
          'At last, {friend.intro} came running through the wind. "No room, no room!" said {helper2}. But {hero} said, "If I stand, {friend} can sit."',
          'Then came {friend.intro}, shaking with cold. "We are full!" said {helper}. "Not if we all breathe in," said {hero}, and everyone laughed.')
    s.paragraph()
    s.say("So they sat side by side while the {storm} raged outside. It was tight, but it was warm.",
          "Outside it roared and crashed. Inside, they told each other stories.")
    s.say("{hero} had {a snack} and cut it into four pieces.",
          "{Helper} knew a song, and they all sang along until they forgot the {storm}.",
          "{friend} had {a thing} with {friend.him} and let everyone [hold|look at] it.")
    s.say("When the sun came out again, they were almost sorry.",
          "In the morning, the sky was clear. They said goodbye like old friends.")
    s.close("Where there is room in the heart, there is room in the house.",
            "Four friends are warmer than one.",
            "After that, they met at {place} every {season}.",
            "And whenever {a storm} came, {hero} thought of that day and smiled." if countable else
            "And whenever it rained hard, {hero} thought of that day and smiled.")


@plot()
def false_alarm(s: Story) -> None:
    s.open()
    beasts = ("A wolf", "A bear") if s.setting.human else ("A hunter", "A big cat")
    s.draw("danger", beasts[0], "A fire", beasts[1], "A flood", "A snake")
    s.say("{hero} liked to play tricks. One {day} day, {hero.he} ran to {place} and shouted, \"{danger}! {danger} is coming!\"",
          "One {day} day, {hero} was bored. So {hero.he} shouted as loud as {hero.he} could, \"Help! {danger}!\"")
    s.say("{Helper} came running, and {helper2} came running. But there was nothing. {hero} laughed until {hero.his} tummy hurt.",
          "Everyone dropped what they were doing and came to help. \"It was only a joke!\" said {hero} and laughed.")
    s.say('"That is not funny," said {helper}.', '"Do not do that again," said {helper2}, out of breath.',
          "{elder} shook {elder.his} head.")
    s.paragraph()
    s.say('The next day, {hero} did it again. "Help! {danger}!" Again they all came, and again there was nothing.',
          "But {number} days later, {hero} played the same trick. Again everybody came running, and again {hero} laughed.")
    s.say('"We will not come a third time," said {helper2}.', "This time, they were angry and went home without a word.")
    s.paragraph()
    s.draw("trouble", "got {hero.his} foot stuck {spot}", "fell into a hole {spot}", "was caught in a thorn bush {spot}")
    s.say("Then one evening, {hero} {trouble}. \"Help!\" {hero.he} cried. \"Please help me!\"",
          "The day after, {hero} really {trouble}. {hero.He} called and called.")
    s.say("{Helper} heard it and said, \"It is only a joke.\" {Helper2} heard it, too, and did not come.",
          "Everyone heard it, but nobody believed it.")
    s.say("It grew late and cold. {hero} cried bitterly. \"I will never play that trick again,\" {hero.he} said.",
          "The hours went by. Now {hero} understood what {hero.he} had done.")
    s.say("At last {friend} came by, saw that it was true, and pulled {hero} out.",
          "Only {elder} came to look. {elder.He} pulled {hero} out and carried {hero.him} home.")
    s.say('The next day, {hero} went to {helper} and to {helper2} and said, "I am sorry. I will not lie again."',
          "{hero} said sorry to everyone and helped {helper} for a whole week.")
    s.close("If you tell lies, nobody believes you when you tell the truth.",
            "It took a long time, but in the end they trusted {hero} again.",
            "A good joke makes everyone laugh, not only one.",
            "{hero} still told jokes, but only good ones.")


@plot()
def wrong_suspicion(s: Story) -> None:
    s.choose_thing(*_TOYS_FOR_TWO)
    s.open(friend=True, thing=True)
    s.paragraph()
    s.say("One {day} day, {hero} put the {thing.noun} down near {place}. When {hero.he} came back, it was gone.",
          "One {day} afternoon, {hero} wanted to take the {thing.noun} and {thing.use}. But it was gone.")
    s.say("Only {friend} had been there. \"{friend} took it!\" thought {hero}.",
          '"You took my {thing}!" {hero} said to {friend}. "I did not," said {friend}. "Yes, you did!"')
    s.say("{friend} was hurt. {friend.He} turned around and went home without a word.",
          "{hero} was so angry that {hero.he} did not speak to {friend} for {number} days.")
    s.say("{hero} told {helper} about it. \"Did you see {friend.him} take it?\" asked {helper}. \"No,\" said {hero}.",
          '"Are you sure?" asked {elder}. {hero} was not so sure anymore.')
    s.paragraph()
    s.draw("thief", "a magpie", "the wind", "a puppy", "a crow")
    s.say("Some days later, {hero} walked past {place2}. {Spot}, something [caught {hero.his} eye|was shining]. It was the {thing}!",
          "Then {hero} happened to look {spot}. And what did {hero.he} see there? The {thing}!")
    s.say("It was {thief} that had carried it off.", "So {thief} had taken it, and not {friend} at all!")
    s.say("{hero}'s face turned red. How unfair {hero.he} had been!", "{hero} felt very bad. {friend} had told the truth.")
    s.say("{hero.He} ran straight to {friend}. \"I was wrong,\" {hero.he} said. \"I am sorry that I did not believe you. Can you forgive me?\"",
          "{hero.He} knocked at {friend}'s door. \"It was {thief},\" {hero.he} said in a small voice. \"I am so sorry.\"")
    s.say('{friend} looked at {hero} for a long time. Then {friend.he} smiled. "Next time, ask me first," {friend.he} said.',
          '"It hurt me," said {friend}. "But I am glad that you came." And they hugged.')
    s.say("Then they went out to {thing.use} together.", "{hero} let {friend} keep the {thing.noun} for a whole week.")
    s.close("Do not blame a friend before you know the truth.",
            "{hero} never forgot that lesson.",
            "It is easy to be wrong, and it is good to say sorry.",
            "Since that day, {hero} always looked twice before {hero.he} spoke.")


@plot()
def looking_for_mother(s: Story) -> None:
    s.open()
    s.draw("baby", "gosling", "kitten", "fawn", "bunny", "owlet", "foal")
    s.draw("mark", "a white spot on the chest", "a black tail", "one brown ear", "a warm voice", "very soft gray hair")
    s.say("One {day} day, {hero} found a tiny {baby} {spot}. It was crying.",
          "One {day} morning, {hero} heard a soft sound. {Spot} sat a little {baby}, all alone.")
    s.say('"I have lost my mother," it [sobbed|said]. "She has {mark}."',
          '"What does your mother look like?" asked {hero}. "She has {mark}," said the {baby}.')
    s.say('"Do not cry," said {hero}. "We will find her." And {hero.he} took the {baby} along.',
          "{hero} dried its tears and said, \"Come with me. We will look for her.\"")
    s.paragraph()
    s.say('At {place}, they met {helper.intro}. "Is that your mother?" asked {hero}. "No," said the {baby}. "That is only {a helper.kind}."',
          'First they asked {helper.intro}. "Have you seen a mother with {mark}?" "I am sorry, no," said {helper}. "Try {place2}."')
    s.say("Then they met {helper2.intro}. {Helper2} had seen someone running up and down and calling near {place2}.",
          '"I heard somebody calling near {place2}," said {helper2.intro}, who came along the path.')
    s.say("The {baby} grew tired, so {hero} carried it all the way.",
          "It was a long way. {hero} shared {hero.his} {snack} with the {baby} and told it a story.")
    s.paragraph()
    s.say("At {place2}, someone was calling, again and again. {hero} saw {mark}. \"Mama!\" cried the {baby}.",
          "And there, at {place2}, stood someone with {mark}. The {baby} jumped up. \"That is my mother!\"")
    s.say("The mother [licked|hugged] her little one and did not want to let it go.",
          "What a joy! The mother laughed and cried at the same time.")
    s.say('"How can I thank you?" she asked {hero}. "It was nothing," said {hero}, but {hero.he} was very proud.',
          '"You have a good heart," the mother said to {hero}.')
    s.say("On the way home, {hero} walked a little faster. {hero.He} wanted to hug {hero.his} own {elder.kind}.",
          "That evening, {hero} gave {elder} an extra big hug. \"What is that for?\" asked {elder}. \"Just because,\" said {hero}.")
    s.close("It is good to help those who are smaller than you.",
            "Nobody should be alone.",
            "Sometimes, the {baby} came to visit {hero}, and each time it was a little bigger.",
            "There is no place like a mother's side.")


@plot()
def secret_helper(s: Story) -> None:
    s.open()
    s.draw("job", "chopped the wood", "swept the steps", "filled the water jug",
           "picked up the apples" if s.slots["season"] == "autumn" else "cleaned the windows", "fed the hens", "washed the dishes")
    s.draw("spot", "on the stairs", "beside the stove", "on the floor", "in front of the door", "at the table")
    s.say("{hero.His} {elder.kind} worked hard all day and was often very tired.",
          "One {day} evening, {hero} saw that {elder} had fallen asleep at the table.")
    s.say('"I will do something nice," thought {hero}, "but nobody must know."',
          "{hero} made a secret plan.")
    s.paragraph()
    s.say("The next morning, {hero} got up before the sun and {job}. Then {hero.he} crept back to bed.",
          "While everyone slept, {hero} tiptoed out and {job}.")
    s.say('"How strange," said {elder} in the morning. "Somebody has {job}."',
          '{elder} could not believe {elder.his} eyes. "Who was that?" {elder.he} asked. {hero} [only shrugged|looked out of the window and smiled].')
    s.say("The next night, {hero} did it again. And the night after that, {hero.he} also put {a snack} on {elder}'s chair.",
          "So it went for {number} days. Each day there was a new surprise.")
    s.say('"It must be a fairy," said {elder}. {hero} giggled under the blanket.',
          '"Was it the {helper.kind}?" asked {elder}. But the {helper.kind} knew nothing about it.')
    s.paragraph()
    s.say("But one night, {hero} was so tired that {hero.he} fell asleep {spot}, with the [broom|bucket] still in {hero.his} hand.",
          "Then, one night, {hero} bumped into the door. Bang! {elder} woke up and came with a light.")
    s.say('"So you are the fairy!" said {elder} softly, and {elder.his} eyes were wet.',
          "{elder} found {hero} there and understood everything.")
    s.say("{elder} carried {hero.him} to bed and tucked {hero.him} in.",
          '"You are the best surprise of all," {elder.he} said.')
    s.say("From then on, they did the work together, and there was time left to tell stories.",
          "On Sunday, {elder} made {serving} just for {hero}, and they went to {place} together.")
    s.close("A kind deed needs no applause.",
            "Helping in secret is twice the fun.",
            "Even small hands can do great things.",
            "And {elder} was never so tired again.")


@plot(_WARM)
def two_ways_to_cross(s: Story) -> None:
    s.open(friend=True)
    s.draw("gap", "a narrow bridge", "a narrow log over the stream", "a narrow path along the rocks")
    s.say("One {day} day, {hero} came to {gap}. It was so narrow that only one could pass.",
          "Near {place}, there was {gap}. Only one could walk on it at a time.")
    s.say("From the other side came {friend}, with {a thing} on {friend.his} back.",
          "Just then, {friend} came from the other side.")
    s.say("They met in the middle. \"Go back,\" said {hero}. \"I was here first!\" \"No, you go back,\" said {friend}.",
          '"Let me pass," said {friend}. "No, you let me pass," said {hero}. Neither would move.')
    s.paragraph()
    s.say("They stood there, nose to nose. The sun moved across the sky. {hero}'s legs grew tired.",
          "They argued for {number} minutes, and then they argued some more.")
    s.say("{Helper} was watching. \"How long will you stand there?\" asked {helper}. \"Until {friend} moves,\" said {hero}. \"Until {hero} moves,\" said {friend}.",
          "Then they began to push. They wobbled to the left and to the right, and splash, both fell down into the [cold water|mud].")
    s.say("{hero} looked at {friend}, and {friend} looked at {hero}. They looked so silly that both began to laugh.",
          "Suddenly {hero} had to laugh, and {friend} laughed, too. What were they fighting about?")
    s.say('"You know what?" said {hero}. "You go first today, and I go first tomorrow."',
          '"I will lie down flat, and you step over me," said {hero}. And so they did it.')
    s.paragraph()
    s.say("That was quick! Soon both were on the right side, and {hero} went on to {place2}.",
          "In a moment, the way was free. {friend} said thank you, and {hero} bowed.")
    s.say("{Helper} put up a sign. It said, \"[Whoever is kinder goes second.|Please be polite.]\"",
          "The next day, {friend} stood there and waited. \"After you,\" {friend.he} said with a grin.")
    s.close("The wise one gives way first.",
            "It is better to be kind than to be first.",
            "{hero} and {friend} often laughed about it later.",
            "There is always a way, if both want to find it.")


@plot()
def the_lonely_elder(s: Story) -> None:
    s.open(friend=True)
    s.draw("grump", "never smiled", "always shut the window when the little ones played", "grumbled all day long")
    s.say("Near {place} lived {helper.intro} who {grump}. Everyone was afraid of {helper.him}.",
          "{hero} was a little afraid of {helper}, who lived near {place} and {grump}.")
    s.say("One {day} day, {hero}'s {thing} landed right [at|in front of] {helper}'s door.",
          "One {day} day, {hero} was playing with {hero.his} {thing}, and it ended up right in front of {helper}'s door.")
    s.say('"Leave it there," said {friend}. "{Helper} is mean!" But {hero} went and knocked.',
          "The others ran away. But {hero} took a deep breath and knocked.")
    s.paragraph()
    s.say('The door opened. "What do you want?" growled {helper}. "Good day," said {hero}. "My {thing.noun} is here. And... you look sad."',
          '"Who is there?" called a rough voice. "It is only me, {hero}," {hero.he} said. "May I have my {thing.noun} back, please?"')
    s.say("{Helper} was silent. Then {helper.he} said, \"Nobody has knocked at my door for {number} years.\"",
          '{Helper} looked surprised. "You said please," said {helper}. "Nobody ever says please to me."')
    s.say('"Are you lonely?" asked {hero}. {Helper} looked away. "Maybe," {helper.he} said.',
          "{hero} saw that there was only one cup on the table. Then {hero.he} understood.")
    s.say("The next day, {hero} came back with {serving}. They ate it together, and {helper} told a story from long ago.",
          "From then on, {hero} visited {helper} every week and brought {helper.him} [flowers|a drawing|{a snack}].")
    s.paragraph()
    s.say("It turned out that {helper} had once been a [sailor|dancer|great singer|captain] and knew a hundred stories.",
          "One day {hero} heard a strange sound. {Helper} was laughing!")
    s.say("{hero} brought the others along. At first they were shy, but soon they sat around {helper} and listened.",
          "Soon {friend} came, too, and then all the others. The house was full of voices.")
    s.say("Nobody was afraid of {helper} anymore.",
          '"It was so quiet here," said {helper} to {hero}. "Thank you for knocking."')
    s.close("Behind a grumpy face there is often a lonely heart.",
            "A knock at the door can change everything.",
            "{hero} had found a friend where nobody had looked for one.",
            "Do not be afraid to be friendly first.")


@plot()
def the_wish(s: Story) -> None:
    s.open(friend=True)
    s.draw("giver", "golden fish", "fallen star", "tiny fairy", "silver frog", "talking stone")
    s.draw("wish", "be the biggest of all", "never have to sleep", "have everything made of sugar", "always win every game",
           *(() if s.slots["hero"].kind in _BIRDS else ("fly like a bird",)))
    results = {
        "be the biggest of all": "{hero} grew and grew. But now {hero.he} did not fit into {house}, and everyone ran away from {hero.him}.",
        "never have to sleep": "{hero} played all night. But everyone else was asleep, and the night was long and lonely.",
        "fly like a bird": "{hero} flew high above {place}. It was lovely, but the wind was cold, and nobody up there knew {hero.his} name.",
        "have everything made of sugar": "The table, the bed, the {thing.noun}, all turned to sugar. But the first rain washed everything away.",
        "always win every game": "{hero} won every game. But soon nobody wanted to play with {hero.him} anymore.",
    }
    s.say("One {day} night, {hero.he} met {a giver} near {place}. \"You have one wish,\" it said.",
          "One {day} evening, {hero} found {a giver} {spot}. \"Help me, and I will grant you a wish,\" it said. {hero} helped at once.")
    s.say('{hero} did not think for long. "I wish to {wish}!" {hero.he} said.',
          '"Think well," it said. But {hero} already knew. "I want to {wish}!"')
    s.paragraph()
    s.say("There was a flash, and it came true.", "And so it was.", "It had hardly been said when it happened.")
    s.say(results[s.slots["wish"]])
    s.say("{hero} missed {hero.his} {elder.kind}. {hero.He} missed {friend}, too.",
          '"This is not what I wanted at all," {hero} said sadly.',
          "After {number} days, {hero} was tired of it.")
    s.paragraph()
    s.say("{hero.He} went back to {place} and called. \"Please,\" {hero.he} said, \"make it all as it was before.\"",
          "{hero} ran to find the {giver}. \"May I give my wish back?\" {hero.he} asked.")
    s.say('"Are you sure?" "Yes," said {hero}. "I had everything that I needed."',
          '"You have learned something," it said and [smiled|winked]. And in a blink, everything was as before.')
    s.say("{hero} ran home. {elder} was at the door, and there was {serving} for supper. Nothing had ever tasted so good.",
          "The next day, {hero} played with {friend}. {hero.He} lost {number} times and was happy.")
    s.close("Be careful what you wish for.",
            "Sometimes what we have is the best of all.",
            "And when {hero} looked up at the sky, {hero.he} wished for nothing at all.",
            "{hero} was glad to be just {hero.himself}.")
