// Inject panel: break something, or change a setting, from the moment one looks at. In the past that forks the run.

const ACTIONS = [
  ["next_call", "fail the next call for slots", []],
  ["fail_call", "fail the n-th call for slots", [["call", "call"]]],
  ["fail_request", "fail every call of a request", [["request", "request"], ["step", "from step"], ["until_step", "to step"]]],
  ["hold_result", "hold a step's output back", [["step", "step"], ["steps", "for steps"]]],
  ["fail_load", "fail a load", [["request", "request"], ["occurrence", "its load no."], ["block", "from its block no."]]],
  ["abort", "abort a request", [["request", "request"], ["step", "before step"]]],
];
const SETTINGS = [
  ["guard", "guard", [["stop_retry", "on"], ["none", "off"]]],
  ["defer_block_free", "fence", [["true", "on"], ["false", "off"], ["auto", "auto"]]],
  ["max_in_flight", "depth", "number"],
  ["num_blocks", "blocks", "number"],
];

async function render({ model, el: root, host, signal }) {
  const store = await openStore(model, host);
  root.classList.add("lab", "lab-inject");
  const aside = el("span", { class: "lab-aside" });
  const note = el("div", { class: "lab-note", role: "alert" });
  const faults = new FaultForm(store);
  const settings = new SettingsForm(store);
  root.append(el("div", { class: "lab-panel" },
    el("div", { class: "lab-title" }, "Break it", aside), faults.element, settings.element, note));
  store.on("note", () => showNote(note, CHANGES.has(store.note.about) ? store.note : null), signal);
  store.on("history", () => settings.read(), signal);
  settings.read();
  store.view(() => {
    const { mode } = store.status, able = mode !== "recording";
    const forks = mode === "stepping" && store.step < store.history.lastStep;
    setText(aside, !able ? "a recording cannot be changed"
      : forks ? `a change here, after step ${store.step}, forks the run` : "takes effect from the next step on");
    for (const control of root.querySelectorAll("select, input, button")) control.disabled = !able;
    faults.suggest();
  }, signal);
}

/** Keys typed into a form are the form's; JupyterLab must not take them. */
function ownKeys(control) {
  control.dataset.lmSuppressShortcuts = "true";
  control.addEventListener("keydown", (event) => event.stopPropagation());
  return control;
}

class FaultForm {
  constructor(store) {
    this.store = store;
    this.action = ownKeys(el("select", { "aria-label": "what to break" }));
    for (const [name, text] of ACTIONS) this.action.append(el("option", { value: name, text }));
    this.fields = el("span", { class: "lab-fields" });
    const go = ownKeys(el("button", { text: "Inject", class: "lab-primary", on: { click: () => this.send() } }));
    this.element = el("div", { class: "lab-form" }, this.action, this.fields, go);
    this.action.addEventListener("change", () => this.rebuild());
    this.rebuild();
  }

  get name() {
    return this.action.value;
  }

  rebuild() {
    const [, , fields] = ACTIONS.find(([name]) => name === this.name);
    this.inputs = new Map();
    this.touched = new Set();
    this.fields.replaceChildren(...fields.map(([field, label]) => {
      const input = ownKeys(field === "request"
        ? el("select", { "aria-label": label })
        : el("input", { type: "number", min: field === "block" ? 0 : 1, "aria-label": label }));
      input.addEventListener("input", () => this.touched.add(field));
      input.addEventListener("keydown", (event) => event.key === "Enter" && this.send());
      this.inputs.set(field, input);
      return el("label", {}, `${label} `, input);
    }));
    this.suggestedFor = null;
    this.suggest();
  }

  /** Fill in what one most likely wants: the next step, the request that is selected, the next call. */
  suggest() {
    const { store } = this, key = `${store.position}/${store.request}/${store.history.numFrames}`;
    if (this.suggestedFor === key || !store.history.numFrames) return;
    this.suggestedFor = key;
    const values = { call: nextCall(store), step: store.step + 1, steps: 2, occurrence: 1, block: 0, until_step: "" };
    if (this.name === "hold_result") values.step = Math.max(1, store.step);
    for (const [field, input] of this.inputs) {
      if (field === "request") this.offerRequests(input);
      else if (!this.touched.has(field)) input.value = values[field];
    }
  }

  offerRequests(input) {
    const { store } = this, state = store.history.seek(store.position);
    const alive = store.history.requests.map((head, i) => [head.id, i]).filter(([, i]) => state.queue[i] > 0);
    const chosen = store.request >= 0 ? store.history.requests[store.request].id : input.value;
    input.replaceChildren(...alive.map(([id]) => el("option", { value: id, text: shorten(id, 24) })));
    if (alive.some(([id]) => id === chosen)) input.value = chosen;
  }

  send() {
    const fault = { kind: this.name };
    for (const [field, input] of this.inputs) {
      if (field === "request") fault.request = input.value;
      else if (input.value !== "") fault[field] = Number(input.value);
      else if (field !== "until_step") return this.refuse(`${field.replace("_", " ")} is empty; give a number`);
    }
    if (this.inputs.has("request") && !fault.request) return this.refuse("no request lives at this moment");
    if (this.name === "next_call") Object.assign(fault, { kind: "fail_call", call: nextCall(this.store) });
    this.store.command("inject", { fault });
  }

  refuse(text) {
    this.store.setNote("error", text, "inject");
  }
}

/** Number of the next call for slots after the moment one looks at. */
function nextCall(store) {
  const { steps } = store.history, index = store.history.stepAt(store.position);
  return index < 0 ? 1 : steps.callsBefore.at(index) + steps.calls.at(index) + 1;
}

class SettingsForm {
  constructor(store) {
    this.store = store;
    this.controls = new Map();
    const labels = SETTINGS.map(([name, label, kind]) => {
      const control = ownKeys(kind === "number"
        ? el("input", { type: "number", min: 1, "aria-label": label })
        : el("select", { "aria-label": label }, ...kind.map(([value, text]) => el("option", { value, text }))));
      control.addEventListener("change", () => this.send(name, control, kind));
      this.controls.set(name, control);
      return el("label", { title: TITLES[name] }, `${label} `, control);
    });
    this.element = el("div", { class: "lab-form" }, ...labels);
  }

  read() {
    const settings = this.store.status.settings ?? this.store.history.head.config;
    for (const [name, control] of this.controls) control.value = String(settings[name]);
  }

  send(name, control, kind) {
    const value = kind === "number" ? Number(control.value) : { true: true, false: false }[control.value] ?? control.value;
    this.store.command("set_option", { name, value });
  }
}

const TITLES = {
  guard: "stop the retry when the victim's blocks are behind the fence",
  defer_block_free: "keep freed blocks back while a step in flight may write them",
  max_in_flight: "how many steps may be in flight",
  num_blocks: "blocks in the pool, the null block included; a change starts again from step 0 with the same inputs",
};

export default { render };
