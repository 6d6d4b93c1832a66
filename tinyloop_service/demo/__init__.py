"""The model that ships with TinyLoop: small, trained on public-domain English, good for a demonstration.

    MODEL_PATH   the .tinyloop file                      PREFIX_TEXT   a passage of 1117 tokens, none of which
    SUFFIXES     ten ways to go on from its end                        the model was trained on

How it was made is in `train.py`, what it can and cannot do in MODEL_CARD.md.  This package imports no torch; the
modules beside it that train do.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODEL_PATH", "PREFIX_TEXT", "SUFFIXES"]

MODEL_PATH = Path(__file__).with_name("demo.tinyloop")
# Jonah 1:1 to 3:4, King James Version, as the training text would have had it; it ends with the end of a line.
PREFIX_TEXT = Path(__file__).with_name("prefix.txt").read_text(encoding="utf-8")
SUFFIXES = (
    "So the people of Nineveh",
    "And the king of Nineveh arose from his throne, and",
    "But Jonah was exceeding sorrowful, and said,",
    "Then spake the LORD unto Jonah, saying,",
    "And the mariners returned unto their own land, and",
    "Now there was in the city a certain woman, and",
    "And the elders of the city said one to another,",
    "And it came to pass on the fortieth day, that",
    "Blessed be the LORD God of heaven, who",
    "Hear, O Nineveh, and give ear, ye inhabitants of the city:",
)
