"""The settings of a run, each declared once.

Configuration files, flags, the environment, what workers are told, defaults and the tables in ``docs/`` follow from
this table. Imports neither torch nor pydantic, because every worker reads it first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.config import kinds
from lockstep.config.checks import (
    ELASTIC_RESTARTS,
    KUBERNETES_KINDS,
    MAX_ACCUMULATION_STEPS,
    MAX_MACHINES,
    MAX_PORT,
    MAX_PROCESSES,
    MAX_RESTARTS,
    MAX_THREADS,
)
from lockstep.config.enums import CPUBackend, PrecisionType
from lockstep.config.kinds import ValueKind


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: Its key in files.
        kind: What its values are.
        help: What its flag does, in a sentence; "": it has none. ``{default}`` stands for the default.
        flags: The words of the flag, the first plain one as people are shown it.
        default: What holds where nobody says it; None: what ``help`` says, or nothing.
        argument: The argument of ``Accelerator`` by which workers take it; "": the launcher alone needs it.
        variables: Environment variables that say it; of several the first wins.
        is_for_launcher: Whether the launcher itself needs it, and so its default.
        is_in_files: Whether files may say it; else it is a flag or variable only.
        is_in_other_files: Whether those of DeepSpeed and Accelerate say it too, so that both must agree.
        is_repeated: Whether its flag may be given several times.
        note: What the table of keys in the documentation says of its values, if more than its kind does.
    """

    name: str
    kind: ValueKind
    help: str = ""
    flags: str = ""
    default: Any = None
    argument: str = ""
    variables: tuple[str, ...] = ()
    is_for_launcher: bool = True
    is_in_files: bool = True
    is_in_other_files: bool = False
    is_repeated: bool = False
    note: str = ""

    @property
    def meaning(self) -> str:
        """The help, with the default."""
        default = self.default
        number = f"{default:g}" if isinstance(default, float) else str(default)
        return self.help.replace("{default}", ("no", "yes")[default] if isinstance(default, bool) else number)

    @property
    def values(self) -> str:
        """What its values are, for the documentation; "": a flag's help says it."""
        return (self.note or self.kind.values) if self.is_in_files else ""

    @property
    def flag(self) -> str:
        """The word of the flag that people are shown; of ``--watch/--no-watch`` the first."""
        return next(word for word in self.flags.split() if word.startswith("--")).partition("/")[0]

    @property
    def off_flag(self) -> str:
        """The word that turns it off, of those that are on by default."""
        return self.flags.partition("/")[2]

    @property
    def variable(self) -> str:
        """The environment variable by which processes of a launch get it."""
        return self.variables[0]


def _flag(name: str, kind: ValueKind, help: str, flags: str) -> Setting:
    """Return what only the command line says."""
    return Setting(name, kind, help, flags, is_in_files=False)


def _worker(
    name: str,
    kind: ValueKind,
    variables: str,
    help: str = "",
    flags: str = "",
    argument: str = "",
    **other: Any,
) -> Setting:
    """Return what only workers need."""
    names = tuple(variables.split())
    return Setting(
        name, kind, help, flags, argument=argument or name, variables=names, is_for_launcher=False, **other
    )


_STEPS = kinds.integer(1, MAX_ACCUMULATION_STEPS)
_PROCESSES = kinds.integer(1, MAX_PROCESSES)
_MACHINES = kinds.integer(1, MAX_MACHINES)

TOPICS: dict[str, tuple[Setting, ...]] = {
    "What runs": (
        _flag("module", kinds.SWITCH, "SCRIPT is a module, as in python -m.", "-m --module"),
        _flag("no_python", kinds.SWITCH, "SCRIPT is any program, run without python.", "--no-python"),
        _flag("as_accelerate", kinds.SWITCH, "In SCRIPT, `import accelerate` gives Lockstep.", "--as-accelerate"),
        _flag("config_file", kinds.FILE,
              "YAML, in Lockstep's or Accelerate's form (default: the one that `lockstep config` wrote).",
              "--config-file"),
        _flag("dry_run", kinds.SWITCH, "Print what would run, and run nothing.", "--dry-run"),
    ),
    "Processes of a machine": (
        _flag("nproc", _PROCESSES, "Processes on each machine.", "--nproc --nproc-per-node --num-gpus"),
        Setting("num_processes", _PROCESSES, "Processes over all machines.", "--num-processes"),
        Setting("num_cpu_threads_per_process", kinds.integer(1, MAX_THREADS),
                "Threads of each process (default: cores / processes).",
                "--num-cpu-threads --num-cpu-threads-per-process", variables=("OMP_NUM_THREADS",)),
        _worker("use_cpu", kinds.SWITCH, "LOCKSTEP_USE_CPU ACCELERATE_USE_CPU",
                "Train on CPUs only.", "--cpu --use-cpu", argument="cpu", default=False),
        _flag("multi_gpu", kinds.SWITCH, "Train on this machine's GPUs.", "--multi-gpu"),
        Setting("gpu_ids", kinds.GPUS, "GPUs to use: 'all' or numbers such as 0,1.", "--gpu-ids"),
        _worker("enable_cpu_affinity", kinds.SWITCH, "LOCKSTEP_CPU_AFFINITY ACCELERATE_CPU_AFFINITY",
                "Run each process on the cores beside its GPU.", "--enable-cpu-affinity",
                argument="cpu_affinity", default=False),
        _worker("backend", kinds.one_of(*(one.value for one in CPUBackend)), "LOCKSTEP_BACKEND",
                "How processes on CPUs communicate: shm (shared memory on one host; default) or gloo.", "--backend"),
        Setting("role", kinds.WORD, "The value of ROLE_NAME in the processes.", "--role", "default"),
    ),
    "Training": (
        _worker("mixed_precision", kinds.PRECISION, "LOCKSTEP_MIXED_PRECISION ACCELERATE_MIXED_PRECISION",
                "Precision of autocast.", "--mixed-precision", default=PrecisionType.NO),
        _worker("fp8_pad_inner_dim", kinds.SWITCH, "ACCELERATE_FP8_PAD_INNER_DIM", is_in_other_files=True,
                note=f"{kinds.SWITCH.values}: whether fp8 pads sizes that 16 does not divide; read by "
                     "`AORecipeKwargs`"),
        _worker("gradient_accumulation_steps", _STEPS,
                "LOCKSTEP_GRADIENT_ACCUMULATION_STEPS ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
                "Micro-batches in a step.", "--gradient-accumulation-steps", default=1, is_in_other_files=True),
        _worker("parallel", kinds.PARALLEL, "LOCKSTEP_PARALLEL",
                "How models are divided over processes, such as 'zero=3 activation=full'.", "--parallel",
                note="a line such as `zero=3 activation=full`, or a section"),
        _worker("gradient_clipping", kinds.NORM, "LOCKSTEP_GRADIENT_CLIPPING ACCELERATE_GRADIENT_CLIPPING",
                "Clip gradients to this norm at each step.", "--gradient-clipping", is_in_other_files=True),
        _worker("micro_batch_size", _STEPS, "LOCKSTEP_MICRO_BATCH_SIZE", is_in_other_files=True,
                note="number of rows that a batch of each process must have"),
        _worker("optimizer", kinds.OPTIMIZER, "LOCKSTEP_OPTIMIZER", is_in_other_files=True,
                note="`type` and `params` of the optimizer, for a script that leaves it to the file"),
        _worker("scheduler", kinds.SCHEDULER, "LOCKSTEP_SCHEDULER", is_in_other_files=True,
                note="the same for the schedule"),
        _worker("grad_scaler", kinds.GRAD_SCALER, "LOCKSTEP_GRAD_SCALER",
                note=f"{kinds.GRAD_SCALER.values} of fp16"),
        _worker("deepspeed_config_file", kinds.READABLE_FILE,
                "LOCKSTEP_DEEPSPEED_CONFIG_FILE ACCELERATE_DEEPSPEED_CONFIG_FILE",
                "Read sharding settings from this DeepSpeed JSON. A flag that contradicts it is an error.",
                "--deepspeed-config-file",
                is_in_other_files=True, note="path of a DeepSpeed JSON"),
        _worker("dynamo_backend", kinds.COMPILER, "LOCKSTEP_DYNAMO_BACKEND ACCELERATE_DYNAMO_BACKEND",
                "Compile models with this backend of torch.compile, such as inductor.", "--dynamo-backend",
                default="no", is_in_other_files=True),
        _worker("dynamo_mode", kinds.COMPILE_MODE, "LOCKSTEP_DYNAMO_MODE ACCELERATE_DYNAMO_MODE",
                "The mode of torch.compile.", "--dynamo-mode", is_in_other_files=True),
        _worker("dynamo_use_fullgraph", kinds.SWITCH,
                "LOCKSTEP_DYNAMO_USE_FULLGRAPH ACCELERATE_DYNAMO_USE_FULLGRAPH",
                "Fail if a model does not compile to one graph.", "--dynamo-use-fullgraph",
                is_in_other_files=True),
        _worker("dynamo_use_dynamic", kinds.SWITCH, "LOCKSTEP_DYNAMO_USE_DYNAMIC ACCELERATE_DYNAMO_USE_DYNAMIC",
                "Compile with dynamic shapes (torch.compile(dynamic=True)).", "--dynamo-use-dynamic",
                is_in_other_files=True),
        _worker("dynamo_use_regional_compilation", kinds.SWITCH,
                "LOCKSTEP_DYNAMO_USE_REGIONAL_COMPILATION ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
                "Compile repeated blocks one by one.", "--dynamo-use-regional-compilation",
                is_in_other_files=True),
    ),
    "Several machines, one command on each": (
        Setting("num_machines", kinds.MACHINES, "Number of machines; with MIN:MAX they may leave and join.",
                "--nnodes --num-machines --num-nodes", 1, note='a number, or `"1:4"`'),
        Setting("min_machines", _MACHINES, note="the least, where machines may leave and join"),
        _flag("rdzv", kinds.ENDPOINT,
              "Where the machines meet: an address of one of them, and a free port there.",
              "--rdzv --rdzv-endpoint"),
        Setting("machine_rank", kinds.integer(0, MAX_MACHINES - 1),
                "This machine's number, from 0 (default: in the order of arrival).", "--node-rank --machine-rank"),
        Setting("main_process_ip", kinds.HOST, "Address of the machine with rank 0.",
                "--main-process-ip --master-addr"),
        Setting("main_process_port", kinds.integer(0, MAX_PORT),
                "Port there (one machine: a free one by default).", "--main-process-port --master-port"),
        Setting("rdzv_backend", kinds.one_of("static", "c10d"),
                "Machines are numbered by --node-rank (static) or in the order of arrival (c10d).", "--rdzv-backend",
                "static"),
        Setting("rdzv_conf", kinds.RENDEZVOUS,
                "Seconds to wait: join_timeout=N for all machines, last_call_timeout=N for further ones, "
                "heartbeat_timeout=N for a word of a machine that has joined.",
                "--rdzv-conf", note="a section such as `{join_timeout: 900}`"),
        Setting("interface", kinds.INTERFACE,
                "Network interface between machines (default: the one that reaches --rdzv).",
                "--interface"),
        Setting("secret_file", kinds.FILE,
                "File with the secret that the machines share (default: LOCKSTEP_SECRET, or the user's own).",
                "--secret-file"),
    ),
    "Several machines, one command for all": (
        Setting("hosts", kinds.HOSTS, "Machines to reach by ssh, such as a,me@b:8 (8 processes on b).", "--hosts",
                note="`a,b:8`, or a list"),
        Setting("hostfile", kinds.FILE, "The same, from a file with lines such as: host1 slots=8.", "--hostfile",
                is_in_other_files=True),
        Setting("slurm", kinds.SWITCH, "Start by Slurm: srun inside an allocation, otherwise sbatch.", "--slurm",
                is_in_other_files=True),
        Setting("slurm_options", kinds.PAIRS, "A long option of srun or sbatch: partition=gpu.",
                "--slurm-option", is_repeated=True, note="a section such as `{partition: gpu}`"),
        Setting("mpi", kinds.SWITCH, "Start by mpirun (Open MPI) on --hosts or --hostfile.", "--mpi",
                is_in_other_files=True),
        Setting("ray", kinds.SWITCH, "Start on a Ray cluster. Needs the package ray.", "--ray"),
        Setting("k8s", kinds.one_of(*KUBERNETES_KINDS), "Write Kubernetes manifests of this kind.", "--k8s"),
        Setting("k8s_options", kinds.PAIRS, "An option of the manifests, such as image=NAME.", "--k8s-option",
                is_repeated=True,
                note="a section such as `{image: registry/train:1}`"),
        _flag("output", kinds.FILE, "File for the manifests.", "-o --output"),
        Setting("forward_env", kinds.NAMES, "A further environment variable to send to other machines.",
                "--forward-env", is_repeated=True, note="a list of names"),
    ),
    "Failures": (
        Setting("max_restarts", kinds.integer(0, MAX_RESTARTS),
                f"Restarts after a failure (default: 0; with --nnodes MIN:MAX {ELASTIC_RESTARTS}).", "--max-restarts"),
        Setting("warm_restarts", kinds.SWITCH,
                "Start workers as forks of a process that has imported torch (default: {default}).",
                "--warm-restarts/--no-warm-restarts", False),
        Setting("hang_timeout", kinds.SECONDS, "How long a hang may last (default: {default}).", "--hang-timeout",
                300.0),
        Setting("grace", kinds.SECONDS, "Time from a stop signal to SIGKILL (default: {default}).", "--grace", 30.0,
                argument="grace", variables=("LOCKSTEP_GRACE",)),
        Setting("monitor_interval", kinds.INTERVAL, "Seconds between two checks of the processes (default: {default}).",
                "--monitor-interval", 0.1),
        Setting("watch", kinds.SWITCH, "Watch the workers for hangs (default: {default}).", "--watch/--no-watch", True,
                argument="watch", variables=("LOCKSTEP_WATCH",)),
        Setting("debug", kinds.SWITCH, "Set TORCH_DISTRIBUTED_DEBUG=DETAIL.", "--debug", False),
    ),
    "Output": (
        _worker("run_dir", kinds.FOLDER, "LOCKSTEP_RUN_DIR",
                "Folder for the measures of the run, or 'no' (default: run in the project_dir).", "--run-dir",
                note="a folder, or `no`"),
        _flag("log_dir", kinds.FOLDER, "Write each rank's output to rank-N.out and rank-N.err here.", "--log-dir"),
        _flag("tee", kinds.SWITCH, "With --log-dir: show the output as well.", "-t --tee"),
        _flag("quiet", kinds.SWITCH, "Show no line of progress below the output.", "-q --quiet"),
    ),
}  # fmt: skip
"""All settings, by the topic under which help shows them."""

DECLARED = {one.name: one for settings in TOPICS.values() for one in settings}
SETTINGS = {name: one for name, one in DECLARED.items() if one.is_in_files or one.argument}
"""Those of a run: everything but what the command line alone says."""

THREADS_VARIABLE = SETTINGS["num_cpu_threads_per_process"].variable

IN_FILES = {name: one for name, one in SETTINGS.items() if one.is_in_files}
OF_WORKERS = {one.argument: one for one in SETTINGS.values() if one.argument}
"""Argument of ``Accelerator`` -> the setting."""

IN_OTHER_FILES = tuple(name for name, one in SETTINGS.items() if one.is_in_other_files)
REACHING_MACHINES = ("hostfile", "slurm", "mpi")
"""Of these the ones that say how machines are reached."""
