"""Programs that are not planned: one sentence with the line and what to do."""

from pathlib import Path

import pytest

from tests.script import HEAD, LOOP, run
from tight_fit.script.program import ProgramFailed, Refused
from tight_fit.script.ranks import ProgramRank

ROOT = Path(__file__).parents[2]
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
# More in tests/attack/test_programs.py. {name: (program, what is said)}
REFUSED = {
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


def one_sentence(error):
    said = str(error.value)
    assert "\n" not in said and len(said) < 400 and "mpi4py" not in said, said
    return said


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_in_one_sentence_with_its_line(name, program):
    if name == "DeepSpeed":
        pytest.importorskip("deepspeed")
    text, says = REFUSED[name]
    with pytest.raises(Refused, match=says) as error:
        run(program(text))
    assert one_sentence(error).endswith(".")


RANK = "import torch.distributed as dist\n{}\ndist.init_process_group('nccl')\n"
FAILED = {
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


@pytest.mark.parametrize("name", FAILED)
def test_a_failure_that_is_known_names_its_remedy(name, program):
    text, says = FAILED[name]
    with pytest.raises(ProgramFailed, match=says) as error:
        run(program(text))
    one_sentence(error)


def test_a_program_that_fails_shows_its_own_lines(program):
    with pytest.raises(ProgramFailed, match="before its first step: NameError") as error:
        run(program(f"{HEAD}def main():\n    return undefined\nmain()\n"))
    assert error.value.lines == [
        "train.py:8 in <module>: main()",
        "train.py:7 in main: return undefined",
    ]


def test_ranks_that_are_not_planned_are_refused_with_a_way_on(program, tmp_path):
    rank = ProgramRank(1, 2)
    sharding = program("""\
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
""")
    with pytest.raises(Refused, match=r"^train.py:5: .*FSDP plugin.*--layout fsdp=2.*fully_shard"):
        run(sharding, rank=rank)
    with pytest.raises(Refused, match=r"pipeline.py:\d+: the program receives objects of another"):
        run(str(ROOT / "scripts" / "pipeline.py"), rank=rank)
