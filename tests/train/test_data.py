"""Which sequences a step reads, and how documents share them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lamina
from lamina.train.data import IGNORED, Order, Stream, bigram_loss, deal
from lamina.train.documents import Document, read_documents, split
from lamina.train.job import streams_of
from lamina.train.packing import Encoded, pack, place

CPU = torch.device("cpu")


@pytest.mark.parametrize(("passes", "world"), [(1, 1), (2, 1), (1, 2), (3, 2), (1, 4), (3, 4)])
def test_ranks_and_passes_share_a_step(passes: int, world: int) -> None:
    rows = Order(40, 12, seed=3).of_step(5)
    parts = [part for rank in range(world) for part in deal(rows, passes, world, rank)]
    assert [row for part in parts for row in part] == rows and len({len(p) for p in parts}) == 1


def test_an_epoch_reads_everything_once_and_the_next_in_another_order() -> None:
    order = Order(30, 4, seed=0)
    read = [row for step in range(15) for row in order.of_step(step)]
    assert sorted(read[:30]) == sorted(read[30:]) == list(range(30)) and read[:30] != read[30:]
    assert Order(30, 4, seed=0).of_step(7) == order.of_step(7), "a step is a function of its number"
    assert Order(30, 4, seed=1).of_step(7) != order.of_step(7)


def test_a_stream_tells_the_byte_that_follows() -> None:
    stream = Stream(bytes(range(50)), 8, "text")
    batch = stream.take([0, 5], CPU)
    assert len(stream) == 6 and batch.count == 16
    assert torch.equal(batch.labels, batch.tokens + 1) and batch.tokens[1].tolist() == list(range(40, 48))


def test_the_bigram_table() -> None:
    text = Stream(b"abc" * 400, 8, "text")
    assert bigram_loss(text, text, [0, 1]) == pytest.approx(-torch.tensor(401 / 656).log().item(), abs=2e-3)


@pytest.mark.parametrize("size", [1, 2, 4, 40, 310, 320, 1280])
def test_a_text_that_is_too_short_says_what_to_type(size: int) -> None:
    """Where no length would do, none is proposed; one that is proposed does."""
    documents = [Document("few.txt", "a" * size)]
    with pytest.raises(lamina.UsageError, match="few.txt: its held-out tenth: ") as caught:
        streams_of(documents, 128, "few.txt")
    proposed = re.findall(r"type --length (\d+)", str(caught.value))
    assert bool(proposed) == (size >= 320)
    if not proposed:
        assert "too few for shorter ones: give more text" in str(caught.value)
    for length in proposed:
        assert all(len(stream) for stream in streams_of(documents, int(length), "few.txt"))


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@settings(deadline=None)
@given(lengths)
def test_packed_sequences_hold_every_token_once(sizes: list[int]) -> None:
    first = [sum(sizes[:i]) + 1 for i in range(len(sizes))]
    documents = [Encoded(list(range(a, a + n)), [True] * n) for a, n in zip(first, sizes, strict=True)]
    if sum(n for n in sizes if n > 1) < 16:
        return
    packed = pack(documents, 8, 0, True, "text")
    flat = packed.tokens.flatten().tolist()
    learned = [n for n in range(1, sum(sizes) + 1) if n + 1 not in first and n < sum(sizes)]
    told = packed.labels.flatten().tolist()
    assert sorted(label - 1 for label in told if label != IGNORED) == learned
    for token, label, position, before in zip(
        flat, told, packed.positions.flatten().tolist(), [0, *flat], strict=False
    ):
        assert label in (token + 1, IGNORED)
        assert position == 0 or token in (before + 1, 0), "a document goes on, or positions begin anew"
    starts = [token for token, p in zip(flat, packed.positions.flatten().tolist(), strict=True) if p == 0 and token]
    assert len(starts) == sum(1 for t in starts if t in first or (t - max(f for f in first if f <= t)) % 8 == 0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_places(sizes: list[int]) -> None:
    rows = place(sizes, 16)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in row) for row in rows]
    assert max(filled) <= 16 and sum(f <= 8 for f in filled) <= 1, "no two sequences that one could hold"


def test_padded_sequences_hold_one_document_each() -> None:
    packed = pack([Encoded([1, 2, 3], [True] * 3), Encoded([4, 5], [True] * 2)], 4, 9, False, "text")
    assert packed.tokens.tolist() == [[1, 2, 3, 9], [4, 5, 9, 9]]
    assert packed.labels.tolist() == [[2, 3, IGNORED, IGNORED], [5, IGNORED, IGNORED, IGNORED]]
    assert packed.count([0, 1]) == 3


def test_the_standard_library_has_text_enough() -> None:
    train, held_out = split(read_documents(None))
    assert sum(len(d.text) for d in train) > 5_000_000 and len(held_out) > 50
    assert not {d.where for d in train} & {d.where for d in held_out}


BAD_FILES: list[tuple[str, bytes, list[str]]] = [
    ("a.txt", b"\xff\xfe\x00", ["a.txt", "UTF-8", "byte 0"]),
    ("a.txt", b"", ["empty"]),
    ("a.jsonl", b'{"text": "x"}\n{"text": \n', ["a.jsonl, line 2", "JSON"]),
    ("a.jsonl", b"[1]\n", ["line 1", "list"]),
    ("a.jsonl", b'{"prompt": "x"}\n', ["'prompt'", "`messages`", "`text`"]),
    ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', ["`role` and `content`"]),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}\n', ["assistant"]),
    ("a.jsonl", b'{"messages": [{"role": "assistent", "content": "x"}]}\n', ["'assistent'", "'assistant'"]),
    ("a.jsonl", b'{"messages": [{"role": "User", "content": "x"}]}\n', ["'User'", "'user'"]),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": null}]}\n', ["must be text", "null"]),
    ("a.bin", b"x", [".jsonl"]),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES)
def test_bad_files_are_named(name: str, content: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(lamina.UsageError) as caught:
        read_documents(str(tmp_path))
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("x")
    with pytest.raises(lamina.UsageError, match="Did you mean .*letters.txt"):
        read_documents(str(tmp_path / "leters.txt"))


def test_lines_of_jsonl_end_where_files_end_them(tmp_path: Path) -> None:
    """Unescaped, a string may hold what Python takes for the end of a line; and a file may begin with a mark."""
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in ("one\u2028line", "two\x85three")]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    assert [d.text for d in read_documents(str(tmp_path))] == ["one\u2028line", "two\x85three"]


def test_runs_below_a_folder_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("x")
    (tmp_path / "runs" / "1" / "checkpoints").mkdir(parents=True)
    for name in ("run.toml", "metrics.jsonl", "model/merges.txt"):
        (tmp_path / "runs" / "1" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "runs" / "1" / name).write_text("y")
    assert [d.text for d in read_documents(str(tmp_path))] == ["x"]


def test_text_and_conversations_do_not_mix(tmp_path: Path) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "assistant", "content": "x"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x"}) + "\n" + json.dumps(chat))
    with pytest.raises(lamina.UsageError, match="two kinds"):
        read_documents(str(tmp_path))


def test_one_text_gives_its_last_tenth() -> None:
    train, held_out = split([Document("x", "a" * 90 + "b" * 10)])
    assert train[0].text == "a" * 90 and held_out[0].text == "b" * 10
