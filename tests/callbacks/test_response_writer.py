"""The responses of `predict` in a file."""

import json

from lit_rl.callbacks import ResponseWriter


def test_one_line_per_response_in_order(fit, tiny_module, tmp_path, capsys):
    fit(tiny_module(), ResponseWriter(), predict=True)
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": f"{row}>", "response": "a\nb", "length": 2} for row in range(3)]
    assert f"responses: {tmp_path}/predictions.jsonl\n" in capsys.readouterr().out


def test_a_second_prediction_replaces_the_first(fit, tiny_module, tmp_path):
    for _ in range(2):
        fit(tiny_module(), ResponseWriter(), predict=True)
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == 3


def test_each_of_several_ranks_has_its_own_file(trainer, tiny_module, tmp_path, monkeypatch):
    monkeypatch.setattr(type(trainer), "world_size", 2)
    monkeypatch.setattr(type(trainer), "global_rank", 1)
    writer, module = ResponseWriter(), tiny_module()
    writer.setup(trainer, module, "predict")
    writer.on_predict_start(trainer, module)
    writer.write_on_batch_end(trainer, module, [{"response": "x"}], None, None, 0, 0)
    assert (tmp_path / "predictions-rank1.jsonl").read_text() == '{"response": "x"}\n'


def test_training_leaves_no_file(fit, tiny_module, tmp_path):
    fit(tiny_module(), ResponseWriter(), iterations=1)
    assert not (tmp_path / "predictions.jsonl").exists()


def test_a_response_defaces_neither_file_nor_terminal_and_names_no_file(
    trainer, tiny_module, tmp_path, capsys
):
    texts = ["\x1b[2J\x1b]0;title\x07[bold]", "\u2028\u202e\r\n", "../../made", "\ud800<script>"]
    writer, module = ResponseWriter(), tiny_module()
    writer.setup(trainer, module, "predict")
    writer.on_predict_start(trainer, module)
    rows = [{"response": text} for text in texts]
    writer.write_on_batch_end(trainer, module, rows, None, None, 0, 0)
    writer.on_predict_end(trainer, module)
    lines = (tmp_path / "predictions.jsonl").read_bytes().decode("ascii").splitlines()
    assert [json.loads(line)["response"] for line in lines] == texts
    assert all(line.isprintable() for line in lines)
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.jsonl"]
    assert capsys.readouterr().out == f"responses: {tmp_path}/predictions.jsonl\n"
