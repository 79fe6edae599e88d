"""What tasks for models are made of: words, names, and a haystack that every Python carries."""

import random
import re


def words(text: str) -> list[str]:
    return text.split()


WORDS = words(
    "amber cobalt willow falcon marble cedar comet harbor meadow saffron tundra velvet walnut "
    "zephyr lagoon pepper"
)
FIRST_NAMES = words(
    "Anna Luca Priya Tomas Ines Kenji Amara Sven Mei Omar Clara Ivan Lena Rafael Zara Hugo Nora "
    "Pavel Salma Victor Yuki Elif Marek Dana Felix Gita Jonas Katya Leo Mina"
)
LAST_NAMES = words(
    "Berg Moretti Nair Novak Duarte Mori Obi Lund Chen Haddad Weiss Petrov Fischer Costa Khan "
    "Blanc Quinn Horak Idris Reyes Tanaka Kaya Wolski Levi Brandt Rao Vik Orlova Rossi Park"
)
CITIES = words(
    "Oslo Turin Pune Brno Porto Kyoto Lagos Malmo Wuhan Amman Graz Sofia Bonn Recife Lahore Lyon "
    "Cork Plzen Khartoum Bogota Osaka Izmir Lublin Haifa Ulm Mysore Bergen Perm Parma Busan"
)
JOBS = words(
    "nurse welder pilot baker chemist plumber teacher lawyer painter farmer dentist courier "
    "florist tailor geologist"
)


def haystack(chance: random.Random) -> list[str]:
    """Sentences of the Python documentation."""
    from pydoc_data.topics import topics

    articles = [re.sub(r"\s+", " ", text).strip() for _, text in sorted(topics.items())]
    articles = [each for each in articles if len(each) > 2500]
    chance.shuffle(articles)
    return re.split(r"(?<=\.) ", " ".join(articles))
