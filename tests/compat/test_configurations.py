"""The table of other projects' configuration files, and what was mended because of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from cli.calling import call
from lockstep.compat.accelerate import from_yaml
from lockstep.config import parse_yaml

DOCS = Path(__file__).parents[2] / "docs"
TRIED = yaml.safe_load((DOCS / "data" / "configurations.yaml").read_text())


def test_the_docs_count_what_was_tried() -> None:
    text = (DOCS / "migrating-from-accelerate.md").read_text()
    for one in TRIED:
        seen = Counter(row[2] for row in one["files"])
        assert set(seen) <= {"runs", "warned", "refused"}
        counts = [len(one["files"]), seen["runs"], seen["warned"], seen["refused"]]
        assert f"| {one['repository']} | {' | '.join(map(str, counts))} |" in text
    assert f"were tried, {sum(len(one['files']) for one in TRIED)} of them" in text


def test_what_does_not_just_run_has_a_sentence() -> None:
    rows = [row for one in TRIED for row in one["files"]]
    assert [row for row in rows if len(row) != (3 if row[2] == "runs" else 4)] == []
    assert [row for row in rows if "Error" in row[-1] or "Traceback" in row[-1]] == []


def test_several_processes_of_distributed_type_no_are_one_as_in_accelerate() -> None:
    loaded = from_yaml(parse_yaml("distributed_type: 'NO'\nnum_processes: 8\n", "run.yaml"))
    assert loaded.config.num_processes == 1
    assert loaded.warnings == [
        "run.yaml:2: num_processes has no effect: distributed_type is NO. "
        "Set MULTI_CPU or MULTI_GPU for several processes."
    ]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ('"optimizer": {"type": "Muon", "params": {"lr": 0.1}}', "The optimizer Muon is not available"),
        ('"optimizer": {"type": "AdamX"}', "'AdamX' is not known"),
        ('"scheduler": {"type": "OneCycle", "params": {}}', "The schedule OneCycle of DeepSpeed"),
        ('"scheduler": {"type": "Warm", "params": {}}', "'Warm' is not available from a file"),
    ],
)
def test_convert_refuses_what_a_run_refuses(
    section: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(f'{{"train_micro_batch_size_per_gpu": 1, {section}}}')
    code, out, err = call(capsys, "config", "convert", path, "--ranks", 2)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())


@pytest.mark.parametrize(
    ("line", "processes", "further"),
    [
        ("--standalone --nproc_per_node 2", 2, ""),
        ("--num_gpus 2 --num_nodes 1 --no_local_rank", 2, ""),
        (
            "--nnodes 2 --node_rank 0 --nproc-per-node 4 --rdzv_id 5 --rdzv_endpoint 10.0.0.1:29500",
            8,
            "10.0.0.1",
        ),
        ("--nproc_per_node 2 --role node1: --tee 3 --start_method spawn", 2, "node1:"),
        ("--use_env --nproc_per_node 2", 2, ""),
    ],
)
def test_lines_of_other_launchers_keep_their_words(
    line: str, processes: int, further: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    code, out, _ = call(capsys, "launch", "--cpu", *line.split(), "--dry-run", script)
    assert code == 0
    assert further in out
    total = next(
        text.split()[1] for text in out.splitlines() if text.split()[:1] in (["num_processes"], ["nproc"])
    )
    assert int(total) == processes


@pytest.mark.parametrize("option", ["--include=localhost:0", "--launcher=pdsh", "--bind_cores_to_rank"])
def test_words_of_deepspeeds_launcher_that_mean_nothing_here_are_refused(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    code, _, err = call(capsys, "launch", option, "--dry-run", script)
    assert code == 2
    assert "which is not available. Use --" in err


@pytest.mark.parametrize(
    ("text", "is_said"),
    [
        ('parser.add_argument("--local_rank", type=int)', True),
        ('parser.add_argument("--local-rank", type=int)', True),
        ('parser.add_argument("--local_rank", default=int(os.environ["LOCAL_RANK"]))', False),
        ("", False),
    ],
)
def test_a_script_that_waits_for_local_rank_is_told(
    text: str, is_said: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    code, _, err = call(capsys, "launch", "--cpu", "--nproc", "2", "--dry-run", script)
    assert code == 0
    assert ("os.environ['LOCAL_RANK']" in err) == is_said
