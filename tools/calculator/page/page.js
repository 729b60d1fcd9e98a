"use strict";
/* The form, the answer and the address of the page. */
const form = document.getElementById("form");
const at = (id) => document.getElementById(id);
const GIB = 2 ** 30, WAIT = 60; // milliseconds in which later changes replace earlier ones
const MINE = "another GPU, by its size";
const NAMES = {
  weights: { fp32: "fp32", bf16: "bf16" },
  precision: {
    fp32: "fp32", tf32: "TF32 products", bf16: "bf16 autocast", fp16: "fp16 autocast, loss scaling",
  },
  optimizer: {}, // {name: label}, of the kept plans
  trained: { all: "all weights", half: "the upper half of the layers", lora: "LoRA adapters" },
};
const WORDS = {
  accumulation: (value) => `${value} micro-batches`,
  precision: (value) => NAMES.precision[value],
  optimizer: (value) => NAMES.optimizer[value],
  checkpointing: () => "gradient checkpointing",
  lora_rank: (value) => `LoRA of rank ${value}`,
  weights: (value) => `${value} weights`,
};

function size(count) {
  for (const [unit, name, digits] of [[GIB, "GiB", 2], [2 ** 20, "MiB", 1], [1024, "KiB", 1]])
    if (Math.abs(count) >= unit) return `${(count / unit).toFixed(digits)} ${name}`;
  return `${count} bytes`;
}

function duration(seconds) {
  if (seconds >= 60) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return seconds >= 1 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds * 1000)} ms`;
}

function options(name, values, labels = {}) {
  const select = form.elements[name], before = select.value;
  select.replaceChildren(...values.map((value) => new Option(labels[value] || value, value)));
  if (values.includes(before)) select.value = before;
}

function gpuOf(values) {
  const { gpus, constants } = Planner.data();
  const known = gpus.find((gpu) => gpu.name === values.gpu);
  if (known) return known;
  const gigabytes = +values.gigabytes;
  return {
    name: `GPU of ${gigabytes}GB`, memory: Math.floor(gigabytes * GIB * constants.seen),
    capability: constants.any, typed: `${gigabytes}GB`,
  };
}

/* What the form says: {model, gpu, step}, or {problem}. */
function asked() {
  const values = Object.fromEntries(new FormData(form));
  const facts = Planner.data().models[values.model];
  const step = {
    batch_size: +values.batch_size, accumulation: +values.accumulation, weights: values.weights,
    precision: values.precision, optimizer: values.optimizer,
    checkpointing: form.elements.checkpointing.checked,
    lora_rank: values.trained === "lora" ? +values.lora_rank : null,
    frozen: values.trained === "half" ? Math.floor(facts.layers / 2) : null,
    length: facts.longest ? +values.tokens : null,
  };
  const most = (name) => (+form.elements[name].max).toLocaleString("en");
  const whole = (value, name) =>
    Number.isInteger(value) && value >= 1 && value <= (+form.elements[name].max || Infinity);
  let problem = "";
  if (!whole(step.batch_size, "batch_size"))
    problem = `Examples per step must be a whole number of at least 1, at most ${most("batch_size")}.`;
  else if (!whole(step.accumulation, "accumulation") || step.batch_size % step.accumulation)
    problem = `${step.accumulation} micro-batches do not divide ${step.batch_size} examples: choose a divisor.`;
  else if (step.length !== null && (!whole(step.length, "tokens") || step.length % 32))
    problem = "Tokens per example must be a multiple of 32, the lengths that are planned exactly.";
  else if (facts.longest && step.length > facts.longest)
    problem = `This model takes at most ${facts.longest} tokens.`;
  else if (step.lora_rank !== null && !whole(step.lora_rank, "lora_rank"))
    problem = `The rank of LoRA must be a whole number of at least 1, at most ${most("lora_rank")}.`;
  else if (values.gpu === MINE && !(+values.gigabytes >= 1 && +values.gigabytes <= 1024))
    problem = `The memory of a GPU must be at least 1 GB, at most ${most("gigabytes")} GB.`;
  return { model: values.model, facts, gpu: gpuOf(values), step, problem };
}

/* Show only what this model can be trained with. */
function restrict() {
  const facts = Planner.data().models[form.elements.model.value];
  const kept = Object.keys(facts.streams).filter((key) => /^\w+\/[01]\//.test(key));
  const has = (part) => kept.some((key) => key.startsWith(part) || key.endsWith(part));
  const weights = [...(has("mixed") ? ["fp32"] : []), ...(has("bf16/") ? ["bf16"] : [])];
  options("weights", weights, NAMES.weights);
  const numbers = form.elements.weights.value === "bf16" ? ["bf16"]
    : [...(has("fp32/") ? ["fp32", "tf32"] : []), "bf16", "fp16"];
  options("precision", numbers, NAMES.precision);
  const trained = ["all", "half", "lora"].filter((name) => has(`/${name}`))
    .filter((name) => name !== "half" || form.elements.weights.value === "fp32");
  options("trained", trained, NAMES.trained);
  form.elements.checkpointing.disabled = !kept.some((key) => key.includes("/1/"));
  if (form.elements.checkpointing.disabled) form.elements.checkpointing.checked = false;
  form.querySelector(".text").hidden = !facts.longest;
  form.querySelector(".rank").hidden = form.elements.trained.value !== "lora";
  form.querySelector(".size").hidden = form.elements.gpu.value !== MINE;
}

/* Whether a GPU before Ampere computes this step's attention without a fused kernel. */
function writtenOut({ gpu, step, facts }) {
  const bf16 = step.weights === "bf16" || step.precision === "bf16";
  return gpu.capability[0] < 8 && (facts.grouped || bf16);
}

function typed({ model, gpu, step, facts }) {
  const words = ["tight-fit", model, "--gpu", JSON.stringify(gpu.typed || gpu.name)];
  words.push("--batch", step.batch_size, "--weights", step.weights, "--precision", step.precision);
  if (step.length) words.push("--length", step.length);
  if (step.optimizer !== "adamw") words.push("--optimizer", step.optimizer);
  if (step.accumulation > 1) words.push("--accumulation", step.accumulation);
  if (step.checkpointing) words.push("--checkpointing");
  if (step.lora_rank) words.push("--lora-rank", step.lora_rank);
  if (step.frozen) words.push("--frozen", step.frozen);
  return words.join(" ");
}

function bar(planned, fit, gpu) {
  const beside = fit.need - planned.peak, whole = Math.max(fit.need, gpu.memory) * 1.02;
  const parts = [...Planner.CATEGORIES.map((name, place) => [name, planned.atPeak[place]]),
    ["context, workspace, allocator, margin", beside]];
  const pieces = parts.map(([name, count], place) => {
    const piece = document.createElement("span");
    piece.className = `part part-${place}`;
    piece.style.width = `${(count / whole) * 100}%`;
    piece.title = `${name}: ${size(count)}`;
    return piece;
  });
  const card = document.createElement("span");
  card.className = "card";
  card.style.left = `${(gpu.memory / whole) * 100}%`;
  at("bar").replaceChildren(...pieces, card);
  at("bar").setAttribute("aria-label",
    `${parts.map(([name, count]) => `${name} ${size(count)}`).join(", ")}; together ${size(fit.need)}; `
    + `the ${gpu.name} has ${size(gpu.memory)}.`);
  at("legend").replaceChildren(...[...parts, [`dashed line: the ${gpu.name}`, gpu.memory]].map(
    ([name, count], place) => {
      const item = document.createElement("li"), swatch = document.createElement("span");
      swatch.className = place < parts.length ? `swatch part-${place}` : "swatch line";
      item.append(swatch, `${name}: ${size(count)}`);
      return item;
    }));
}

function advice(around, fit) {
  const box = at("advice"), lines = [];
  const changes = around.changes(), largest = around.largest();
  if (changes.length) {
    const alone = changes.length > 1 || Object.keys(changes[0]).length === 1;
    const head = document.createElement("p");
    head.textContent = alone ? "What would fit, each change alone:" : "What would fit, together:";
    const list = document.createElement("ul");
    for (const change of changes) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = Object.entries(change).map(([name, value]) => WORDS[name](value)).join(", ");
      button.addEventListener("click", () => apply(change));
      const item = document.createElement("li");
      item.append(button);
      list.append(item);
    }
    lines.push(head, list);
  } else if (fit.over > 0) {
    const head = document.createElement("p");
    head.textContent = "No change that this page plans makes it fit. The command below also plans "
      + "weights in 4 bits beside LoRA, a loss in chunks and offloading.";
    lines.push(head);
  }
  const last = document.createElement("p");
  last.textContent = largest ? `Largest batch that fits as asked: ${largest}.`
    : "As asked, not even one example per micro-batch fits.";
  box.replaceChildren(...lines, last);
  box.dataset.changes = JSON.stringify(changes);
  box.dataset.largest = largest;
}

function apply(change) {
  for (const [name, value] of Object.entries(change)) {
    if (name === "checkpointing") form.elements.checkpointing.checked = value;
    else if (name === "lora_rank") { form.elements.trained.value = "lora"; form.elements.lora_rank.value = value; }
    else { form.elements[name].value = value; restrict(); }
  }
  changed();
}

function time({ model, facts, gpu, step }) {
  const usual = step.batch_size === 16 && step.length === facts.length && step.accumulation === 1
    && step.weights === facts.weights && step.optimizer === "adamw" && !step.checkpointing
    && !step.lora_rank && !step.frozen && step.precision === facts.weights;
  const [seconds, low, high] = facts.seconds[gpu.name] ?? [];
  if (usual && seconds)
    return `A step takes ${duration(seconds)} there, by plan (${duration(low)} to ${duration(high)}).`;
  if (!Object.keys(facts.seconds).length || usual)
    return "This page does not know the seconds of this step: the command below plans them.";
  return "The seconds of a step are known here only for the settings with which a model is first "
    + "shown; the command below plans them for all.";
}

let number = 0;
function answer() {
  const question = asked(), mine = ++number;
  history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
  const show = at("answer");
  const older = writtenOut(question);
  const planned = question.problem || older ? null : Planner.plan(question.model, question.step);
  if (!planned) {
    at("verdict").textContent = question.problem || (older ? `The ${question.gpu.name} has no fused `
      + "kernel for the attention of this step, and this page plans none that is written out: the "
      + "command below does." : "This combination is not among the kept plans: the command plans it.");
    at("bar").replaceChildren(); at("legend").replaceChildren(); at("advice").replaceChildren();
    at("time").textContent = ""; at("terms").replaceChildren();
  } else {
    const fit = Planner.fit(planned, question.gpu), room = fit.over > 0 ? "too much" : "to spare";
    at("verdict").textContent = `${fit.over > 0 ? "NO, it does not fit" : "YES, it fits"} on the `
      + `${question.gpu.name}: it needs ${size(fit.need)} of ${size(question.gpu.memory)}, `
      + `${size(Math.abs(fit.over))} ${room}. Peak in the ${planned.phase} phase.`;
    show.dataset.need = fit.need;
    show.dataset.fits = fit.over <= 0;
    bar(planned, fit, question.gpu);
    at("terms").replaceChildren(...Object.entries(fit.terms).map(([name, count]) => {
      const row = document.createElement("tr"), head = document.createElement("th");
      head.scope = "row"; head.textContent = name;
      const cell = document.createElement("td");
      cell.textContent = count.toLocaleString("en");
      row.append(head, cell);
      return row;
    }));
    at("time").textContent = time(question);
    at("advice").textContent = "looking for what would fit …";
    setTimeout(() => {
      if (mine !== number) return;
      advice(new Remedies.Around(question.model, question.step, question.gpu), fit);
      show.dataset.done = String(mine);
      show.setAttribute("aria-busy", "false");
    }, 0);
  }
  at("typed").textContent = question.problem ? "" : typed(question);
  at("typed").parentElement.hidden = Boolean(question.problem);
  show.classList.remove("planning");
  if (!planned) { show.setAttribute("aria-busy", "false"); show.dataset.done = String(mine); }
}

let timer = 0;
function changed() {
  at("answer").classList.add("planning");
  at("answer").setAttribute("aria-busy", "true");
  at("verdict").textContent = "planning …";
  number += 1; // what is being looked for is outdated
  clearTimeout(timer);
  timer = setTimeout(answer, WAIT);
}

/* A model is shown first as the command plans it where nothing is said. */
function usual() {
  const facts = Planner.data().models[form.elements.model.value];
  restrict();
  form.elements.weights.value = facts.weights;
  restrict();
  form.elements.precision.value = facts.weights;
  if (facts.longest) form.elements.tokens.value = facts.length;
}

/* Take the settings of the address; what it names and the page does not know is said in a sentence. */
function fromAddress() {
  const given = new Map(new URLSearchParams(location.hash.slice(1))), unknown = [];
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");
  const shown = (text) => `"${text.length > 40 ? `${text.slice(0, 40)}…` : text}"`;
  const sized = /^\s*([\d.]+) *g?i?b?\s*$/i.exec(given.get("gpu") || "");
  if (sized) given.set("gpu", MINE).set("gigabytes", sized[1]);
  for (const name of given.keys())
    if (!form.elements[name] || !form.elements[name].name) {
      unknown.push(`${shown(name)} is no setting of this page.`);
      given.delete(name);
    }
  const take = (name, value) => {
    const field = form.elements[name];
    if (field.type === "checkbox") {
      const no = ["0", "off", "false", "no"].includes(value.toLowerCase());
      const yes = ["1", "on", "true", "yes"].includes(value.toLowerCase());
      if (no || yes) field.checked = yes && !field.disabled;
      return no || (yes && field.checked);
    }
    if (field.type === "number") {
      field.value = value;
      return field.value !== "";
    }
    const option = [...field.options].find((each) => plain(each.value) === plain(value));
    if (option) field.value = option.value;
    return Boolean(option);
  };
  if (given.has("model")) {
    const known = take("model", given.get("model"));
    if (!known) unknown.push(`The model ${shown(given.get("model"))} is not among those of this page.`);
    given.delete("model");
  }
  usual();
  const left = new Set();
  for (let round = 0; round < 2; round++) { // the weights decide which precisions there are
    for (const [name, value] of given) left[take(name, value) ? "delete" : "add"](name);
    restrict();
  }
  for (const name of left) {
    const words = [...form.elements[name].closest("label").childNodes].filter((node) => node.data);
    const label = words.map((node) => node.data.trim()).join(" ").trim();
    unknown.push(`${label} cannot be ${shown(given.get(name))} here.`);
  }
  at("unknown").textContent = unknown.length
    ? `From the address was not taken: ${unknown.join(" ")} What is planned is in the fields above.` : "";
}

Planner.load(window.TIGHT_FIT_PLANS).then((data) => {
  Object.assign(NAMES.optimizer, data.optimizers);
  options("model", Object.keys(data.models));
  options("gpu", [...data.gpus.map((gpu) => gpu.name), MINE]);
  options("optimizer", Object.keys(NAMES.optimizer), NAMES.optimizer);
  form.elements.gpu.value = "T4";
  usual();
  if (location.hash) fromAddress();
  form.addEventListener("input", (event) => {
    at("unknown").textContent = "";
    if (event.target.name === "model") usual();
    else restrict();
    changed();
  });
  window.addEventListener("hashchange", () => { fromAddress(); changed(); });
  at("made").textContent = `${Object.keys(data.models).length} models, planned with PyTorch `
    + `${data.versions.torch} and transformers ${data.versions.transformers}.`;
  answer();
});
