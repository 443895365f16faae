import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from lit_rl.tasks import DataFiles

ROWS = [{"question": f"{n}+1=", "result": n + 1, "level": n % 2} for n in range(10)]


@pytest.fixture
def write(tmp_path):
    """Writes lines (text, bytes or objects) to a file and returns its path."""

    def write_lines(lines, name="prompts.jsonl"):
        path = tmp_path / name
        as_bytes = [
            line
            if isinstance(line, bytes)
            else (line if isinstance(line, str) else json.dumps(line)).encode()
            for line in lines
        ]
        path.write_bytes(b"".join(line + b"\n" for line in as_bytes))
        return str(path)

    return write_lines


def files(path, **options):
    options = {"prompt_column": "question", "answer_column": "result", **options}
    if not options.keys() & {"held_out_file", "held_out_fraction"}:
        options["held_out_fraction"] = 0.5
    return DataFiles(train_file=path, **options)


def everything(task):
    return sorted([*task.train().to_list(), *task.held_out().to_list()], key=lambda r: r["prompt"])


def test_named_columns_become_prompt_and_answer_and_others_stay(write):
    assert everything(files(write(ROWS)))[3] == {"prompt": "3+1=", "answer": "4", "level": 1}


def test_empty_lines_are_passed_over_and_absent_keys_are_none(write):
    rows = [{"question": "a", "result": "x", "level": 1}, "", {"question": "b", "result": "y"}]
    assert [row["level"] for row in everything(files(write(rows)))] == [1, None]


def test_a_parquet_file_is_read_the_same(write, tmp_path):
    path = str(tmp_path / "prompts.parquet")
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    assert everything(files(path)) == everything(files(write(ROWS)))


def test_chat_messages_are_prompts(write):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    rows = [{"question": messages, "result": "2"}, {"question": messages[1:], "result": "2"}]
    assert messages in [row["prompt"] for row in files(write(rows)).train().to_list()] + [
        row["prompt"] for row in files(write(rows)).held_out().to_list()
    ]


def test_without_an_answer_column_answers_are_empty(write):
    rows = everything(files(write([{"question": "a"}, {"question": "b"}]), answer_column=None))
    assert [row["answer"] for row in rows] == ["", ""]


def test_a_fraction_is_held_out_with_all_rows_of_a_prompt(write):
    # Ten prompts, each twice; three tenths of the prompts are 3, and 6 rows.
    task = files(write(ROWS + ROWS), held_out_fraction=0.3)
    train, held_out = task.train()["prompt"], task.held_out()["prompt"]
    assert (len(train), len(held_out)) == (14, 6)
    assert not set(train) & set(held_out)
    assert held_out == files(write(ROWS + ROWS), held_out_fraction=0.3).held_out()["prompt"]
    assert held_out != files(write(ROWS + ROWS), held_out_fraction=0.3, seed=1).held_out()["prompt"]


def test_a_second_file_is_held_out_and_prompts_in_both_are_counted(write):
    path = write(ROWS[:4])
    task = files(path, held_out_file=write(ROWS[3:6], "held_out.jsonl"))
    with pytest.warns(UserWarning, match="1 of 3 held-out prompts stand among those to train on"):
        assert task.held_out()["prompt"] == ["3+1=", "4+1=", "5+1="]
    assert task.train()["prompt"] == ["0+1=", "1+1=", "2+1=", "3+1="]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "\xff", "result": "1"}', r"prompts\.jsonl, line 3 is not UTF-8"),
        ('{"question": "a",', r"prompts\.jsonl, line 3 is not JSON"),
        ('["a", "b"]', r"prompts\.jsonl, line 3 is a JSON list, must be an object such as"),
        ('{"question": "a", "result": true}', r"line 3: the answer True is of type bool"),
        ('{"question": "a", "result": 0.5}', r'line 3: the answer 0.5 is .*such as "0.5" or 5'),
        ('{"question": "a", "result": NaN}', r"line 3: the answer nan is of type float"),
        ('{"question": "a", "result": null}', r"line 3: the answer None is of type NoneType"),
        ('{"question": "a", "result": ["1"]}', r"line 3: the answer \['1'\] is of type list"),
        ('{"question": "a", "result": {"x": 1}}', r"line 3: the answer .* is of type dict"),
        ('{"question": "a"}', r"line 3: the answer None is of type NoneType"),
        ('{"question": 5, "result": "1"}', r"line 3: the prompt 5 is neither text nor a list"),
        ('{"question": [], "result": "1"}', r"line 3: the prompt \[\] is neither text nor"),
        ('{"question": [{"role": "user"}], "result": "1"}', r"line 3: the prompt .* is neither"),
        ('{"question": "a", "result": "1", "level": "x"}', r"column 'level' do not make a column"),
        ('{"question": "a\\ud800", "result": "1"}', r"column 'prompt' do not make a column"),
        ('{"question": "a", "result": "1", "answer": ""}', r"the column 'answer' would be hidden"),
    ],
)
def test_a_bad_row_is_an_error_that_says_where(write, line, message):
    # The second line is empty: lines are counted as an editor does.
    path = write([ROWS[0], "", line, ROWS[1]])
    with pytest.raises(ValueError, match=message):
        files(path).train()


def test_a_column_that_is_not_there_is_an_error_with_the_near_one(write):
    path = write(ROWS)
    with pytest.raises(ValueError, match=r"no column 'questionn', it has .*mean 'question'\?"):
        files(path, prompt_column="questionn").train()
    with pytest.raises(ValueError, match=r"prompts.jsonl has no column 'zzz', it has \["):
        files(path, answer_column="zzz").train()


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_an_empty_file_is_refused(write, lines):
    with pytest.raises(ValueError, match=r"prompts\.jsonl has no rows"):
        files(write(lines)).train()


def test_other_files_are_refused(write, tmp_path):
    with pytest.raises(ValueError, match=r"prompts.csv must end in one of \['.jsonl', '.parquet'"):
        files(write(["a"], "prompts.csv")).train()
    with pytest.raises(ValueError, match=r"prompts.parquet is not a Parquet file"):
        files(write(["a"], "prompts.parquet")).train()
    with pytest.raises(ValueError, match=r"^train_file: there is no file .*none\.jsonl; give a"):
        files(str(tmp_path / "none.jsonl")).train()
    with pytest.raises(ValueError, match=r"^held_out_file: there is no file .*none\.parquet; give"):
        files(
            write(ROWS), held_out_file=str(tmp_path / "none.parquet"), held_out_fraction=None
        ).held_out()


def test_a_tenth_is_held_out_where_nothing_is_said_of_it(write):
    """By hand: of 10 different prompts one."""
    task = DataFiles(train_file=write(ROWS), prompt_column="question", answer_column="result")
    assert [len(task.train()), len(task.held_out())] == [9, 1]


def test_there_is_one_way_to_the_held_out_prompts(write):
    with pytest.raises(ValueError, match=r"held_out_file is 'b.jsonl' and held_out_fraction is 0"):
        DataFiles(train_file="a.jsonl", held_out_file="b.jsonl", held_out_fraction=0.1)
    with pytest.raises(ValueError, match=r"held_out_fraction 0.01 of 10 different prompts"):
        files(write(ROWS), held_out_fraction=0.01).train()


@pytest.mark.parametrize("line", ["[" * 100_000, "9" * 5_000], ids=["too deep", "too long"])
def test_json_that_python_does_not_read_is_named(write, line):
    with pytest.raises(ValueError, match=r"prompts.jsonl, line 2 is not JSON"):
        files(write([ROWS[0], line])).train()
