"""Plan the code that people already have: a training script or a notebook cell, unchanged.

`tight_fit.command.script` is `tight-fit script`. The program runs in a process of its own
(`process`), with real data and with parameters that have shapes and no values (`values`,
`libraries`), told of the GPU that was asked for (`gpu_queries`), until its memory has settled
(`steps`). The system isolates it, so that nothing it writes reaches the disk.
"""
