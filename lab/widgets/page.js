// A page without a notebook: stands in for Jupyter's widget models, so that the same views run from a file.
//
// Owns: models that hold their state in the page, and the answers that a kernel would give to a recording.
// Knows nothing about: what the views draw.
// Invariants: nothing is fetched; what the page shows is in the page.

const data = JSON.parse(document.getElementById("lab-data").textContent);

class PageModel {
  constructor(state, answer) {
    this.state = state;
    this.answer = answer;
    this.listeners = new Map();
  }
  get(name) {
    return this.state[name];
  }
  set(name, value) {
    this.state[name] = value;
    this.trigger(`change:${name}`);
  }
  save_changes() {}
  send(content) {
    queueMicrotask(() => this.answer(this, content));
  }
  on(event, listener) {
    if (!this.listeners.has(event)) this.listeners.set(event, new Set());
    this.listeners.get(event).add(listener);
  }
  off(event, listener) {
    this.listeners.get(event)?.delete(listener);
  }
  trigger(event, ...args) {
    for (const listener of this.listeners.get(event) ?? []) listener(...args);
  }
}

/** What a kernel says to a page that shows a recording: sentences. */
function answer(model, { do: command, step, upTo }) {
  if (command !== "explain") return;
  model.trigger("msg:custom", { kind: "why", step, upTo, lines: data.why[step] ?? [] }, []);
}

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

const { signal } = new AbortController();
const stateOf = (name) => (name === "hub" ? { packed: bytesOf(data.packed), opening: data.opening } : { hub: "hub", ...data.traits[name] });
const widgets = new Map();

const host = {
  async getWidget(name) {
    if (!widgets.has(name)) widgets.set(name, open(name));
    return widgets.get(name);
  },
};

async function open(name) {
  const url = URL.createObjectURL(new Blob([data.modules[name]], { type: "text/javascript" }));
  const widget = (await import(url)).default;
  URL.revokeObjectURL(url);
  const model = new PageModel(stateOf(name), answer);
  const exports = await widget.initialize?.({ model, signal });
  return { exports, render: ({ el, signal: until = signal }) => widget.render({ model, el, host, signal: until }) };
}

await (await host.getWidget("show")).render({ el: document.getElementById("lab") });
