"""What random inputs may miss: each text of each table by itself, and each hostile file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tests.config.fuzzing.commands import (
    CONFIG_FLAGS,
    LAUNCH_FLAGS,
    LAUNCHES,
    SWITCHES,
    value_of,
)
from tests.config.fuzzing.files import HOSTILE_JSON, HOSTILE_YAML, JSON_LEAVES, WRONG_LINES, in_json
from tests.config.fuzzing.lines import WORDS
from tests.config.fuzzing.pools import (
    ACCELERATE,
    ANY,
    DEEPSPEED,
    DEEPSPEED_SAYS,
    FSDP,
    FSDP_SAYS,
    RUN,
    WRONG,
    Input,
    Pool,
    Raw,
)


def raws(pool: Pool) -> Iterator[Raw]:
    yield from pool.good
    yield from (Raw(text, WRONG) for text in pool.bad)


def said(kind: str, pools: Mapping[str, Pool], write: Callable[[Input, str, str], None]) -> Iterator[Input]:
    """An input for each text of each pool; ``write`` puts it into the input."""
    for name, pool in pools.items():
        for raw in {raw.text: raw for raw in raws(pool)}.values():
            given = Input(kind)
            write(given, name, given.settings(name, raw))
            yield given


def in_file(given: Input, name: str, text: str) -> None:
    given.content = f"{name}: {text}\n".encode()


def in_line(given: Input, name: str, text: str) -> None:
    given.argv = [f"{name}={text}"]


def after(*command: str, last: tuple[str, ...] = ()) -> Callable[[Input, str, str], None]:
    def write(given: Input, name: str, text: str) -> None:
        given.argv = [*command, f"--{name.replace('_', '-')}={value_of(Raw(text, ANY))}", *last]

    return write


def section(kind: str, says: Mapping[str, str]) -> Callable[[Input, str, str], None]:
    def write(given: Input, name: str, text: str) -> None:
        given.means = {f"{says.get(key, key)} in {kind}": value for key, value in given.means.items()}
        given.content = f"distributed_type: {kind.upper()}\n{kind}_config:\n  {name}: {text}\n".encode()

    return write


def leaves() -> Iterator[Input]:
    for path, (name, pool) in JSON_LEAVES.items():
        parent, _, leaf = path.rpartition(".")
        for raw in raws(pool):
            given = Input("DeepSpeed JSON")
            given.content = in_json({parent: [f'"{leaf}": {given.settings(name, raw)}']})
            yield given


def hostile() -> Iterator[Input]:
    for text in HOSTILE_YAML:
        yield Input("hostile YAML", text if isinstance(text, bytes) else text.encode(), wrong=True)
    # YAML 1.1 would make 64 of it.
    machines = b"num_machines: 1:4\nmain_process_ip: a\nmain_process_port: 1\n"
    yield Input("YAML", machines, means={"num_machines": 4})
    yield from (Input("damaged JSON", content, wrong=True) for content in HOSTILE_JSON)
    yield from (Input("hostfile", f"first slots=2\n{line}\n".encode(), wrong=True) for line in WRONG_LINES)


def launches() -> Iterator[Input]:
    for line, means in LAUNCHES:
        yield Input("lockstep launch", argv=["launch", "--dry-run", *line.split(), "train.py"], means=means)
    for script in ("missing.py", "", "nul\0", ".", "\x1b[31m"):
        yield Input("lockstep launch", argv=["launch", "--dry-run", "--nproc", "2", script], wrong=True)


def with_values(pools: Mapping[str, Pool]) -> dict[str, Pool]:
    """Without switches, which have no value."""
    return {name: pool for name, pool in pools.items() if name not in SWITCHES}


def stands_alone(given: Input) -> bool:
    """Whether what is right must be accepted too: settings of files need no others, but for machines."""
    return given.kind in ("YAML", "Accelerate's YAML", "DeepSpeed JSON") and not {
        "num_machines",
        "machine_rank",
    } & set(given.means)


def inputs() -> Iterator[Input]:
    yield from said("YAML", RUN, in_file)
    yield from said("Accelerate's YAML", ACCELERATE, in_file)
    yield from said("Accelerate's YAML", FSDP, section("fsdp", FSDP_SAYS))
    yield from said("Accelerate's YAML", DEEPSPEED, section("deepspeed", DEEPSPEED_SAYS))
    yield from leaves()
    yield from hostile()
    yield from launches()
    hosts = b"worker-1 slots=4  # first\r\n\n# comment\n10.0.0.2\tslots=1\nn3.cluster\n"
    yield Input("hostfile", hosts, means={"hosts": {"worker-1": 4, "10.0.0.2": 1, "n3.cluster": None}})
    yield from said("parallel", WORDS, in_line)
    config = ("config", "--yes", "--force", "--config-file", "out.yaml")
    yield from said("lockstep config", with_values(CONFIG_FLAGS), after(*config))
    yield from said(
        "lockstep launch", with_values(LAUNCH_FLAGS), after("launch", "--dry-run", last=("train.py",))
    )
