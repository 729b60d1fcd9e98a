"use strict";
/* The smallest changes of a step that a GPU holds, by the rules of tight_fit/search/remedies.py. */
const Remedies = ((planner) => {
  const LIMIT = 2 ** 20;

  class Around {
    constructor(model, step, gpu) {
      Object.assign(this, { model, step, gpu, plans: new Map() });
    }
    plan(change) {
      const step = { ...this.step, ...change }, key = JSON.stringify(step);
      if (!this.plans.has(key)) this.plans.set(key, planner.plan(this.model, step));
      return this.plans.get(key);
    }
    fits(change) {
      const planned = this.plan(change);
      if (!planned || planner.fit(planned, this.gpu, true).over > 0) return false;
      return planner.fit(planned, this.gpu).over <= 0;
    }
    others() {
      const { step, gpu } = this, changes = [], bf16 = gpu.capability[0] >= 8;
      const plain = ["fp32", "tf32"].includes(step.precision);
      if (plain) changes.push({ precision: bf16 ? "bf16" : "fp16" });
      if (step.optimizer === "adamw") changes.push({ optimizer: "adamw8bit" });
      if (!step.checkpointing) changes.push({ checkpointing: true });
      if (!step.lora_rank) changes.push({ lora_rank: 8 });
      if (step.weights === "fp32" && bf16)
        changes.push({ weights: "bf16", ...(plain ? { precision: "bf16" } : {}) });
      return changes;
    }
    accumulations() {
      const { batch_size: batch, accumulation } = this.step, numbers = [];
      for (let number = accumulation + 1; number <= batch; number++)
        if (batch % number === 0) numbers.push(number);
      return numbers;
    }
    smallest(others) {
      for (const number of this.accumulations())
        if (this.fits({ ...others, accumulation: number })) return { accumulation: number };
      return {};
    }
    changes() {
      if (this.fits({})) return [];
      const single = [this.smallest({}), ...this.others().filter((change) => this.fits(change))];
      const found = single.filter((change) => Object.keys(change).length);
      return found.length ? found : this.several();
    }
    several() {
      const last = this.accumulations().slice(-1).map((number) => ({ accumulation: number }));
      let together = {}, fits = false;
      for (const change of [...last, ...this.others()]) {
        if (!this.plan({ ...together, ...change })) continue;
        together = { ...together, ...change };
        if (this.fits(together)) { fits = true; break; }
      }
      if (!fits) return [];
      for (const name of Object.keys(together)) {
        if (name === "precision" && "weights" in together) continue;
        const { [name]: left, ...fewer } = together;
        if (this.fits(fewer)) together = fewer;
      }
      if ("accumulation" in together) {
        const { accumulation, ...others } = together;
        together = { ...others, ...this.smallest(others) };
      }
      return [together];
    }
    /* Examples per optimizer step of the largest batch that fits; null for none. */
    largest() {
      const parts = this.step.accumulation;
      const holds = (examples) => this.fits({ batch_size: examples * parts });
      if (!holds(1)) return null;
      let low = 1, high = 2;
      while (high < LIMIT && holds(high)) { low = high; high *= 2; }
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (holds(middle)) low = middle; else high = middle;
      }
      return low * parts;
    }
  }
  return { Around };
})(typeof module === "undefined" ? Planner : require("./planner.js").Planner);
if (typeof module !== "undefined") module.exports = { Remedies };
