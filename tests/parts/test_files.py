"""Small files are written whole or not at all, whoever else writes them."""

import os
import re
import threading

import pytest

import fewkeys as fk
from fewkeys.core.files import read_json, write_json, write_whole


def test_threads_that_write_one_file_never_show_half_of_it(tmp_path):
    """Each save is as long as its number says, so that a mixture or a stump is seen."""
    path, seen, failed = tmp_path / "plan.json", [], []

    def save(number):
        try:
            for turn in range(25):
                write_json(tmp_path, path.name, [number] * (100 * number + turn))
        except Exception as error:
            failed.append(error)

    writers = [threading.Thread(target=save, args=(number,)) for number in range(1, 9)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            actual = read_json(tmp_path, path.name)
            seen.append(actual[0])
            assert set(actual) == {actual[0]}
            assert 0 <= len(actual) - 100 * actual[0] < 25
    assert not failed
    assert seen
    assert os.listdir(tmp_path) == [path.name]


def test_a_planted_link_is_replaced_not_followed(tmp_path):
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_text("of somebody else")
    path.symlink_to(other)
    (tmp_path / f".file.{os.getpid()}").symlink_to(other)
    write_whole(path, "new")
    assert other.read_text() == "of somebody else"
    assert path.read_text() == "new"
    assert not path.is_symlink()


def test_what_fails_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_it_is_on_the_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    order, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), sync(handle)))
    monkeypatch.setattr("pathlib.Path.replace", lambda one, other: (order.append("name"), replace(one, other)))
    write_whole(tmp_path / "file", b"data")
    assert order == ["sync", "name"]


def test_others_may_read_what_the_mask_allows(tmp_path):
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_does_not_exist_may_be_a_repository_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for load, name in ((fk.Plan.from_pretrained, "plan.json"), (fk.ModelPlan.from_pretrained, "model_plan.json")):
        for directory, end in {
            "owner/name": "does not exist; huggingface_hub.snapshot_download loads a repository of the hub",
            "empty": "holds no JSON",
        }.items():
            expected = f"directory: expected a folder with {name}, got {directory!r}, which {end}"
            with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
                load(directory)
