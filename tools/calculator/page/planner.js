"use strict";
/* The plan of a step from its stream, by the rules of tight_fit/memory: what is alive after each
   event, and what PyTorch's caching allocator reserves for it. Sizes are bytes. */
const Planner = (() => {
  const MIB = 2 ** 20, UNIT = 512, SMALL = MIB, SMALL_SEGMENT = 2 * MIB, LARGE_SEGMENT = 20 * MIB;
  const LARGE_TENSOR = 10 * MIB, ROUND = 2 * MIB, MAX_STEPS = 6;
  const STATES = 2, UPDATE = 2, FORWARD = 0;
  const PHASES = ["forward", "backward", "optimizer"];
  const CATEGORIES = ["parameters", "gradients", "optimizer states", "activations", "temporaries"];
  const up = (size, unit) => Math.ceil(size / unit) * unit;
  const DATA = { value: null };
  let WORDS = [];  // of the streams, which have a letter for each (tools/calculator/make.py)

  async function load(packed) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    DATA.value = JSON.parse(await new Response(stream).text());
    WORDS = DATA.value.words.split(" ");
    return DATA.value;
  }

  /* The family of streams that a step belongs to: [its key, that of another optimizer]. */
  function keys(step) {
    const trained = step.lora_rank ? "lora" : step.frozen ? "half" : "all";
    const plain = step.precision === "fp32" || step.precision === "tf32";
    const numbers = step.weights === "bf16" ? "bf16" : plain ? "fp32" : "mixed";
    return [`${numbers}/${step.checkpointing ? 1 : 0}/${trained}`,
      `${step.weights}/${trained}/${step.optimizer}`];
  }

  /* {bytes, given, states, moves, phases, categories} of a step; null where it is not kept. */
  function trace(model, step) {
    const facts = DATA.value.models[model], [key, other] = keys(step);
    const streams = facts.streams;
    let sections = streams[key];
    if (!sections) return null;
    if (step.weights === "bf16" && step.precision !== "bf16") return null;
    if (step.optimizer !== "adamw") {
      if (!streams[other]) return null;
      sections = { ...sections, ...streams[other] };
    }
    const examples = step.batch_size / step.accumulation;
    const shape = [examples, facts.longest ? step.length / 32 : 1, step.lora_rank || 1];
    const sizes = facts.sizes.map(([factor, i, j, k]) =>
      factor * shape[0] ** i * shape[1] ** j * shape[2] ** k);
    const names = ["parameters", "states", "first", "second", "update"];
    const alive = [[], [], [], [], []], bytes = [], events = [];
    let phase = 0, begin = -1;
    for (const name of names) {
      if (name === "second" && step.accumulation === 1) continue;
      for (const letter of sections[name]) {
        const word = WORDS[letter.charCodeAt(0) - 0x23], kind = word[0];
        if (kind === "p") {
          if (begin < 0) begin = events.length;
          phase = +word.slice(1);
          continue;
        }
        const old = +word[1];
        if (kind === "b") {
          alive[old].push(bytes.length);
          events.push([1, bytes.length, old, old, phase]);
          bytes.push(sizes[+word.slice(2)]);
          continue;
        }
        const moves = kind === "m", place = +word.slice(moves ? 3 : 2), list = alive[old];
        const index = place % 2 ? (place - 1) / 2 : list.length - 1 - place / 2;
        const storage = list.splice(index, 1)[0];
        if (moves) alive[+word[2]].push(storage);
        events.push([moves ? 0 : -1, storage, old, moves ? +word[2] : old, phase]);
      }
    }
    return { bytes, events, begin };
  }

  /* {peak, atPeak, phase, trace} */
  function plan(model, step) {
    const traced = trace(model, step);
    if (!traced) return null;
    const rounded = traced.bytes.map((count) => up(count, UNIT)), alive = [0, 0, 0, 0, 0];
    let total = 0, peak = -1, atPeak = null, phase = 0;
    traced.events.forEach(([kind, storage, from, to, now], index) => {
      const size = rounded[storage];
      if (kind === 1) { alive[to] += size; total += size; }
      else if (kind === -1) { alive[from] -= size; total -= size; }
      else { alive[from] -= size; alive[to] += size; }
      if (index >= traced.begin - 1 && total > peak) {
        peak = total; atPeak = alive.slice(); phase = now;
      }
    });
    return { peak, atPeak, phase: PHASES[phase], trace: traced, overhead: null };
  }

  class Full extends Error {}

  class Allocator {
    constructor(capacity) {
      this.capacity = capacity;
      this.allocated = this.reserved = this.mostAllocated = this.mostReserved = 0;
      this.blocks = new Map();
      this.pools = { true: [], false: [] };
      this.next = 0;
    }
    malloc(wanted) {
      const size = up(Math.max(UNIT, wanted), UNIT), small = size <= SMALL, pool = this.pools[small];
      const index = search(pool, size, -1);
      const address = index < pool.length ? pool.splice(index, 1)[0][1] : this.segment(size, small);
      const block = this.blocks.get(address), rest = block.size - size;
      if (small ? rest >= UNIT : rest > SMALL) {
        this.blocks.set(address + size,
          { size: rest, small, previous: address, next: block.next, used: false });
        if (block.next !== null) this.blocks.get(block.next).previous = address + size;
        block.size = size;
        block.next = address + size;
        insert(pool, rest, address + size);
      }
      block.used = true;
      this.allocated += block.size;
      this.mostAllocated = Math.max(this.mostAllocated, this.allocated);
      return address;
    }
    free(given) {
      let address = given;
      const block = this.blocks.get(address), pool = this.pools[block.small];
      block.used = false;
      this.allocated -= block.size;
      if (block.next !== null && !this.blocks.get(block.next).used) {
        remove(pool, this.blocks.get(block.next).size, block.next);
        this.join(address, block.next);
      }
      if (block.previous !== null && !this.blocks.get(block.previous).used) {
        const before = block.previous;
        remove(pool, this.blocks.get(before).size, before);
        this.join(before, address);
        address = before;
      }
      insert(pool, this.blocks.get(address).size, address);
    }
    segment(size, small) {
      const segment = small ? SMALL_SEGMENT : size < LARGE_TENSOR ? LARGE_SEGMENT : up(size, ROUND);
      if (this.reserved + segment > this.capacity) {
        this.giveBack();
        if (this.reserved + segment > this.capacity) throw new Full();
      }
      const address = this.next;
      this.next += segment + UNIT;
      this.blocks.set(address, { size: segment, small, previous: null, next: null, used: false });
      this.reserved += segment;
      this.mostReserved = Math.max(this.mostReserved, this.reserved);
      return address;
    }
    join(address, following) {
      const block = this.blocks.get(address), taken = this.blocks.get(following);
      this.blocks.delete(following);
      block.size += taken.size;
      block.next = taken.next;
      if (taken.next !== null) this.blocks.get(taken.next).previous = address;
    }
    giveBack() {
      for (const small of [true, false]) {
        const pool = this.pools[small];
        const kept = pool.filter(([size, address]) => {
          const block = this.blocks.get(address);
          if (block.previous !== null || block.next !== null) return true;
          this.reserved -= size;
          this.blocks.delete(address);
          return false;
        });
        pool.splice(0, pool.length, ...kept);  // in place: malloc goes on with the same list
      }
    }
  }

  function search(pool, size, address) {
    let low = 0, high = pool.length;
    while (low < high) {
      const middle = (low + high) >> 1, [other, place] = pool[middle];
      if (other < size || (other === size && place < address)) low = middle + 1;
      else high = middle;
    }
    return low;
  }
  const insert = (pool, size, address) =>
    pool.splice(search(pool, size, address), 0, [size, address]);
  const remove = (pool, size, address) => pool.splice(search(pool, size, address), 1);

  /* The peaks of a step that is repeated until nothing new is reserved. Throws Full. */
  function replay(traced, workspace, capacity = Infinity) {
    const allocator = new Allocator(capacity), addresses = new Map(), { bytes, events } = traced;
    const before = events.slice(0, traced.begin), steps = events.slice(traced.begin);
    const born = (storage) => {
      if (bytes[storage]) addresses.set(storage, allocator.malloc(bytes[storage]));
    };
    for (const [, storage, , to] of before) if (to !== STATES) born(storage);
    const lasting = new Set(addresses.keys());
    let lastPhase = -1, most = -1, peaks = null;
    for (let round = 0; round < MAX_STEPS; round++) {
      allocator.mostAllocated = allocator.allocated;
      allocator.mostReserved = allocator.reserved;
      for (const [kind, storage, , , phase] of steps) {
        if (kind === 0) continue;
        while (lastPhase < phase) {
          lastPhase += 1;
          if (lastPhase < UPDATE && workspace) allocator.malloc(workspace);
          else if (lastPhase === UPDATE)
            for (const [, state, , to] of before)
              if (to === STATES) { born(state); lasting.add(state); }
        }
        if (kind === 1) born(storage);
        else if (addresses.has(storage)) {
          allocator.free(addresses.get(storage));
          addresses.delete(storage);
        }
      }
      for (const storage of [...addresses.keys()]) {
        if (lasting.has(storage)) continue;
        allocator.free(addresses.get(storage));
        addresses.delete(storage);
      }
      peaks = { allocated: allocator.mostAllocated, reserved: allocator.mostReserved };
      if (peaks.reserved <= most) break;
      most = peaks.reserved;
    }
    return { allocated: peaks.allocated, reserved: most };
  }

  /* Bytes that an allocator must be able to reserve for the step to run. */
  function least(traced, workspace) {
    const unlimited = replay(traced, workspace);
    let low = unlimited.allocated, high = unlimited.reserved;
    while (high - low > Math.max(ROUND, Math.floor(unlimited.allocated / 1024))) {
      const middle = Math.floor((low + high) / 2);
      try {
        high = replay(traced, workspace, middle).reserved;
      } catch (error) {
        if (!(error instanceof Full)) throw error;
        low = middle;
      }
    }
    return high;
  }

  const sum = (terms) => Object.values(terms).reduce((total, term) => total + term, 0);

  /* {terms, need, over, lower} on a GPU; with `bound` without the allocator: a lower bound. */
  function fit(planned, gpu, bound = false) {
    const constants = DATA.value.constants;
    if (!bound && planned.overhead === null)
      planned.overhead = least(planned.trace, constants.workspace) - planned.peak
        - 2 * constants.workspace;
    const hopper = gpu.capability[0] >= 9;
    const terms = {
      "tensors at the peak": planned.peak,
      "cuBLAS workspace": 2 * (hopper ? constants.hopper_workspace : constants.workspace),
      allocator: bound ? 0 : planned.overhead,
      margin: Math.floor(constants.margin * planned.peak),
      "CUDA context": constants.context,
    };
    const need = sum(terms);
    return { terms, need, over: need - gpu.memory };
  }

  return { load, plan, fit, replay, keys, data: () => DATA.value, CATEGORIES, FORWARD };
})();
if (typeof module !== "undefined") module.exports = { Planner };
