"""Write a recall document like those the tiny model was trained on: facts " Tirzah gold." that return again and again.

Usage: make_recall.py [CHARACTERS] [SEED] > recall.txt
"""
import random
import sys

NAMES = ("Abner Asher Boaz Caleb Dinah Elias Gideon Hagar Isaac Joel Kish Leah Micah Naomi Obed Phebe Reuben Silas Tirzah "
         "Uriah Vashti Zadok Hiram Jabez Lydia Mara Nahum Perez Ruth Seth").split()
VALUES = ("oil gold wine salt corn wood stone silver bread fire water smoke honey milk wool iron brass clay dust light rain "
          "grass seed fruit flour fish sheep horse sword shield crown throne house gate tower river field hill tree star").split()


def main():
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2200
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    facts, text = {}, ""
    while len(text) < size:
        name = rng.choice(NAMES)
        text += " %s %s." % (name, facts.setdefault(name, rng.choice(VALUES)))
    sys.stdout.write(text)


main()
