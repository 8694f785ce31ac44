"""The store: results once for each line, files that no row names, damage, two servers."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from lightserve.batches.entry import response_entry
from lightserve.batches.folder import BatchDirError, elected
from lightserve.batches.records import Batch, Status, StoredFile
from lightserve.batches.store import BatchStore, opened_folder
from lightserve.batches.usage import Usage, usage_of
from lightserve.errors import UnavailableError


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    with opened_folder(str(tmp_path)):
        pass
    return BatchStore(str(tmp_path))


def add_batch(store: BatchStore, total: int = 3) -> Batch:
    batch = Batch("batch_1", "me", "openai", "/v1/completions", "file-1", "24h", 100, 200)
    store.add_batch(batch)
    assert store.begin(batch.id, total, 101)
    return batch


def test_a_line_has_one_result_and_counts_once(store: BatchStore) -> None:
    batch = add_batch(store)
    first, second = (response_entry("openai", "a", status, "r", {}) for status in (200, 400))

    store.add_results(batch.id, [(1, first), (2, second)])
    store.add_results(batch.id, [(1, second), (2, second), (1, second)])

    assert list(store.results(batch.id)) == [(1, first), (2, second)]
    stored = store.batch("me", batch.id)
    assert stored is not None
    assert (stored.completed, stored.failed, stored.status) == (1, 1, Status.IN_PROGRESS)
    assert store.totals().requests == {"completed": 1, "failed": 1, "expired": 0, "cancelled": 0}
    assert store.totals().pending == 1


def test_tokens_count_once_for_each_line_also_when_the_batch_has_ended(store: BatchStore) -> None:
    batch = add_batch(store)
    first, second = (response_entry("openai", "a", 200, "r", {}, Usage(number, 1, 2, 1)) for number in (10, 100))

    store.add_results(batch.id, [(1, first), (2, second)])
    store.add_results(batch.id, [(2, second), (3, first)])
    store.finish(batch, Status.COMPLETED, [], 0, 103)

    (stored,) = store.batches("me", "openai", None, 10)
    assert stored.usage == Usage(120, 3, 6, 3)
    store.delete_batch("me", batch.id)
    store.add_batch(batch)
    assert store.open_batches()[0].usage == Usage()


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}, Usage(5, 0, 2, 0)),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 3},
                "completion_tokens_details": {"reasoning_tokens": 1},
            },
            Usage(5, 3, 2, 1),
        ),
        ({"input_tokens": 5, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 1}}, Usage(5, 0, 2, 1)),
        ({"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 3}, Usage(8, 3, 2, 0)),
        ({"prompt_tokens": 0, "prompt_tokens_details": None}, Usage()),
        (None, Usage()),
    ],
)
def test_the_usage_of_each_api_is_read(usage: object, expected: Usage) -> None:
    assert usage_of({"usage": usage}) == expected
    assert usage_of([usage]) == Usage()


def test_the_end_of_a_batch_and_its_files_are_one_transaction(store: BatchStore) -> None:
    batch = add_batch(store)
    store.add_results(batch.id, [(1, response_entry("openai", "a", 200, "r", {}))])
    file = StoredFile("file-2", "me", "out", "batch_output", 3, 102)
    batch.output_file_id = file.id

    with pytest.raises(UnavailableError):
        store.finish(batch, Status.COMPLETED, [file, file], 0, 103)  # the same id twice

    assert store.open_batches()[0].status is Status.IN_PROGRESS
    assert store.finished_lines(batch.id) == {1}
    store.finish(batch, Status.COMPLETED, [file], 0, 103)
    assert store.open_batches() == []
    assert store.finished_lines(batch.id) == set()
    assert store.file("me", "file-2") == file


def test_a_file_that_no_row_names_is_removed_at_the_start(store: BatchStore) -> None:
    known, unknown = store.new_path()[1], store.new_path()[1]
    for path in (known, unknown):
        path.write_bytes(b"x")
    store.add_file(StoredFile(known.name, "me", "a", "batch", 1, 100))

    with opened_folder(store.folder):
        assert (known.exists(), unknown.exists()) == (True, False)


def test_expired_files_go_unless_an_open_batch_reads_them(store: BatchStore) -> None:
    add_batch(store)
    for file_id in ("file-1", "file-2", "file-3"):
        store.add_file(StoredFile(file_id, "me", "a", "batch", 1, 100, None if file_id == "file-3" else 150))

    store.delete_expired_files(151)

    assert [file.id for file in store.files("me", None, None, 10, False)] == ["file-1", "file-3"]


def test_a_damaged_database_names_the_remedy(store: BatchStore) -> None:
    add_batch(store)
    store.close()
    path = Path(store.folder) / "batches.sqlite"
    path.write_bytes(path.read_bytes()[:100] + b"\xff" * 8000)

    with pytest.raises(BatchDirError, match=r"is damaged .*move the folder away"), opened_folder(store.folder):
        pass
    with pytest.raises(UnavailableError, match="--batch_dir"):
        BatchStore(store.folder).open_batches()


def test_a_folder_has_one_server_and_one_executor(store: BatchStore) -> None:
    with opened_folder(store.folder), pytest.raises(BatchDirError, match="another server"), opened_folder(store.folder):
        pass
    with elected(store.folder) as first, elected(store.folder) as second:
        assert (first, second) == (True, False)
    with elected(store.folder) as later:
        assert later


def test_a_store_of_another_process_is_read_while_it_is_written(store: BatchStore) -> None:
    batch = add_batch(store)
    reader = sqlite3.connect(Path(store.folder) / "batches.sqlite")
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM results").fetchone() == (0,)

    store.add_results(batch.id, [(1, response_entry("openai", "a", 200, "r", {}))])

    assert store.finished_lines(batch.id) == {1}
    reader.close()
