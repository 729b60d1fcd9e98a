"""Programs that are not planned: one sentence with the line and what to do."""

import re
from pathlib import Path

import pytest

from tests.script import HEAD, LOOP
from tight_fit.command import script as command

FORWARD = "    optimizer.zero_grad()\n"  # a line of the loop in whose place another may stand
BEFORE = "for step"
TRAINER = """\
import torch
from transformers import Trainer, TrainingArguments
args = TrainingArguments('out', max_steps=2, report_to=[], {})
Trainer(torch.nn.Linear(8, 8), args, train_dataset=[{{'x': torch.ones(8)}}] * 8).train()
"""
DEEPSPEED = (
    "deepspeed={'zero_optimization': {'stage': 2}, 'train_micro_batch_size_per_gpu': 'auto'}"
)
REFUSED = {  # {name: (program, what is said)}
    "nothing": ("", "no training to plan"),
    "an exit": ("import sys; sys.exit(0)", "no training to plan"),
    "a question": ("input()", "asks for input"),
    "a process": ("import os; os.fork()", "processes of its own"),
    "on the CPU": (
        "import torch\nw = torch.ones(2, requires_grad=True)\no = torch.optim.SGD([w], lr=1.0)\n"
        "for _ in range(3):\n    w.sum().backward(); o.step(); o.zero_grad()",
        "puts nothing on the GPU",
    ),
    "only evaluates": (f"{HEAD}model(torch.rand(2, 256).to(device))\n", "without a step"),
    "spawns processes": (
        f"{HEAD}import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n",
        "train.py:7: the program starts processes",
    ),
    "joins a group": (
        f"{HEAD}torch.distributed.init_process_group('nccl')\n",
        "train.py:6: the program joins a group",
    ),
    "routes by values": (
        LOOP.replace(FORWARD, "    rows = model.weight[model.weight[0] > 0]\n"),
        "train.py:8: the shape of what",
    ),
    "needs a gated model": (
        "class GatedRepoError(OSError): pass\nraise GatedRepoError('401 for url')\n",
        "train.py:2 needs a gated model",
    ),
    "needs what is on no disk": (
        "from transformers import AutoModel\nAutoModel.from_pretrained('nobody/nothing')\n",
        "train.py:2 needs what the hub's cache does not hold here",
    ),
    "two GPUs": (
        LOOP.replace(BEFORE, "other = nn.Linear(8, 8).to('cuda:1')\nfor step"),
        "train.py:6: the program uses cuda:1 beside cuda:0",
    ),
    "two GPUs of one data parallel": (
        LOOP.replace(BEFORE, "model = nn.DataParallel(model, [0, 1])\nfor step"),
        "train.py:6: the program lays nn.DataParallel over 2 GPUs",
    ),
    "a CUDA graph": (
        LOOP.replace(BEFORE, "graph = torch.cuda.CUDAGraph()\nfor step"),
        "train.py:6: the program records a CUDA graph",
    ),
    # Their lengths are data, and no parameter decides them.
    "packed sequences": (
        f"{HEAD}lstm = nn.LSTM(8, 8, batch_first=True).cuda()\n"
        "pack = nn.utils.rnn.pack_padded_sequence\n"
        "lstm(pack(torch.rand(2, 5, 8).cuda(), torch.tensor([5, 3]), batch_first=True))\n",
        "train.py:8: pack_padded_sequence is not planned: let",
    ),
    # Not that mpi4py is missing: DeepSpeed looks for it where no launcher has set ranks.
    "DeepSpeed": (TRAINER.format(DEEPSPEED), r"train\.py:\d starts DeepSpeed.*--layout fsdp=N"),
}


RANK = "import torch.distributed as dist\n{}\ndist.init_process_group('nccl')\n"
FAILED = {
    "a status": ("import sys; sys.exit(3)", "exited with 3"),
    "an interrupt": ("raise KeyboardInterrupt", "was interrupted"),
    "a death": ("import os; os._exit(0)", "without an answer"),
    "no such module": ("import nosuchmodule", "nosuchmodule"),
    "fp16 gradients": (
        f"{HEAD}model.half()\nscaler = torch.amp.GradScaler()\n"
        "loss = model(torch.rand(8, 256, device=device).half()).square().mean()\n"
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n",
        "Keep the trained weights in fp32",
    ),
    "nothing trains": (
        LOOP.replace(BEFORE, "model.requires_grad_(False)\nfor step"),
        r"model.enable_input_require_grads\(\)",
    ),
    "FSDP of Trainer": (
        TRAINER.format("fsdp='full_shard'"),
        "distributed training.*--layout fsdp=N",
    ),
    "a rank": (
        RANK.format("import os; os.environ['LOCAL_RANK']"),
        "plan one of its ranks with --ranks",
    ),
    "a rank that ends": (
        RANK.format("import os; os.environ['RANK']; exit(2)"),
        "plan one of its ranks with --ranks",
    ),
    "an error without words": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError('no')\nraise Odd\n",
        r"Odd: \(its text could not be made\)",
    ),
}


@pytest.mark.parametrize("name", [*REFUSED, *FAILED])
def test_what_cannot_be_planned_is_one_sentence_with_its_line_or_remedy(name, program, capfd):
    if name == "DeepSpeed":
        pytest.importorskip("deepspeed")
    text, says = (REFUSED | FAILED)[name]
    path = Path(program(text))
    status = command.main([str(path), "--gpu", "T4", "--quick"])
    assert status == (command.REFUSED if name in REFUSED else command.FAILED)
    told = capfd.readouterr()
    said = told.err.splitlines()[0]
    assert re.search(says, said) and len(said) < 400, told
    assert name == "DeepSpeed" or not told.out  # which warns by itself
    assert "mpi4py" not in said and "helpers" not in told.err
    assert [*Path().iterdir()] == [path]


def test_a_program_that_fails_shows_its_own_lines(program, capsys):
    path = program(f"{HEAD}def main():\n    return undefined\nmain()\n")
    assert command.main([path, "--gpu", "T4"]) == command.FAILED
    said, *lines = capsys.readouterr().err.splitlines()
    assert "before its first step: NameError" in said
    assert lines == ["  train.py:8 in <module>: main()", "  train.py:7 in main: return undefined"]
