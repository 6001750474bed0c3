"""``python run_scripts.py script ...``: each in a fork of this process, which imports for all of them."""

import os
import runpy
import sys

import accelerate  # noqa: F401
import torch  # noqa: F401

if __name__ == "__main__":
    for script in sys.argv[1:]:
        print("script", os.path.basename(script), flush=True)
        child = os.fork()
        if not child:
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{script} failed")
