#!/usr/bin/env bash
# ruff 0.17.6 and pymdown-extensions (PyPI): `ruff format` formats blocks of Python in Markdown. A block that includes a file by
# the notation of pymdownx.snippets, --8<-- "file", is valid Python (a minus, a comparison, a minus), so it is formatted, too,
# and includes nothing any more.
#
# Expected: a line that another tool of Markdown reads stays as it is, or the block is left alone.
# Seen: `--8<-- "part.py"` becomes `--8 < --"part.py"`. The page is built without an error, also with check_paths, and
# shows that line in place of the file. So folders with such pages have to be excluded in ruff's settings.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet ruff==0.17.6 markdown==3.10 pymdown-extensions==10.16.1
cd "$folder"
echo 'print("included")' > part.py
printf '# Page\n\n```python\n--8<-- "part.py"\n```\n' > page.md
cat > build.py <<'PYTHON'
import markdown

settings = {"pymdownx.snippets": {"base_path": ["."], "check_paths": True}}
extensions = ["pymdownx.superfences", "pymdownx.snippets"]
page = markdown.markdown(open("page.md").read(), extensions=extensions, extension_configs=settings)
print("the page has the file" if "included" in page else "the page has no file")
PYTHON
venv/bin/ruff --version
venv/bin/python build.py | tee before
venv/bin/ruff format page.md
cat page.md
venv/bin/python build.py | tee after
grep -q "has the file" before
if ! grep -q "has no file" after; then
  echo "The behaviour has changed: the page still includes its file." >&2
  exit 1
fi
