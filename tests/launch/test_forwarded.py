from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.launch import forwarded, is_forwarded, is_secret, without_secrets
from tests.launch.fakes import CANARY, SECRET_NAMES, canaries
from tests.refusals import expect_refusal

FUZZ = settings(deadline=None)


def test_settings_of_the_libraries_travel_and_nothing_else_does() -> None:
    settings = {
        "OMP_NUM_THREADS",
        "NCCL_DEBUG",
        "GLOO_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "PYTHONPATH",
        "LANG",
    }
    settings |= {"CUDA_VISIBLE_DEVICES", "LOCKSTEP_MIXED_PRECISION", "PATH", "VIRTUAL_ENV"}
    others = {
        "HOME",
        "SSH_AUTH_SOCK",
        "MY_NCCL_DEBUG",
        "EDITOR",
        "LOCKSTEP_CONTROL",
        "LOCKSTEP_CONTROL_FILE",
        "LOCKSTEP_LAUNCH_ID",
        "LOCKSTEP_MEMORY_FOLDER",
        "LOCKSTEP_LAUNCH_FOLDER",
        "RANK",
    }
    environ = dict.fromkeys(settings | others, "x")
    assert set(forwarded(environ)) == settings


def test_no_secret_travels_whatever_its_prefix() -> None:
    assert len(SECRET_NAMES) == 50
    assert forwarded(canaries()) == {}
    assert [name for name in SECRET_NAMES if not is_secret(name)] == []
    assert not is_forwarded("LOCKSTEP_CONTROL_SECRET") and not is_forwarded("LOCKSTEP_SECRET")


@FUZZ
@given(
    st.text(max_size=20),
    st.sampled_from(["TOKEN", "secret", "Key", "PASSWORD", "passwd", "CREDENTIAL"]),
    st.text(max_size=20),
)
def test_a_name_with_a_word_for_secrets_never_travels_by_itself(before: str, word: str, after: str) -> None:
    for prefix in ("LOCKSTEP_", "NCCL_", ""):
        assert not is_forwarded(prefix + before + word + after)


def test_a_named_variable_travels_and_its_value_is_not_shown() -> None:
    environ = {**canaries(), "MY_FLAG": "1"}
    taken = forwarded(environ, ["HF_TOKEN", "MY_FLAG"])
    assert taken == {"HF_TOKEN": environ["HF_TOKEN"], "MY_FLAG": "1"}
    assert without_secrets(taken) == {"HF_TOKEN": "<secret>", "MY_FLAG": "1"}
    assert CANARY not in str(without_secrets(environ))


def test_a_named_variable_that_is_not_set_is_refused() -> None:
    expect_refusal(ConfigError, "ABSENT", forwarded, {}, ["ABSENT"])
