"""Where text comes from, how it is split, and that batches are a function of (seed, step) alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import EXAMPLES  # noqa: F401 - which makes the examples importable

# isort: split
from data import (
    HELD_OUT,
    Corpus,
    batch,
    held_out_windows,
    require_window,
    standard_library,
    text,
    token_file,
    tokenize,
)
from evaluation import trigram_loss
from tokens import BytePairs, Bytes


def corpus(train: np.ndarray, held_out: np.ndarray) -> Corpus:
    return Corpus("here", "bytes", train, held_out, 256, 1.0, "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(120):
        path = tmp_path / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text number {i}, ä\n" * 3)
    return tmp_path


def test_a_folder_is_split_by_file_without_overlap(folder: Path) -> None:
    documents = text(folder)
    train, held_out = ({name for name, _ in part} for part in (documents.train, documents.held_out))
    assert not train & held_out
    assert train | held_out == {path.relative_to(folder).as_posix() for path in folder.rglob("*.txt")}
    assert 0.2 / HELD_OUT < len(held_out) / 120 < 3 / HELD_OUT


def test_a_file_stays_on_its_side_when_others_come(folder: Path) -> None:
    before = {name for name, _ in text(folder).held_out}
    for i in range(50):
        (folder / f"new{i}").write_text("new")
    after = {name for name, _ in text(folder).held_out}
    assert {name for name in after if not name.startswith("new")} == before


def test_hidden_files_and_what_is_no_text_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / ".hidden-above-is-fine" / "data"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("hidden")
    (folder / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "zeros.bin").write_bytes(bytes(10))
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(name)
    documents = text(folder)
    assert sorted(name for name, _ in documents.train + documents.held_out) == ["a.txt", "b.txt"]
    assert len(documents.held_out) == 1  # too few files to go by hash alone, yet one is held out


@given(st.text(min_size=1))
def test_the_parts_of_a_single_file_make_the_file_and_cut_no_character(tmp_path_factory, content: str) -> None:
    path = tmp_path_factory.mktemp("one") / "file.txt"
    path.write_bytes(content.encode())
    documents = text(path)
    [(_, train)], [(_, held_out)] = documents.train, documents.held_out
    assert train + held_out == content.encode()
    assert train.decode() + held_out.decode() == content


def test_the_standard_library_is_there_without_its_tests() -> None:
    documents = standard_library()
    names = [name for name, _ in documents.train + documents.held_out]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "idlelib", "site-packages"} & set(name.split("/"))]
    assert sum(len(content) for _, content in documents.train) > 5e6
    assert sum(len(content) for _, content in documents.held_out) > 1e5
    assert tokenize(documents, Bytes()).checksum == tokenize(standard_library(), Bytes()).checksum


def test_the_checksum_sees_every_token_and_the_border() -> None:
    def checksum(train: bytes, held_out: bytes) -> str:
        from data import Documents

        return tokenize(Documents("", [("a", train)], [("b", held_out)]), Bytes()).checksum

    sums = [checksum(b"abc", b"d"), checksum(b"abd", b"d"), checksum(b"ab", b"cd"), checksum(b"abc", b"e")]
    assert len(set(sums)) == len(sums)


@given(st.integers(0, 1000), st.integers(0, 10**6), st.integers(1, 8), st.integers(2, 50))
def test_batches_are_a_function_of_seed_and_step(seed: int, step: int, num_rows: int, length: int) -> None:
    tokens = np.arange(50, dtype=np.uint8)
    rows = batch(tokens, step, seed=seed, num_rows=num_rows, length=length)
    batch(tokens, step + 1, seed=seed, num_rows=num_rows, length=length)
    torch.rand(1)
    again = batch(tokens, step, seed=seed, num_rows=num_rows, length=length)
    assert rows.dtype == torch.int64
    assert rows.shape == (num_rows, length)
    assert rows.equal(again)
    assert (rows.diff(dim=1) == 1).all()  # windows of what follows on each other


def test_batches_differ_by_step_and_seed_and_reach_both_ends() -> None:
    tokens = np.arange(40, dtype=np.uint8)
    rows = [batch(tokens, step, seed=seed, num_rows=8, length=8) for seed in range(3) for step in range(30)]
    assert len({tuple(r.flatten().tolist()) for r in rows}) == len(rows)
    every = torch.cat(rows)
    assert {every.min().item(), every.max().item()} == {0, 39}


@given(st.integers(2, 300), st.integers(2, 40), st.integers(1, 12))
def test_held_out_windows_do_not_overlap(size: int, length: int, most: int) -> None:
    held_out = np.arange(size, dtype=np.int64)
    if size < length:
        with pytest.raises(ValueError, match=f"here gives {size} tokens held out, but one window takes {length}"):
            require_window(corpus(np.zeros(1000), held_out), length)
        return
    windows = held_out_windows(corpus(np.zeros(0), held_out), length, most)
    assert windows.shape == (min(most, size // length), length)
    assert windows.unique().numel() == windows.numel()


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_token_files_are_mapped_and_split_by_place(tmp_path: Path, name: str) -> None:
    ids, path = np.arange(1000, dtype=np.uint16), tmp_path / name
    np.save(path, ids) if name.endswith("npy") else ids.tofile(path)
    found = token_file(path, vocab_size=1000)
    assert isinstance(found.train, np.memmap)
    assert np.concatenate([found.train, found.held_out]).tolist() == ids.tolist()
    assert found.held_out.size == 1000 // HELD_OUT
    assert found.bytes_per_token is None
    with pytest.raises(ValueError, match="holds the token id 999, but the vocabulary ends at 998"):
        token_file(path, vocab_size=999)


def test_damaged_token_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "other.npy").write_bytes(b"no array at all")
    np.save(tmp_path / "float.npy", np.zeros(10))
    np.save(tmp_path / "wide.npy", np.zeros((2, 10), np.uint16))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name, said in {
        "odd.bin": "uint16",
        "empty.bin": "is empty",
        "missing.bin": "no such file",
        "other.npy": "uint16",
        "float.npy": "float64",
        "wide.npy": "in one row",
        "objects.npy": "uint16",
    }.items():
        with pytest.raises(ValueError, match=f"{name}.*{said}"):
            token_file(tmp_path / name, vocab_size=10)


def test_missing_and_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x").write_bytes(b"\xff\xfe")
    for name, said in {"gone": "no such", "empty.txt": "no text", "folder": "no text", "binary": "no text"}.items():
        with pytest.raises(ValueError, match=f"{name}, but there is {said}"):
            text(tmp_path / name)


@given(st.lists(st.text(), min_size=2, max_size=5))
def test_bytes_and_pairs_give_the_text_back(texts: list[str]) -> None:
    pairs = BytePairs.train([("a", b"def one(two): return one(two)\n" * 20)], vocab_size=300)
    for tokenizer in (Bytes(), pairs):
        for content in texts:
            ids = tokenizer.encode("x", content.encode())
            assert all(0 <= int(i) < tokenizer.vocab_size for i in ids)
            assert tokenizer.decode(int(i) for i in ids) == content.encode()


def test_pairs_shorten_text_and_mark_its_end(folder: Path, tmp_path: Path) -> None:
    documents = text(folder)
    pairs = BytePairs.train(documents.train, vocab_size=400)
    pairs.save(tmp_path / "tokenizer.json")
    found, again = tokenize(documents, pairs), tokenize(documents, BytePairs.load(tmp_path / "tokenizer.json"))
    assert found.checksum == again.checksum
    assert (found.train == pairs.end).sum() == len(documents.train)
    assert found.bytes_per_token is not None
    assert found.bytes_per_token > 1.5


def test_gpt2_files_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    import tokenizers

    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["hello world " * 50], 270, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save_model(str(tmp_path))
    (tmp_path / "vocab.json").rename(tmp_path / "encoder.json")
    with pytest.raises(ValueError, match=r"vocab\.bpe is missing"):
        BytePairs.gpt2(tmp_path)
    (tmp_path / "merges.txt").rename(tmp_path / "vocab.bpe")
    gpt2 = BytePairs.gpt2(tmp_path)
    assert gpt2.encode("", b"hello world").tolist() == made.encode("hello world").ids
    assert gpt2.end == made.token_to_id("<|endoftext|>")
    (tmp_path / "encoder.json").write_text("[]")
    with pytest.raises(ValueError, match="no readable"):
        BytePairs.gpt2(tmp_path)


def test_impossible_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bpe is 256"):
        BytePairs.train([("a", b"text")], vocab_size=256)
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        BytePairs.load(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        BytePairs.train([("latin.txt", "ä".encode("latin-1"))], vocab_size=300)


def slow_trigram_loss(train: list[int], windows: list[list[int]]) -> float:
    """Witten and Bell's blend, written out."""

    def probability(context: tuple[int, ...], token: int) -> float:
        n = len(context)
        follow = [train[i + n] for i in range(len(train) - n) if tuple(train[i : i + n]) == context]
        shorter = probability(context[1:], token) if n else 1 / 256
        kinds = len(set(follow))
        return (follow.count(token) + kinds * shorter) / (len(follow) + kinds) if follow else shorter

    losses = [
        -np.log(probability(tuple(row[max(0, place - 2) : place]), row[place]))
        for row in windows
        for place in range(1, len(row))
    ]
    return float(np.mean(losses))


def test_the_trigram_count_equals_its_definition() -> None:
    generator = np.random.default_rng(0)
    train = generator.integers(97, 101, 200).astype(np.uint8)
    windows = torch.from_numpy(generator.integers(97, 102, (3, 7)))
    assert trigram_loss(train, windows) == pytest.approx(slow_trigram_loss(train.tolist(), windows.tolist()))
