// Compare: two histories side by side under one transport, and the first step in which they part.

const DECISIONS = new Set([ROWS.FAILED, ROWS.GUARD, ROWS.PREEMPTED, ROWS.FINISHED]);

async function render({ model, el: root, host, signal }) {
  root.classList.add("lab", "lab-compare");
  const stores = await Promise.all(model.get("hubs").map(async (hub) => (await host.getWidget(hub)).exports));
  root.labStore = stores[model.get("leader")];
  const heads = model.get("names").map((name) => ({ name, where: el("span", { class: "lab-aside" }) }));
  const difference = el("div", { class: "lab-difference", "data-testid": "difference" });
  const go = el("button", { text: "go there", on: { click: () => stores[0].moveTo(go.frame) } });
  takeKeys(go, root.labStore, { " ": () => go.click() });
  const grid = el("div", { class: "lab-compare-grid" });
  const transport = el("div");
  root.append(transport, el("div", { class: "lab-differs" }, difference, go), grid);
  heads.forEach(({ name, where }, i) => grid.append(el("div", {
    class: "lab-title", style: { "grid-area": `${["left", "right"][i]}-head` } }, name, where)));
  await Promise.all(Object.entries(model.get("parts")).map(async ([area, part]) => {
    const box = area === "transport" ? transport : el("div", { class: "lab-part", style: { "grid-area": area } });
    if (area !== "transport") grid.append(box);
    await (await host.getWidget(part)).render({ el: box, signal });
  }));
  transport.classList.add("lab-of-two");
  linkStores(stores, signal);
  const find = () => showDifference(difference, go, stores, model.get("names"));
  stores.forEach((store, i) => {
    store.on("history", find, signal);
    store.view((state) => setText(heads[i].where, countWords(state, store)), signal);
  });
  find();
}

/** Where one goes, the other goes; what one selects, the other selects by its name. A step ahead is a step for both. */
function linkStores(stores, signal) {
  let moving = false;
  const together = (work) => {
    if (moving) return;
    moving = true;
    work();
    moving = false;
  };
  stores.forEach((store, i) => {
    const other = stores[1 - i];
    store.on("position", () => together(() => other.moveTo(sameMoment(store, other))), signal);
    store.on("history", () => together(() => other.moveTo(sameMoment(store, other))), signal);
    store.on("selection", () => together(() => {
      const id = store.request < 0 ? "" : store.history.requests[store.request].id;
      other.select({ request: other.indexOf(id), block: store.block });
    }), signal);
    store.on("command", (name) => together(() => name === "step" && other.status.can_step && other.command("step")), signal);
  });
}

/** The frame of the other history with the same step, as far into it. */
function sameMoment(store, other) {
  const step = store.step, into = store.position - firstOfStep(store.history, step);
  const first = firstOfStep(other.history, step), next = firstOfStep(other.history, step + 1);
  return Math.min(first + into, Math.max(first, next - 1));
}

function firstOfStep(history, step) {
  const { frames } = history;
  let low = 0, high = history.numFrames;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (frames.step.at(middle) < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

// ---- the first difference

function showDifference(element, go, stores, names) {
  const found = firstDifference(stores.map((store) => store.history));
  stores.forEach((store, side) => {
    store.flag = found ? { frame: found.frames[side], text: "≠" } : null;
    store.invalidate();
  });
  go.hidden = !found;
  if (!found) return element.replaceChildren("No step differs so far.");
  go.frame = found.frames[0];
  element.replaceChildren(el("b", { text: `First difference in step ${found.step}` }),
    ...found.texts.map((text, i) => el("div", { text: `${names[i]}: ${text}` })));
}

function firstDifference(histories) {
  const [a, b] = histories, most = Math.max(a.numSteps, b.numSteps);
  for (let i = 0; i < most; i++) {
    const decisions = histories.map((history) => (i < history.numSteps ? decisionOf(history, i) : ["the run is over"]));
    const texts = decisions.map((own, side) => own.filter((item) => !decisions[1 - side].includes(item)).join("; "));
    if (!texts[0] && !texts[1]) continue;
    const step = (i < a.numSteps ? a : b).steps.number.at(i);
    const frames = histories.map((h) => (i < h.numSteps ? h.steps.frame.at(i) : h.numFrames - 1));
    return { step, frames, texts: texts.map((text) => text || "nothing of the kind") };
  }
  return null;
}

/** All that a step decided, as texts that are equal only if the decisions are. */
function decisionOf(history, step) {
  const decided = [];
  history.eachScheduled(step, (request, tokens) => {
    decided.push(`${history.requests[request].id} gets ${plural(tokens, "token")}`);
  });
  const others = history.rowsOf(history.steps.frame.at(step)).filter((row) => DECISIONS.has(row.kind));
  return [...decided, ...others.map((row) => describeRow(history, row))];
}

export default { render };
