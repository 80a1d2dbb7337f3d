"""Data: corpora prepared once into memory-mapped tokens, and windows on them."""

from rankwise.lab.data.corpus import Corpus as Corpus
from rankwise.lab.data.sources import NAMES as NAMES
from rankwise.lab.data.sources import load_corpus as load_corpus
from rankwise.lab.data.vocabulary import Vocabulary as Vocabulary
from rankwise.lab.data.windows import IGNORED as IGNORED
from rankwise.lab.data.windows import Evaluation as Evaluation
from rankwise.lab.data.windows import Windows as Windows
