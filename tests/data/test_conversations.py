"""JSONL conversations: reading, splitting, ranking a draft vocabulary."""

import gzip
import json

import numpy as np
import pytest

from angelspec_jax.data.conversations import count_tokens, rank_vocabulary, read, split


def line(index, domain="math", key="conversations"):
    turns = [{"role": "user", "content": f"question {index}"}, {"role": "assistant", "content": "answer"}]
    return json.dumps({"id": index, "domain": domain, key: turns})


def test_plain_and_gzip_files_read_alike(tmp_path):
    text = "\n".join([line(0), "", line(1, "code", "messages")]) + "\n"
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read([plain]) == read([packed])
    assert [c.domain for c in read([plain])] == ["math", "code"]
    assert [c.id for c in read([plain], domains=["code"])] == [1]
    with pytest.raises(ValueError, match="'chat' occurs in none"):
        read([plain], domains=["chat"])


def test_sharegpt_names_and_text_ids(tmp_path):
    path = tmp_path / "a.jsonl"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    path.write_text("\n".join([json.dumps({"id": "first", "conversations": turns}), json.dumps({"conversations": turns})]))
    first, second = read([path])
    assert first.messages == ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"})
    assert first.id == read([path])[0].id
    assert second.id == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{not json", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"id": 1}', "'conversations' or 'messages'"),
        ('{"conversations": []}', "non-empty"),
        ('{"conversations": [3]}', "a turn must be an object"),
        ('{"conversations": [{"role": "user"}]}', "'role' and 'content'"),
        ('{"domain": 3, "conversations": [{"role": "user", "content": ""}]}', "'domain' must be text"),
    ],
)
def test_malformed_lines_are_named(tmp_path, bad, words):
    path = tmp_path / "a.jsonl"
    path.write_text(line(0) + "\n" + bad + "\n")
    with pytest.raises(ValueError, match=words) as caught:
        read([path])
    assert f"{path}, line 2:" in str(caught.value)


def test_damaged_files_are_named(tmp_path):
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(line(i) for i in range(200)).encode())[:-20])
    with pytest.raises(ValueError, match="damaged"):
        read([packed])
    latin = tmp_path / "b.jsonl"
    latin.write_bytes(line(0).encode() + b"\n\xff\n")
    with pytest.raises(ValueError, match="UTF-8"):
        read([latin])
    with pytest.raises(FileNotFoundError, match="c.jsonl"):
        read([tmp_path / "c.jsonl"])
    empty = tmp_path / "d.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="holds no conversation"):
        read([empty])


def test_split_by_id(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(line(i) for i in range(10)))
    training, validation = split(read([path]), 4)
    assert [c.id for c in validation] == [0, 4, 8]
    assert len(training) == 7
    assert split(read([path]), 0)[1] == []


def test_frequency_ranked_vocabulary():
    counts = count_tokens([np.array([1, 1, 1, 5, 5, 3]), np.array([5, 2], np.int32)], 8)
    assert counts.tolist() == [0, 3, 1, 1, 0, 3, 0, 0]
    ids = rank_vocabulary(counts, 4, always=[7])
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 2, 5, 7]  # 2 and 3 tie: the lower id
    assert rank_vocabulary(counts, 8).tolist() == list(range(8))
    for size, always, words in ((0, [], "between 1 and 8"), (9, [], "between"), (1, [1, 2], "cannot hold"), (3, [8], "outside")):
        with pytest.raises(ValueError, match=words):
            rank_vocabulary(counts, size, always)


RECORDS = [
    {"id": i, "domain": "ab"[i % 2], "messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}
    for i in range(6)
]


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_data_set_reads_like_a_file_of_lines(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    table = datasets.Dataset.from_list(RECORDS)
    source = tmp_path / ("table.parquet" if kind == "parquet" else "saved")
    if kind == "parquet":
        table.to_parquet(str(source))
    else:
        table.save_to_disk(str(source))
    assert read([source]) == read([lines])
    assert [c.id for c in read([source], ["b"])] == [1, 3, 5]


def test_what_is_wrong_with_a_data_set_is_one_sentence(tmp_path):
    datasets = pytest.importorskip("datasets")
    with pytest.raises(FileNotFoundError, match=r"nowhere.parquet does not exist"):
        read([tmp_path / "nowhere.parquet"])
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"broken.parquet cannot be read as a data set"):
        read([broken])
    odd = tmp_path / "odd.parquet"
    datasets.Dataset.from_list([{"text": "no turns"}]).to_parquet(str(odd))
    with pytest.raises(ValueError, match=r"odd.parquet, record 0: needs a non-empty list of turns"):
        read([odd])


def test_a_data_set_of_the_hub_is_asked_for_by_name_subset_and_split(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*place, split):
        asked.append((place, split))
        return datasets.Dataset.from_list(RECORDS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read(["hf://owner/name", "hf://owner/name/sub:test"], ["a"])
    assert asked == [(("owner/name",), "train"), (("owner/name", "sub"), "test")]
    assert [c.id for c in found] == [0, 2, 4] * 2


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*place, split):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"^hf://owner/name cannot be .*the Hub \(Local.*\); check the name, the network.*give the file$"):
        read(["hf://owner/name"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^conversations file owner/name does not exist; a data set of the hub is hf://owner/name$"):
        read(["owner/name"])
