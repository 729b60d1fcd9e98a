"""What the notebooks of Tight Fit share: recipes, data, models, the loop, the planner, measurement, records, pictures."""

import logging

# bitsandbytes warns, when imported, that it looked for a kernel of 4-bit products on some CPUs; nothing here needs it.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
