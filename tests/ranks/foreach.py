"""Run by test_scripts.py: a script whose AdamW is foreach, as it is by default on CUDA alone."""

import functools
import runpy
import sys

import torch

script = sys.argv.pop(1)
torch.optim.AdamW = functools.partial(torch.optim.AdamW, foreach=True)
runpy.run_path(script, run_name="__main__")
