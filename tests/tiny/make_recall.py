"""Write a recall document like those the tiny model was trained on: facts " Tirzah gold." that return again and again.

Usage: make_recall.py [CHARACTERS] [SEED] [--marked] [--again] > recall.txt

--marked: for `kvlag trace --marked`; a fact's first mention states it, every later one is an answer that needs it.
--again: a fact is said a second time at once, which proves it useful while it is new; that one is no answer.
"""
import random
import sys

NAMES = ("Abner Asher Boaz Caleb Dinah Elias Gideon Hagar Isaac Joel Kish Leah Micah Naomi Obed Phebe Reuben Silas Tirzah "
         "Uriah Vashti Zadok Hiram Jabez Lydia Mara Nahum Perez Ruth Seth").split()
VALUES = ("oil gold wine salt corn wood stone silver bread fire water smoke honey milk wool iron brass clay dust light rain "
          "grass seed fruit flour fish sheep horse sword shield crown throne house gate tower river field hill tree star").split()


def recall(size, seed, marked=False, again=False):
    rng, facts, text, length = random.Random(seed), {}, "", 0
    while length < size:
        name = rng.choice(NAMES)
        mark = "?" if name in facts else "="
        value = " " + facts.setdefault(name, rng.choice(VALUES))
        plain = f" {name}{value}."
        text += " %s{{%s%s%s}}." % (name, name, mark, value) if marked else plain
        text += plain if again and mark == "=" else ""
        length += len(plain)
    return text


def main():
    flags = {word.lstrip("-"): True for word in sys.argv[1:] if word in ("--marked", "--again")}
    numbers = [int(word) for word in sys.argv[1:] if not word.startswith("--")]
    sys.stdout.write(recall(*(numbers + [2200, 1][len(numbers):]), **flags))


if __name__ == "__main__":
    main()
