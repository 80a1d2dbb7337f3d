"""Data: corpora prepared once into memory-mapped tokens, and windows on them."""

from rankwise.data.corpus import Corpus as Corpus
from rankwise.data.sources import NAMES as NAMES
from rankwise.data.sources import load_corpus as load_corpus
from rankwise.data.vocabulary import Vocabulary as Vocabulary
from rankwise.data.windows import IGNORED as IGNORED
from rankwise.data.windows import Evaluation as Evaluation
from rankwise.data.windows import Windows as Windows
