"""The options of ``lockstep launch``: one table, by topic, and the command class that shows it so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import click

from lockstep.cli.foreign_flags import FOREIGN_FLAGS, FOREIGN_SWITCHES
from lockstep.cli.integers import IntegerRange
from lockstep.config.checks import (
    KUBERNETES_KINDS,
    MAX_ACCUMULATION_STEPS,
    MAX_MACHINES,
    MAX_PORT,
    MAX_PROCESSES,
    MAX_RESTARTS,
    MAX_THREADS,
)
from lockstep.config.hosts import parse_filter, parse_hosts
from lockstep.config.parallel import Parallel
from lockstep.config.readers import number
from lockstep.config.values import (
    parse_endpoint,
    parse_gpus,
    parse_host,
    parse_interface,
    parse_machines,
    parse_names,
    parse_pairs,
    parse_seconds,
    shown,
)
from lockstep.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

# Accelerate's switches for what does not exist here yet: refused by name, not as unknown
LATER_SWITCHES = {"use_megatron_lm": "Megatron-LM settings", "tpu": "training on TPUs"}


class Checked(click.ParamType):
    """A value read by one of the functions of ``config.values``."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ConfigError as error:
            self.fail(f"{error}.", param, ctx)


def parse_norm(value: Any) -> float:
    """A finite number of at least 0; raises ConfigError."""
    try:
        return number(value, "")
    except ConfigError:
        raise ConfigError(f"{shown(value)} is not a number of at least 0") from None


def parse_path(value: Any) -> str:
    """A path; raises ConfigError for one that is blank."""
    if not str(value).strip():
        raise ConfigError(f"{shown(value)} is not a path")
    return str(value)


def parse_words(value: Any) -> str:
    """The line of ``parallel``; raises ConfigError, also when it has no word."""
    if not str(value).strip():
        raise ConfigError(f"{shown(value)} has no word such as zero=3 or ddp")
    return str(Parallel.parse(value))


class Entry(NamedTuple):
    """One option: its words (the first plain one names it on the command line), type and help.

    ``kind`` None: a switch. ``many``: it may be repeated.
    """

    name: str
    words: str
    kind: Any
    help: str
    many: bool = False

    def option(self) -> click.Option:
        words = [*self.words.split(), self.name]
        if self.kind is None:
            return click.Option(words, is_flag=True, default=None, help=self.help)
        return click.Option(words, type=self.kind, multiple=self.many, help=self.help)


PROCESSES = IntegerRange(1, MAX_PROCESSES)
PORT = IntegerRange(0, MAX_PORT)
PRECISION = click.Choice(["no", "fp16", "bf16"], case_sensitive=False)
HOSTS = Checked("HOSTS", lambda value: ",".join(map(str, parse_hosts(value))))
FILTER = Checked("NAMES", lambda value: "@".join(parse_filter(value)))
FILE, DIRECTORY = Checked("FILE", parse_path), Checked("DIRECTORY", parse_path)
SECONDS = Checked("SECONDS", parse_seconds)
PAIR = Checked("KEY=VALUE", lambda value: next(iter(parse_pairs(value).items())))
NAMES = Checked("NAME", parse_names)
PARALLEL = Checked("WORDS", parse_words)
RESTARTS = IntegerRange(0, MAX_RESTARTS)
NUMBER = IntegerRange(0, MAX_MACHINES - 1)
STEPS = IntegerRange(1, MAX_ACCUMULATION_STEPS)

TOPICS: dict[str, tuple[Entry, ...]] = {
    "What runs": (
        Entry("module", "-m --module", None, "SCRIPT is a module, as in python -m."),
        Entry("no_python", "--no-python", None, "SCRIPT is any program, run without python."),
        Entry("config_file", "--config-file", FILE,
              "YAML, in Lockstep's or Accelerate's form (default: the one that `lockstep config` wrote)."),
        Entry("dry_run", "--dry-run", None, "Print what would run, and run nothing."),
    ),
    "Processes of a machine": (
        Entry("nproc", "--nproc --nproc-per-node", PROCESSES, "Processes on each machine."),
        Entry("num_processes", "--num-processes", PROCESSES, "Processes over all machines."),
        Entry("num_cpu_threads_per_process", "--num-cpu-threads --num-cpu-threads-per-process",
              IntegerRange(1, MAX_THREADS), "Threads of each process (default: cores / processes)."),
        Entry("use_cpu", "--cpu --use-cpu", None, "Train on CPUs only."),
        Entry("multi_gpu", "--multi-gpu", None, "Train on this machine's GPUs."),
        Entry("gpu_ids", "--gpu-ids", Checked("GPUS", parse_gpus), "GPUs to use: 'all' or numbers such as 0,1."),
    ),
    "Training": (
        Entry("mixed_precision", "--mixed-precision", PRECISION, "Precision of autocast."),
        Entry("gradient_accumulation_steps", "--gradient-accumulation-steps", STEPS, "Micro-batches in a step."),
        Entry("parallel", "--parallel", PARALLEL, "How models are spread, such as 'zero=3 activation=full'."),
        Entry("gradient_clipping", "--gradient-clipping", Checked("NORM", parse_norm),
              "Clip gradients to this norm at each step."),
        Entry("deepspeed_config_file", "--deepspeed-config-file", FILE,
              "A DeepSpeed JSON; all other settings must agree with it."),
    ),
    "Several machines, one command on each": (
        Entry("num_machines", "--nnodes --num-machines", Checked("N or MIN:MAX", parse_machines),
              "Number of machines; with MIN:MAX they may leave and join."),
        Entry("rdzv", "--rdzv", Checked("HOST:PORT", parse_endpoint),
              "Where the machines meet: an address of one of them, and a free port there."),
        Entry("machine_rank", "--node-rank --machine-rank", NUMBER,
              "This machine's number, from 0 (default: as they arrive)."),
        Entry("main_process_ip", "--main-process-ip --master-addr", Checked("HOST", parse_host),
              "Address of the machine with rank 0."),
        Entry("main_process_port", "--main-process-port --master-port", PORT,
              "Port there (one machine: a free one by default)."),
        Entry("rdzv_backend", "--rdzv-backend", click.Choice(["static", "c10d"]),
              "Machines are numbered by --node-rank (static) or as they arrive (c10d)."),
        Entry("interface", "--interface", Checked("NAME", parse_interface),
              "Network interface for what passes between machines (default: the one towards --rdzv)."),
        Entry("secret_file", "--secret-file", FILE,
              "File with the secret that the machines share (default: LOCKSTEP_SECRET, or the user's own)."),
    ),
    "Several machines, one command for all": (
        Entry("hosts", "--hosts", HOSTS, "Machines to reach by ssh, such as a,me@b:8 (8 processes on b)."),
        Entry("hostfile", "--hostfile", FILE, "The same, from a file with lines such as: host1 slots=8."),
        Entry("include_hosts", "--include-hosts", FILTER, "Only these hosts of the list: host1@host2."),
        Entry("exclude_hosts", "--exclude-hosts", FILTER, "All hosts of the list but these."),
        Entry("slurm", "--slurm", None, "srun inside an allocation, else sbatch."),
        Entry("slurm_options", "--slurm-option", PAIR, "A long option of srun or sbatch: partition=gpu.", True),
        Entry("mpi", "--mpi", None, "mpirun (Open MPI); --hosts or --hostfile say where."),
        Entry("ray", "--ray", None, "Ray's cluster; needs ray[train]."),
        Entry("k8s", "--k8s", click.Choice(list(KUBERNETES_KINDS)), "Kubernetes: write manifests of this kind."),
        Entry("k8s_options", "--k8s-option", PAIR, "image=, namespace= and others.", True),
        Entry("output", "-o --output", FILE, "File for the manifests."),
        Entry("forward_env", "--forward-env", NAMES, "A further environment variable that travels along.", True),
    ),
    "Failures": (
        Entry("max_restarts", "--max-restarts", RESTARTS,
              "Restarts after a failure (default: 0; with --nnodes MIN:MAX 1000)."),
        Entry("hang_timeout", "--hang-timeout", SECONDS, "How long a hang may last (default: 300)."),
        Entry("grace", "--grace", SECONDS, "From a stop signal to SIGKILL (default: 30)."),
        Entry("watch", "--watch/--no-watch", None, "Watch the workers for hangs (default: yes)."),
        Entry("debug", "--debug", None, "Set TORCH_DISTRIBUTED_DEBUG=DETAIL."),
    ),
    "Output": (
        Entry("log_dir", "--log-dir", DIRECTORY, "Write each rank's output to rank-N.out and rank-N.err here."),
        Entry("tee", "--tee", None, "With --log-dir: show the output as well."),
    ),
}  # fmt: skip

NOT_SETTINGS = frozenset(
    {"module", "no_python", "config_file", "dry_run", "multi_gpu", "rdzv", "output", "log_dir", "tee"}
)
"""Options that are no setting of a run by themselves."""


def dashes(token: str) -> str:
    """Accelerate spells options with underscores: both forms are one."""
    return token.replace("_", "-")


def options() -> list[click.Parameter]:
    """All options, those of Accelerate's command lines hidden."""
    shown: list[click.Parameter] = [entry.option() for entries in TOPICS.values() for entry in entries]
    foreign = [click.Option(["--" + dashes(name), name], type=str, hidden=True) for name in FOREIGN_FLAGS]
    switches = [
        click.Option(["--" + dashes(name), name], is_flag=True, hidden=True)
        for name in (*LATER_SWITCHES, *FOREIGN_SWITCHES)
    ]
    unused = [  # without effect here
        click.Option(["--" + dashes(name), name], is_flag=True, hidden=True, expose_value=False)
        for name in ("same_network", "quiet")
    ]
    return [*shown, *foreign, *switches, *unused]


class LaunchCommand(click.Command):
    """A command whose help shows the options by topic."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        of = {param.name: param for param in self.get_params(ctx)}
        for topic, entries in TOPICS.items():
            rows = [of[entry.name].get_help_record(ctx) for entry in entries]
            with formatter.section(topic):
                formatter.write_dl([row for row in rows if row is not None])
        help_option = self.get_help_option(ctx)
        record = help_option.get_help_record(ctx) if help_option is not None else None
        if record is not None:
            with formatter.section("Help"):
                formatter.write_dl([record])
