"""Corpora: what is read is what was written, prepared once, and never half."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.errors import DataError
from rankwise.lab.data import Corpus, load_corpus, vocabulary
from rankwise.lab.data import corpus as prepare
from rankwise.lab.data.download import PUBLISHED, Published
from rankwise.lab.data.sources import enwik8_words, load_prepared, strip_markup
from rankwise.lab.data.vocabulary import SYMBOLS, Kind, Text, Vocabulary, by_frequency, smallest_dtype, text_of

PROSE = "the cat sat on the mat .\nthe dog, não, sat on the cat .\n\n" * 30


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def folder_of(path: Path, **files: str | bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def in_blocks(content: bytes, size: int) -> Text:
    return Text(label="blocks", blocks=lambda: (content[i : i + size] for i in range(0, len(content), size)))


def whole(corpus: Corpus) -> str:
    return "".join(corpus.vocabulary.decode(split.tolist()) for split in (corpus.train, corpus.valid, corpus.test))


def made_of(kind: Kind, content: str) -> Vocabulary:
    """The vocabulary of a text."""
    symbols = SYMBOLS[kind]()
    numbers = np.concatenate([np.zeros(0, np.int64), *symbols.number(in_blocks(content.encode(), 7))])
    counts = np.bincount(numbers, minlength=symbols.num_numbers)
    return by_frequency(kind, symbols, counts, counts, 1)[0]


def left(cache: Path) -> list[str]:
    """All that is in a cache but the folder of corpora and its lock."""
    found = sorted(path.name for path in cache.rglob("*")) if cache.exists() else []
    return [name for name in found if name not in ("corpora", ".lock")]


def test_a_text_file_is_split_by_position_and_nothing_is_lost(tmp_path, cache):
    path = tmp_path / "prose.txt"
    path.write_bytes(PROSE.encode())
    corpus = load_corpus(path, cache=cache)
    n = len(PROSE)
    assert (corpus.name, corpus.unit) == ("prose", "character")
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [n - 2 * (n // 20), n // 20, n // 20]
    assert whole(corpus) == PROSE
    assert len(corpus.vocabulary) == len(set(PROSE))
    assert corpus.train.dtype == np.uint8
    assert isinstance(corpus.train, np.memmap)


def test_the_words_of_a_folder_are_those_of_its_lines(tmp_path, cache):
    splits = {"train": PROSE, "valid": "the cat\nsaw  a\tdog", "test": "the\n"}
    folder = folder_of(
        tmp_path / "own", train__txt=splits["train"], validation__tokens=splits["valid"], test__txt=splits["test"]
    )
    corpus = load_corpus(folder, unit="word", cache=cache)
    for split, content in splits.items():
        expected = [word for line in content.splitlines() for word in [*line.split(), "<eos>"]]
        known = {word for line in PROSE.splitlines() for word in line.split()} | {"<eos>"}
        found = [corpus.vocabulary.tokens[number].decode() for number in getattr(corpus, split)]
        assert found == [word if word in known else "<unk>" for word in expected]
    assert len(corpus.vocabulary) == len(known) + 1
    assert corpus.unit == "word"


def test_tokens_files_are_words_unless_told_otherwise(tmp_path, cache):
    folder = folder_of(tmp_path / "own", wiki__train__tokens="a b", wiki__valid__tokens="a", wiki__test__tokens="b")
    assert load_corpus(folder, cache=cache).unit == "word"
    assert load_corpus(folder, unit="character", cache=cache).unit == "character"


words = st.text(st.sampled_from("ab é\n\t 字"), max_size=80)


@pytest.mark.parametrize("kind", ["byte", "character", "word"])
@given(content=words, size=st.integers(1, 9))
def test_numbering_does_not_depend_on_the_blocks(kind: Kind, content: str, size: int):
    data = content.encode()
    spelled = []
    for blocks in (size, 1000):
        symbols = SYMBOLS[kind]()
        numbers = [number for block in symbols.number(in_blocks(data, blocks)) for number in block.tolist()]
        spelled.append(symbols.spell(np.array(numbers, np.int64)))
    assert spelled[0] == spelled[1]
    if kind == "word":
        # as Python reads lines; \t and the like separate words as blanks do
        lines = data.split(b"\n")[: -1 if data.endswith(b"\n") or not data else None]
        assert spelled[0] == [word for line in lines for word in [*line.split(), b"<eos>"]]
    else:
        assert b"".join(spelled[0]) == data


@given(content=words.filter(str.strip), min_count=st.integers(1, 4))
def test_the_vocabulary_is_sorted_by_frequency_and_rare_words_are_unknown(content: str, min_count: int):
    symbols = SYMBOLS["word"]()
    numbers = np.concatenate(list(symbols.number(in_blocks(content.encode(), 1000))))
    counts = np.bincount(numbers, minlength=symbols.num_numbers)
    vocabulary, table = by_frequency("word", symbols, counts, counts, min_count)
    truth = Counter(symbols.spell(numbers))
    kept = {word for word, number in truth.items() if number >= min_count} | {b"<eos>", b"<unk>"}
    assert set(vocabulary.tokens) == kept
    final = Counter(vocabulary.tokens[number] for number in table[numbers])
    assert [final[token] for token in vocabulary.tokens] == sorted(final.values(), reverse=True) + [0] * (
        len(vocabulary) - len(final)
    )
    assert all(final[word] == truth[word] for word in kept - {b"<unk>"})


@given(numbers=st.lists(st.integers(0, 7)))
def test_words_survive_the_round_trip(numbers: list[int]):
    symbols = SYMBOLS["word"]()
    seen = np.concatenate(list(symbols.number(in_blocks(b"a b\nc <unk> d <eos>x \xc2\xa0y", 1000))))
    counts = np.bincount(seen, minlength=symbols.num_numbers)
    vocabulary, _ = by_frequency("word", symbols, counts, counts, 1)
    assert len(vocabulary) == 8
    assert vocabulary.encode(vocabulary.decode(numbers)) == numbers


def test_the_vocabulary_survives_the_disk_even_where_bytes_are_no_text(tmp_path, cache):
    folder = folder_of(tmp_path / "own", train__txt="żółw żółw", valid__txt="w", test__txt="ó")
    vocabulary = load_corpus(folder, cache=cache).vocabulary
    assert vocabulary.decode(vocabulary.encode("wółż")) == "wółż"
    source = prepare.Source(name="raw", kind="byte", texts=(text_of(folder / "train.txt"),) * 3)
    vocabulary = prepare.prepare(source, cache).vocabulary
    assert sorted(vocabulary.tokens) == sorted({bytes([byte]) for byte in "żółw ".encode()})
    assert vocabulary.decode(vocabulary.encode("wółż")) == "wółż"


@given(
    kinds=st.sampled_from([("character", "character"), ("word", "word"), ("byte", "character"), ("byte", "byte")]),
    own=words,
    content=words,
)
def test_the_text_of_another_vocabulary_is_numbered_as_it_is_encoded(kinds: tuple[Kind, Kind], own: str, content: str):
    vocabulary, other = (made_of(kind, text) for kind, text in zip(kinds, (own + content, content), strict=True))
    numbers = np.array(other.encode(content), np.int64)
    assert vocabulary.renumber(numbers, other).tolist() == vocabulary.encode(content)


def test_what_the_vocabulary_does_not_know_is_treated_as_in_a_prompt():
    few, more = made_of("word", "a b"), made_of("word", "a c b")
    assert few.decode(few.renumber(np.array(more.encode("a c b")), more).tolist()) == "a <unk> b"
    letters, alphabet = made_of("character", "ab"), made_of("character", "abc")
    assert letters.renumber(np.array(alphabet.encode("ba")), alphabet).tolist() == letters.encode("ba")
    with pytest.raises(DataError, match="in the 2 characters of the corpus, but has 'c'"):
        letters.renumber(np.array(alphabet.encode("abc")), alphabet)
    with pytest.raises(DataError, match="must be read in characters, as the model does, but is read in words"):
        letters.renumber(np.array([0]), few)


def test_unknown_words_of_a_prompt_are_unk_and_unknown_characters_are_refused(tmp_path, cache):
    folder = folder_of(tmp_path / "own", train__txt="a b", valid__txt="b", test__txt="a")
    vocabulary = load_corpus(folder, unit="word", cache=cache).vocabulary
    assert vocabulary.decode(vocabulary.encode("a zebra")) == "a <unk>"
    with pytest.raises(DataError, match="in the 3 characters of the corpus, but has 'z'"):
        load_corpus(folder, cache=cache).vocabulary.encode("a zebra")


@pytest.mark.parametrize("num_types, dtype", [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32)])
def test_tokens_take_the_smallest_type_that_fits(num_types, dtype):
    assert smallest_dtype(num_types) is dtype


def test_a_corpus_is_prepared_once_and_again_when_its_text_changes(tmp_path, cache, monkeypatch):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    first = load_corpus(path, cache=cache)
    monkeypatch.setattr(prepare, "_write", None)
    again = load_corpus(path, cache=cache)
    assert again.record() == first.record()
    monkeypatch.undo()
    path.write_text(PROSE + "!")
    changed = load_corpus(path, cache=cache)
    assert whole(changed) == PROSE + "!"
    assert changed.fingerprint != first.fingerprint


def test_the_fingerprint_is_of_the_text_not_of_its_path(tmp_path, cache):
    prints = set()
    for name in ("a", "b"):
        folder = folder_of(tmp_path / name, train__txt="x y", valid__txt="x", test__txt="y")
        prints.add(load_corpus(folder, cache=cache).fingerprint)
    prints.add(load_corpus(folder, cache=tmp_path / "elsewhere").fingerprint)
    assert len(prints) == 1
    assert load_corpus(folder, unit="word", cache=cache).fingerprint not in prints


def test_the_record_is_json_and_says_where_the_text_is_from(tmp_path, cache):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    record = json.loads(json.dumps(load_corpus(path, cache=cache).record()))
    assert record["provenance"]["source"] == str(path)
    assert record["provenance"]["sha256"] == {"prose.txt": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert sum(record["tokens"].values()) == len(PROSE)


@pytest.mark.parametrize("damage", ["short", "other", "missing", "garbage", "json"])
def test_a_damaged_prepared_corpus_is_prepared_again(tmp_path, cache, damage):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    folder = load_corpus(path, cache=cache).folder
    if damage == "short":
        os.truncate(folder / "train.npy", 200)
    elif damage == "other":
        np.save(folder / "valid.npy", np.zeros(3, np.uint8))
    elif damage == "missing":
        (folder / "vocabulary.json").unlink()
    elif damage == "garbage":
        (folder / "valid.npy").write_bytes(b"not an array")
    else:
        (folder / "corpus.json").write_text("{")
    assert whole(load_corpus(path, cache=cache)) == PROSE


def test_progress_ends_at_the_whole(tmp_path, cache):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    calls: list[tuple[str, int, int | None]] = []
    load_corpus(path, cache=cache, progress=lambda *call: calls.append(call))
    assert calls[-1] == ("preparing prose", path.stat().st_size, path.stat().st_size)


def test_markup_is_stripped_by_the_documented_rules():
    article = textwrap.dedent(
        """\
        {{Infobox|{{nested}}|x=1}}
        '''Abu Dhabi''' is a [[city|large city]] in the [[UAE]].&lt;ref&gt;gone&lt;/ref&gt;
        <!-- gone -->
        == History ==
        [[Image:x.jpg|thumb|a [[linked]] caption]] See [http://example.org/x the site] since 1971 &amp;mdash; http://gone.org
        {| class="gone"
        | gone
        |}
        [[Category:Gone]] [[de:Gone]]
        """
    )
    assert strip_markup(article).split("\n") == [
        "abu dhabi is a large city in the uae",
        "history",
        "see the site since 1971",
        "",
    ]
    assert strip_markup("#REDIRECT [[elsewhere]]") == ""


def test_words_of_a_dump_do_not_depend_on_the_blocks(tmp_path, monkeypatch):
    path = tmp_path / "dump"
    page = "<page><title>t</title><text xml:space='preserve'>Żółw {}\nand [[a|b]]</text></page>\n"
    path.write_text("".join(page.format(number) for number in range(20)) + "<text>cut off", encoding="utf-8")
    expected = "".join(f"żółw {number}\nand b\n" for number in range(20))
    for size in (1, 37, 10_000):
        monkeypatch.setattr(vocabulary, "BLOCK_BYTES", size)
        assert b"".join(enwik8_words(path).blocks()).decode() == expected


def test_the_embedded_corpus_is_the_same_every_time(tmp_path, monkeypatch):
    library = tmp_path / "library"
    (library / "pydoc_data").mkdir(parents=True)
    (library / "pydoc_data" / "topics.py").write_text(
        "topics = {'a': 'topic ' + 'one', 'b': '''topic two'''}\n".replace(" + ", " ")
    )
    (library / "one.py").write_text(
        'raise RuntimeError("never run")\n"""no docstring"""\nclass A:\n    """A class."""\n'
        '    if 1:\n        def f(self):\n            """A method."""\n            return """no docstring"""\n'
    )
    (library / "two.py").write_text('"""A class."""\ndef g():\n    """A function.\n\n    More."""\n')
    (library / "broken.py").write_text("def (")
    (library / "test").mkdir()
    (library / "test" / "three.py").write_text('"""Left out."""')
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    corpora = [load_corpus(cache=tmp_path / name) for name in ("x", "y")]
    assert whole(corpora[0]) == whole(corpora[1])
    documents = sorted(whole(corpora[0]).strip("\n").split("\n\n"))
    assert documents == sorted(["topic one", "topic two", "A class.", "A method.", "A function.", "More."])
    assert corpora[0].record()["provenance"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(DataError, match="needs the sources of Python's standard library, but .*none holds none"):
        load_corpus("pydoc", cache=tmp_path / "cache")


def test_published_files_are_found_in_the_data_folder_and_checked(tmp_path, cache, monkeypatch):
    files = {"wiki.train.tokens": b" a b \n", "wiki.valid.tokens": b"a", "wiki.test.tokens": b"b"}
    digests = {name: "sha1:" + hashlib.sha1(content).hexdigest() for name, content in files.items()}
    published = Published(urls=("http://127.0.0.1:9/x.zip",), megabytes=1, files=digests)
    monkeypatch.setitem(PUBLISHED, "wikitext-103", published)
    folder = tmp_path / "data" / "wikitext-103"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for data in (tmp_path / "data", folder):
        assert len(load_corpus("wikitext-103", data=data, cache=cache).train) == 3
    (folder / "wiki.valid.tokens").write_bytes(b"A")
    with pytest.raises(DataError, match=r"wiki.valid.tokens must have the checksum sha1:86f7.*, but has sha1:6dcd"):
        load_corpus("wikitext-103", data=folder, cache=tmp_path / "other")
    assert left(tmp_path / "other") == []


BAD = {
    "an unknown name": (lambda path: "enwik9", {}, "but is 'enwik9', which is none of them. Did you mean 'enwik8'?"),
    "a missing file": (lambda path: path / "none.txt", {}, "none.txt', which is none of them. Check the path."),
    "no validation": (
        lambda path: folder_of(path / "f", train__txt="a", test__txt="a"),
        {},
        "but .*f has no valid.txt. Add it",
    ),
    "an empty validation": (
        lambda path: folder_of(path / "f", train__txt="a", valid__txt="", test__txt="a"),
        {},
        r"but valid of f is empty \(.*valid.txt is too short\). Give it more text",
    ),
    "a text too short to split": (
        lambda path: folder_of(path / "f", t="nineteen characters") / "t",
        {},
        "but valid of t is empty",
    ),
    "words that are not UTF-8": (
        lambda path: folder_of(path / "f", t=b"caf\xe9 " * 50) / "t",
        {"unit": "word"},
        "must be UTF-8, but .*t has the byte 0xe9 at position 3. Convert it",
    ),
    "characters that are not UTF-8": (
        lambda path: folder_of(path / "f", t=b"a" * 99 + b"\xc3") / "t",
        {},
        "must be UTF-8, but .*t has the byte 0xc3 at position 99.",
    ),
    "a unit for a name": (lambda path: "enwik8", {"unit": "word"}, "texts of your own, but were given for enwik8"),
    "an unknown unit": (lambda path: path, {"unit": "line"}, "'character' or 'word', but is 'line'"),
    "rare characters": (lambda path: path, {"min_count": 2}, "1 unless `unit` is 'word', but is 2"),
    "no enwik8 in the folder": (lambda path: "enwik8", {"data": "/nowhere"}, "the file enwik8, but /nowhere does not"),
    "no WikiText in the folder": (lambda path: "wikitext-2", {"data": "/nowhere"}, "but /nowhere has no train.txt"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence_and_nothing_is_kept(tmp_path, cache, case):
    what, options, message = BAD[case]
    with pytest.raises(DataError, match=message) as caught:
        load_corpus(what(tmp_path), cache=cache, **options)
    assert "\n" not in str(caught.value)
    assert left(cache) == []


def test_bytes_that_are_not_utf8_are_found_across_blocks(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(vocabulary, "BLOCK_BYTES", 7)
    path = tmp_path / "t"
    path.write_bytes("żółw ".encode() * 9 + b"\xff" + b"more text")
    for unit in ("character", "word"):
        with pytest.raises(DataError, match="0xff at position 72"):
            load_corpus(path, unit=unit, cache=cache)


def test_a_preparation_that_is_interrupted_leaves_nothing(tmp_path, cache):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)

    def interrupt(*call: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_corpus(path, cache=cache, progress=interrupt)
    assert left(cache) == []


def test_two_preparations_at_the_same_time_do_not_disturb_each_other(tmp_path, cache):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    inner = []
    with ThreadPoolExecutor() as pool:
        outer = load_corpus(
            path, cache=cache, progress=lambda *call: inner.append(pool.submit(load_corpus, path, cache=cache))
        )
        assert whole(outer) == whole(inner[0].result()) == PROSE
    assert left(cache)[-1] == "vocabulary.json"
    assert len(list(cache.glob("*/*/"))) == 1


def test_what_a_killed_preparation_left_gives_way_to_the_next(tmp_path, cache):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    folder = load_corpus(path, cache=cache).folder
    unfinished = folder.with_name(f".{folder.name}")
    folder.rename(unfinished)
    (unfinished / "scratch").touch()
    assert whole(load_corpus(path, cache=cache)) == PROSE
    assert not unfinished.exists() and not (folder / "scratch").exists()


def test_a_prepared_corpus_is_found_by_its_fingerprint_without_its_text(tmp_path, cache):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    corpora = [load_corpus(path, cache=cache, unit=unit) for unit in ("character", "word")]
    path.unlink()
    for corpus in corpora:
        found = load_prepared(corpus.fingerprint, cache=cache)
        assert found is not None
        assert whole(found) == whole(corpus)
        for damaged in cache.glob(f"corpora/{corpus.folder.name}/valid.npy"):
            damaged.write_bytes(b"")
        assert load_prepared(corpus.fingerprint, cache=cache) is None
    assert load_prepared("0" * 64, cache=cache) is None


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of the system on file sizes")
def test_a_disk_that_fills_up_leaves_nothing(tmp_path, cache):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE * 50)
    code = """
        import resource, sys
        from rankwise.lab.data import load_corpus
        from rankwise.errors import DataError
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            load_corpus(sys.argv[1], cache=sys.argv[2])
        except DataError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(path), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "must be written whole to" in done.stdout
    assert "File too large. Nothing was kept; free some space" in done.stdout
    assert left(cache) == []


def test_a_cache_that_cannot_be_made_is_refused(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    with pytest.raises(DataError, match="must be written whole to .*prose.txt/cache.*Not a directory"):
        load_corpus(path, cache=path / "cache")
