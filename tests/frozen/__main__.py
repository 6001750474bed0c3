"""Write the files of this folder, or say what has changed in them; the package says how."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.frozen import features, names, verdicts
from tests.frozen.files import FOLDER, ROOT, read, record, write

MOST = 0.08
"""Share of the verdicts that may change from same to refused."""


def write_verdicts(tests: list[str]) -> None:
    """Run some of the tests, or all of them, and write the rows that they make."""
    found = record(tests or verdicts.TESTS)
    if wrong := {row: text for row, text in found.items() if verdicts.word(text) == "wrong"}:
        sys.exit(f"Not written, because no verdict may be wrong: {json.dumps(wrong, indent=1)}")
    if not tests and (others := read("verdicts").keys() - found.keys()):
        print("No test made these rows. Delete those of cases that are gone:", *sorted(others), sep="\n  ")
    write("verdicts", {**read("verdicts"), **found})


def write_names_and_features() -> None:
    for file, now in names.FILES.items():
        write(file, now())
    if worse := features.worse(read("features"), features.now()):
        sys.exit(f"features.json is as before, because these became worse: {json.dumps(worse, indent=1)}")
    write("features", features.now())


def since(commit: str) -> None:
    """Print every entry that was changed or removed after the commit, and check the share of refusals."""
    for file in (*names.FILES, "features", "verdicts"):
        path = (FOLDER / f"{file}.json").relative_to(ROOT)
        text = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, check=True)
        before, now = json.loads(text.stdout), read(file)
        changed = {key: now.get(key, "removed") for key, value in before.items() if now.get(key) != value}
        print(f"{file}: {len(changed)} of {len(before)} entries changed")
        if file == "verdicts":
            of = {key: (verdicts.word(before[key]), verdicts.word(text)) for key, text in changed.items()}
            changed = {key: text for key, text in changed.items() if of[key][0] == "same" != of[key][1]}
            share = len(changed) / len(before)
            print(f"same numbers before, and not now: {len(changed)}, {share:.1%}")
        for key, text in changed.items():
            print(f"  {key}: {text}")
    if share > MOST:
        sys.exit(f"More than {MOST:.0%} of the verdicts changed from same numbers to a refusal.")


match sys.argv[1:]:
    case []:
        write_names_and_features()
    case ["numbers"]:
        write("numbers", record(["tests/frozen", "-k", "five_steps"]))
    case ["verdicts", *tests]:
        write_verdicts(tests)
    case ["since", commit]:
        since(commit)
    case _:
        sys.exit("Usage: see tests/frozen/__init__.py")
