"""English words outside the small vocabulary: what replaces other nouns, and which words may be dropped.

These are tables for `reading.py`. Nouns are matched by meaning and looks, never by spelling. Singular forms are
enough, because plurals are reduced before a word is looked up.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _families(table: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return, for every word, the words of the vocabulary that may replace it, the most similar first."""
    return {word: tuple(near.split()) for near, words in table.items() for word in words.split()}


NEAR_ACTORS = _families(
    {
        "cat fox dog": "lion lioness tiger leopard cheetah panther lynx jaguar puma cougar bobcat kitty",
        "fox dog cat": "wolf coyote jackal raccoon weasel ferret badger otter",
        "dog fox": "hyena dingo hound husky poodle bulldog doggy",
        "rabbit cat": "hare mouse mice rat hamster squirrel chipmunk hedgehog beaver kangaroo",
        "penguin bird": "puffin",
        "duck bird": "goose geese swan chicken hen rooster turkey duckling chick",
        "turtle": "armadillo",
        "elephant": "mammoth rhino rhinoceros hippo hippopotamus",
        "sheep dog": "goat cow bull calf ox pig piglet horse pony donkey zebra deer reindeer moose llama "
        "alpaca camel antelope",
        "dinosaur elephant": "giraffe",
        "dinosaur turtle": "dragon crocodile alligator lizard iguana gecko snake",
        "snail": "slug worm caterpillar",
        "frog": "toad newt salamander",
        "robot": "android cyborg",
        "bear": "panda koala grizzly gorilla monkey ape chimpanzee sloth",
        "car bus": "taxi cab jeep limousine sedan suv automobile motorcycle motorbike scooter bicycle bike",
        "bus car tractor": "truck lorry van minibus tram trolley train locomotive ambulance firetruck caravan",
        "tractor bus": "bulldozer excavator digger harvester",
        "boat": "canoe yacht ferry kayak raft rowboat dinghy gondola speedboat vessel",
        "whale fish": "dolphin orca porpoise seal walrus manatee narwhal submarine",
        "fish whale": "shark goldfish salmon trout tuna clownfish seahorse eel octopus squid jellyfish",
        "bird owl duck": "eagle hawk falcon sparrow pigeon dove crow raven parrot seagull gull robin swallow "
        "hummingbird flamingo heron stork pelican peacock ostrich bat butterfly bee dragonfly",
        "bird balloon": "plane airplane aeroplane jet helicopter glider drone",
        "owl bird": "owlet",
        "balloon": "blimp airship zeppelin kite parachute",
        "ghost": "spirit phantom spectre specter ghoul",
    }
)
NEAR_SCENES = _families(
    {
        "beach": "coast coastline shore seashore island bay sand lake river pond lagoon harbour harbor",
        "forest": "jungle rainforest wood woodland grove tree bamboo orchard",
        "city": "street road highway village downtown skyline suburb square building house tower bridge station "
        "market castle",
        "desert": "dune sahara canyon outback wasteland",
        "snow": "ice arctic antarctic antarctica winter glacier tundra iceberg blizzard",
        "meadow": "grass grassland lawn farm garden park pasture prairie countryside savanna savannah plains "
        "valley flower",
        "sea": "water reef aquarium undersea",
        "mountains": "hill alps cliff peak summit volcano ridge himalayas rock",
    }
)
NEAR_TIMES = _families(
    {
        "day": "afternoon midday daylight",
        "evening": "dawn twilight sunrise sundown nightfall",
        "night": "nighttime moonlight moonlit star starlight",
    }
)
NEAR = NEAR_ACTORS | NEAR_SCENES | NEAR_TIMES

COMPOUNDS = {
    ("sea", "lion"): "seal", ("mountain", "lion"): "lion", ("mountain", "goat"): "goat",
    ("snow", "leopard"): "leopard", ("sea", "gull"): "seagull", ("sea", "horse"): "seahorse",
    ("guinea", "pig"): "hamster", ("teddy", "bear"): "bear", ("north", "pole"): "arctic",
    ("south", "pole"): "antarctic", ("bunny", "rabbit"): "rabbit", ("puppy", "dog"): "dog",
    ("no", "one"): "nobody", ("all", "but"): "except",
}  # fmt: skip
"""Pairs of words with their own meaning: "a sea lion" is not a lion and names no scene."""

DETERMINERS = _words("a an the some any this these those his her its their my our your")
PREPOSITIONS = _words(
    "on in at by with of under over near during to into onto from through across along around beside between "
    "towards toward off for about inside outside upon within out past via until before after beyond against"
)
FUNCTION_WORDS = _words(
    "and is are was were be been being has have had it that which who whom whose he she they we you i me us him "
    "them while when where as then also but very so too there here more less fewer other longer one both "
    "each every do does did will would can could may"
)
"""Dropped without a notice, like the fillers of the vocabulary."""

NEGATORS = _words("no without neither zero 0")
"""Come before what is not there; adjectives may stand between."""
NOT = _words(
    "not never none cannot cant dont doesnt didnt isnt arent wasnt werent hasnt havent hadnt wont wouldnt couldnt "
    "shouldnt aint"
)
"""May also negate a verb, so only a noun directly after them is left out."""
DOUBTFUL = _words(
    "except excepting excluding exclude lacking lack minus sans instead rather than apart aside free absent absence "
    "devoid missing gone nothing everything anything everyone anyone everybody anybody unless hardly barely "
    "scarcely rarely nowhere non avoid avoiding avoids omit omitting remove removed removing removes lacks excludes "
    "forbid forbidden leave leaves leaving exits departs ban delete erase drop skip ignore forget vanish "
    "vanishes vanished disappear disappears disappeared"
)
"""Leave unclear whether something is there, so a prompt with one of these is refused."""
CHOICES = frozenset(("or", "nor"))

COLOURS = _words(
    "red orange yellow green blue purple violet pink brown black white grey gray gold golden silver turquoise "
    "beige crimson scarlet teal cyan magenta colourful colorful reddish bluish greenish yellowish rainbow "
    "colour color coloured colored"
)
COUNTS = _words(
    "two three four five six seven eight nine ten eleven twelve dozen hundred thousand many several few multiple "
    "couple pair group herd flock pack swarm crowd lot all"
)

HARMLESS = _words(
    # How something looks or is.
    "cute small little tiny big large huge giant tall short long fat thin old young new baby cub adult happy sad "
    "angry lonely alone lone single brave wild tame sleepy sleeping hungry tired lazy fast slow quick quiet loud "
    "calm gentle friendly funny silly beautiful pretty lovely nice good great cool fluffy furry soft hot cold warm "
    "wet dry clean dirty shiny dark bright light pale sunny cloudy rainy snowy windy foggy misty stormy icy sandy "
    "rocky grassy leafy starry frozen deep high low open wide steep flat round strange magical mysterious majestic "
    "peaceful serene tropical remote ancient modern futuristic crowded busy abandoned polar male female same "
    # What somebody does.
    "run ran walk jump leap hop sit sat stand stood lie lay sleep rest eat drink play look see watch stare gaze "
    "chase follow hunt swim swam fly flew dive float sail drive drove ride rode go went come came move turn spin "
    "dance sing bark meow roar howl climb crawl creep sneak wander roam stroll trot gallop march race rush dash "
    "hide wait stay live explore enjoy smile laugh cry talk meet pass cross enter left arrive return carry "
    "hold take get wave glide soar hover rise fall fell set shine glow blow "
    # How, where and when.
    "fast together away back forward backward up down again still slowly far close next front top middle bottom "
    "right side behind above below slow once now always often today summer spring autumn "
    # Sky and weather, which no prompt can choose.
    "sky cloud sun sunlight sunshine rain wind fog mist storm weather horizon air "
    # How it is filmed.
    "show make draw create generate video picture photo photograph image clip scene footage film movie shot camera "
    "closeup pan zoom view background foreground cinematic realistic photorealistic detailed hd style quality "
    "animation cartoon drawing painting masterpiece please"
)
"""Dropped with a notice. So are other words whose position in the sentence shows that they are harmless."""
