"""What must hold while the source changes, as files that a diff shows line by line.

    python -m tests.frozen                  # names.json, accelerate_names.json and features.json
    python -m tests.frozen numbers          # numbers.json: 40 configurations, five steps each
    python -m tests.frozen verdicts         # verdicts.json: runs every odd model and loop (an hour on two cores)
    python -m tests.frozen verdicts tests/parallel/expert      # only the rows of these tests
    python -m tests.frozen since v1.0.0     # which verdicts, names and states have changed since a commit

Tests compare with the files. A change on purpose is a rewritten file, whose diff somebody reads.
"""
