"""Plans beside published and own measurements; sweeps of accuracy.

data/ has the rows: what others measured and how their steps were set up, each file with its source,
the steps that are measured or searched here, and plans as they were made last. `pages` reads rows
and writes the generated parts of pages, `comparison` keeps plans and says how far they are off. A
module of a source has only what no row can say, such as a model of its own.

- `python -m benchmarks.peaks`: published peaks of memory, Qwen's and torchtitan's steps
  (docs/accuracy.md)
- `python -m benchmarks.published_times`: published times (docs/gpu-time.md); `timm_steps`,
  `fit_gpu_times`, `fit_gpu_steps` and `keep_times` fit the constants
- `measured_steps`, `gpu_models`: steps measured on this machine (`make proof`, `make record`);
  `gpu_models_table`, `gpu_seconds`: their plans
- `programs`: other people's programs; `sweeps`: accuracies; `layout_searches`, `techniques`: what
  lessons and pages show of plans
- `python -m benchmarks`: how long the command takes
"""
