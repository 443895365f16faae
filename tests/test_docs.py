"""docs/algorithms.md says what the code does: sections, links, defaults, configurations."""

import ast
import inspect
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml

import lit_rl.advantages
import lit_rl.algorithms
import lit_rl.policy_losses
import lit_rl.sampler_corrections
from lit_rl.algorithms import PolicyGradient
from lit_rl.cli import RLCLI

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "algorithms.md"
CONFIGS = ROOT / "configs"
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))
ALGORITHMS = {
    name: kind
    for name, kind in vars(lit_rl.algorithms).items()
    if inspect.isclass(kind) and issubclass(kind, PolicyGradient)
}
# They have no configuration of their own: a section names that of an algorithm.
LOOPS = {"PolicyGradient", "ActorCritic"}
CHOICES = (lit_rl.advantages, lit_rl.policy_losses, lit_rl.sampler_corrections)


def rows(text, column=0):
    """The settings of a text's tables, each with what a column says; the first is lit_rl."""
    lines = re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.M)
    return {name: cells.split(" | ")[column] for name, cells in lines}


def default(kind, name):
    """The default of a constructor's argument, its own or handed on to a base class."""
    for owner in kind.__mro__:
        parameter = inspect.signature(owner.__init__).parameters.get(name)
        if parameter is not None and parameter.default is not parameter.empty:
            return parameter.default
    raise AttributeError(f"{kind.__name__} has no argument {name} with a default")


def says(value, cell):
    """Whether a cell says this default: a number, a class, or a word."""
    try:
        return ast.literal_eval(cell) == value
    except (ValueError, SyntaxError):
        return cell in (value, type(value).__name__)


def own_defaults(kind):
    """The arguments that the class itself gives a default, and the fields of its choices."""
    for parameter in inspect.signature(kind.__init__).parameters.values():
        if parameter.default is parameter.empty or isinstance(parameter.default, type):
            continue
        if parameter.name == "sampling":
            continue  # of its fields a table names the one that the class reads
        yield parameter.name
        if is_dataclass(parameter.default):
            for field in fields(parameter.default):
                yield f"{parameter.name}.{field.name}"


def test_every_algorithm_has_a_section():
    assert len(ALGORITHMS) > 15
    assert ALGORITHMS.keys() <= SECTIONS.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_section_links_to_the_source_and_the_configuration_of_its_class(name):
    links = [
        (PAGE.parent / link).resolve() for link in re.findall(r"\]\((\.\.[^)]+)\)", SECTIONS[name])
    ]
    assert Path(inspect.getfile(ALGORITHMS[name])) in links
    (config, *_) = [link for link in links if link.suffix == ".yaml"]
    class_path = yaml.safe_load(config.read_text())["model"]["class_path"]
    used = getattr(lit_rl.algorithms, class_path.rpartition(".")[2])
    assert used is ALGORITHMS[name] or name in LOOPS
    assert issubclass(used, ALGORITHMS[name])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_defaults_are_those_of_the_signature(name):
    table = rows(SECTIONS[name])
    assert table
    for path, cell in table.items():
        argument, *attributes = path.split(".")
        value = default(ALGORITHMS[name], argument)
        for attribute in attributes:
            value = getattr(value, attribute)
        assert says(value, cell), f"{path} is {value!r}, the page says {cell}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_default_that_a_class_names_is_in_its_table(name):
    assert set(own_defaults(ALGORITHMS[name])) <= rows(SECTIONS[name]).keys()


def test_defaults_of_the_options_are_those_of_their_classes():
    table = rows(SECTIONS["Options"])
    assert len(table) >= 6
    for path, cell in table.items():
        class_name, field = path.split(".")
        (kind,) = {getattr(m, class_name) for m in CHOICES if hasattr(m, class_name)}
        assert says(default(kind, field), cell), path


def settings_of(choices, path=""):
    """The settings of a configuration by their paths; a class stands for itself."""
    for name, value in choices.items():
        if isinstance(value, dict):
            yield path + name, value["class_path"].rpartition(".")[2]
            yield from settings_of(value["init_args"], path=f"{path}{name}.")
        else:
            yield path + name, value.rpartition(".")[2] if isinstance(value, str) else value


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - LOOPS))
def test_what_a_configuration_sets_beside_the_defaults_is_said(name):
    config = re.search(r"\((\.\.\S+\.yaml)\)", SECTIONS[name])[1]
    choices = yaml.safe_load((PAGE.parent / config).read_text())["model"]["init_args"]
    for path, value in settings_of(choices):
        argument, *attributes = path.split(".")
        usual = default(ALGORITHMS[name], argument)
        for attribute in attributes:
            usual = getattr(usual, attribute, value)
        if value not in (usual, type(usual).__name__):
            said = value if isinstance(value, str) else json.dumps(value)
            assert f"`{path}` {said}" in " ".join(SECTIONS[name].split())


@pytest.mark.parametrize(
    ("section", "column", "preset"),
    [("GRPO", 1, "trl"), ("GRPO", 2, "verl"), ("PPO", 2, "verl_ppo")],
)
def test_preset_holds_what_the_page_says_of_its_library(section, column, preset):
    """Numbers of the columns TRL and verl; a word of the page is said of another way there."""
    file = CONFIGS / "compat" / f"{preset}.yaml"
    settings = yaml.safe_load(file.read_text())["model"]["init_args"]
    compared = 0
    for path, cell in rows(SECTIONS[section], column).items():
        argument, *fields_ = path.split(".")
        value = settings.get(argument)
        for field in fields_:
            value = value.get("init_args", {}).get(field) if isinstance(value, dict) else None
        number = re.match(r"[\d.e-]+\b", cell)
        if isinstance(value, float | int) and number:
            assert float(number[0]) == value, path
            compared += 1
    assert compared >= 4


def test_settings_of_the_base_are_those_of_its_file():
    head = PAGE.read_text().partition("\n## ")[0]
    settings = yaml.safe_load((CONFIGS / "base.yaml").read_text())["model"]["init_args"]
    settings["sampling.max_new_tokens"] = settings["sampling"]["max_new_tokens"]
    table = rows(head)
    assert len(table) == 6
    for name, cell in table.items():
        assert says(settings[name], cell), name


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_row_has_as_many_cells_as_its_header():
    """A bar within a cell would move the values of the columns behind it."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


SNIPPETS = re.findall(r"^```yaml\n# after (\S+)\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize(("algorithm", "text"), SNIPPETS)
def test_configuration_of_an_option_is_one(algorithm, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RLCLI, "_run_subcommand", lambda cli, subcommand: None)
    Path("option.yaml").write_text(text)
    files = ["--config", str(ROOT / algorithm), "--config", "option.yaml"]
    model = RLCLI(CONFIGS / "base.yaml", ["fit", *files]).model
    for name, value in yaml.safe_load(text)["model"]["init_args"].items():
        choice = getattr(model, name)
        if isinstance(value, float):
            assert choice == value
        elif isinstance(value, str):
            assert type(choice).__name__ == value.rpartition(".")[2]
        else:
            assert type(choice).__name__ == value["class_path"].rpartition(".")[2]
            for setting, number in value["init_args"].items():
                if isinstance(number, float):
                    assert getattr(choice, setting) == number
