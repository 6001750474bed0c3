"""Every public name, command, option, key and variable is in the reference. The check notices what is taken out."""

from __future__ import annotations

import inspect
import re

from lockstep import Accelerator
from tests.site import reference


def test_every_public_name_is_in_its_modules_section() -> None:
    page = reference.page("names.md")
    assert reference.undocumented_names(page) == []
    assert reference.unlisted_modules() == []
    assert reference.methods_without_a_sentence() == []
    for name in ("nn.ParallelMLP", "testing.check_parity", "errors.ConfigError", "utils.send_to_device"):
        without = re.sub(rf"^\| \[?`{name.rpartition('.')[2]}`.*\n", "", page, flags=re.MULTILINE)
        assert reference.undocumented_names(without) == [f"lockstep.{name}"]


def test_the_page_of_accelerator_has_the_five_calls_first_and_every_documented_method() -> None:
    page = reference.page("api/Accelerator.md")
    first, *rest = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert "members: [prepare, backward, gather_for_metrics, print]" in first
    shown = re.findall(r"^::: lockstep\.accelerator\.Accelerator\.(\w+)$", "".join(rest), re.MULTILINE)
    documented = {
        name
        for name, value in inspect.getmembers_static(Accelerator)
        if not name.startswith("_") and type(value).__module__ != "lockstep.config.options_view"
        if not isinstance(value, bool | None) and inspect.getdoc(value)
    }
    assert len(shown) == len(set(shown))
    assert documented == {*shown, "prepare", "backward", "gather_for_metrics", "print"}


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
