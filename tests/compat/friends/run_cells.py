"""``python run_cells.py trainer/plain trainer/plain/zero=3 ...``: with Accelerate, and by alias."""

import sys

from cell import run

if __name__ == "__main__":
    run(sys.argv[1:])
