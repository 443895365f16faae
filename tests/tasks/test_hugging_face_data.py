import pytest
from datasets import Dataset, DatasetDict

from lit_rl.tasks import HuggingFaceData

ROWS = Dataset.from_dict({"prompt": ["a", "b", "c"], "answer": [1, 2, 3]})
EXPECTED = [{"prompt": p, "answer": a} for p, a in (("a", "1"), ("b", "2"), ("c", "3"))]


def test_the_splits_of_a_saved_data_set_are_the_two_sides(tmp_path):
    DatasetDict(train=ROWS, test=ROWS.select([0]).map(lambda row: {"prompt": "d"})).save_to_disk(
        str(tmp_path / "saved")
    )
    task = HuggingFaceData(path=str(tmp_path / "saved"), held_out_split="test")
    assert task.train().to_list() == EXPECTED
    assert task.held_out().to_list() == [{"prompt": "d", "answer": "1"}]
    other = HuggingFaceData(path=str(tmp_path / "saved"), held_out_split="valid")
    with pytest.raises(ValueError, match=r"no split 'valid', it has \['test', 'train'\]"):
        other.held_out()


def test_a_saved_data_set_without_splits_is_split_by_fraction(tmp_path):
    ROWS.save_to_disk(str(tmp_path / "saved"))
    task = HuggingFaceData(path=str(tmp_path / "saved"), held_out_fraction=0.34)
    assert len(task.held_out()) == 1
    rows = [*task.train().to_list(), *task.held_out().to_list()]
    assert sorted(rows, key=lambda row: row["prompt"]) == EXPECTED


def test_a_folder_of_data_files_is_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    ROWS.to_parquet(str(tmp_path / "files" / "train.parquet"))
    task = HuggingFaceData(path=str(tmp_path / "files"), held_out_fraction=0.34)
    assert len(task.train()) == 2


def test_a_bad_answer_is_an_error_that_says_where(tmp_path):
    Dataset.from_dict({"prompt": ["a"], "answer": [0.5]}).save_to_disk(str(tmp_path / "saved"))
    task = HuggingFaceData(path=str(tmp_path / "saved"), held_out_fraction=0.5)
    with pytest.raises(ValueError, match=r"saved, split train, row 0: the answer 0.5 is of type"):
        task.train()


def test_there_is_one_way_to_the_held_out_prompts():
    with pytest.raises(ValueError, match=r"held_out_split is 'test' and held_out_fraction is 0\.1"):
        HuggingFaceData(path="x", held_out_split="test", held_out_fraction=0.1)
