"""Every public name, command, option, key and variable is in the reference. The check notices what is taken out."""

from __future__ import annotations

import re

from tests.site import reference


def test_every_public_name_is_in_its_modules_section() -> None:
    page = reference.page("names.md")
    assert reference.undocumented_names(page) == []
    assert reference.unlisted_modules() == []
    assert reference.methods_without_a_sentence() == []
    for line, name in [
        ("::: lockstep.parallel.tensor.transformer_layers.ParallelMLP\n", "lockstep.nn.ParallelMLP"),
        ("::: lockstep.launch.functions.notebook_launcher\n", "lockstep.notebook_launcher"),
        ("::: lockstep.errors.ConfigError\n", "lockstep.errors.ConfigError"),
    ]:
        assert line in page
        assert reference.undocumented_names(page.replace(line, "")) == [name]
    without = re.sub(r"^\| `send_to_device` .*\n", "", page, flags=re.MULTILINE)
    assert reference.undocumented_names(without) == ["lockstep.utils.send_to_device"]


def test_every_command_and_option_is_in_its_section() -> None:
    page = reference.page("commands.md")
    assert reference.undocumented_options(page) == []
    assert reference.undocumented_options(page.replace("## lockstep top\n", "## top\n")) == ["top"]
    without = page.replace("| `--once` |", "| |")
    assert reference.undocumented_options(without) == ["top --once"]


def test_every_key_of_a_configuration_file_is_there() -> None:
    page = reference.page("configuration.md")
    assert reference.undocumented_keys(page) == []
    assert reference.undocumented_keys(page.replace("`mixed_precision`", "")) == ["mixed_precision"]


def test_every_environment_variable_is_there() -> None:
    page = reference.page("environment.md")
    assert len(reference.variables()) > 50
    assert reference.undocumented_variables(page) == []
    assert reference.undocumented_variables(page.replace("`LOCKSTEP_SECRET`", "")) == ["LOCKSTEP_SECRET"]
    assert "SLURM_PROCID" in reference.undocumented_variables(page.replace("`SLURM_*`", ""))
    assert all(reference.NOT_FOR_USERS.values())
