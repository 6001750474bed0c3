"""Writes every generated page anew."""

from tests.site.pages import ROOT
from tests.site.written import pages

for path, text in pages().items():
    (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / path).write_text(text, encoding="utf-8")
