// The hub: holds position and selection, calls every view to draw, once per animation frame, and talks with the kernel.
//
// Owns: the store that all views of one history share. Knows nothing about: how a history is coded, what views draw.
// Invariants: moving about never waits for the kernel; the kernel is told where one looks once the hand rests.

const TELL_AFTER_MS = 200;

/** What all views of one history share. `model` is the hub's widget model. */
class Store {
  constructor(model, signal) {
    this.model = model;
    this.views = new Set();
    this.listeners = new Map();
    this.frameTimes = [];
    this.messages = [];
    this.playing = false;
    this.note = { kind: "", text: "", about: "" };
    this.open();
    model.on("change:packed", () => this.replaceHistory());
    model.on("msg:custom", (content, buffers) => this.receive(content, buffers));
    signal?.addEventListener("abort", () => this.dispose());
  }

  /** Take the history and all that goes with it from the widget's state. */
  open() {
    const opening = this.model.get("opening");
    this.history = new History(bytesOf(this.model.get("packed")));
    this.generation = opening.generation;
    this.status = opening.status;
    this.tails = opening.tails;
    this.why = new Map();
    this.askedWhy = "";
    this.block = opening.block;
    this.request = this.indexOf(opening.request);
    this.position = this.clamp(opening.position);
    this.waitingForStep = false;
  }

  dispose() {
    this.playing = false;
    clearTimeout(this.tellTimer);
    cancelAnimationFrame(this.drawRequest);
    this.views.clear();
    this.listeners.clear();
  }

  // ---- listening and drawing

  on(event, listener, signal) {
    if (!this.listeners.has(event)) this.listeners.set(event, new Set());
    this.listeners.get(event).add(listener);
    signal?.addEventListener("abort", () => this.listeners.get(event)?.delete(listener));
  }

  emit(event, detail) {
    for (const listener of this.listeners.get(event) ?? []) listener(detail);
  }

  /** Register a view: draw(state, store) is called whenever something that it may show has changed. */
  view(draw, signal) {
    this.views.add(draw);
    signal?.addEventListener("abort", () => this.views.delete(draw));
    this.invalidate();
  }

  invalidate() {
    this.drawRequest ??= requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    this.drawRequest = null;
    if (!this.history.numFrames) return;
    const start = performance.now();
    const state = this.history.seek(this.position);
    for (const draw of this.views) draw(state, this);
    this.frameTimes.push(performance.now() - start);
    if (this.frameTimes.length > 5000) this.frameTimes.shift();
  }

  // ---- where one looks

  get lastFrame() {
    return this.history.numFrames - 1;
  }
  get atEnd() {
    return this.position >= this.lastFrame;
  }
  get step() {
    return this.history.numFrames ? this.history.frames.step.at(this.position) : 0;
  }

  clamp(frame) {
    return Math.max(0, Math.min(Math.round(frame), this.lastFrame));
  }

  indexOf(id) {
    return id ? this.history.requests.findIndex((request) => request.id === id) : -1;
  }

  moveTo(frame, tell = true) {
    const position = this.clamp(frame);
    if (position === this.position) return;
    this.position = position;
    this.emit("position");
    this.invalidate();
    if (tell) this.tellLater();
  }

  select({ request = this.request, block = this.block }, tell = true) {
    if (request === this.request && block === this.block) return;
    this.request = request;
    this.block = block;
    this.emit("selection");
    this.invalidate();
    if (tell) this.tellLater();
  }

  tellLater() {
    clearTimeout(this.tellTimer);
    this.tellTimer = setTimeout(() => this.tell(), TELL_AFTER_MS);
  }

  tell() {
    clearTimeout(this.tellTimer);
    const request = this.request < 0 ? "" : this.history.requests[this.request].id;
    this.model.send({ do: "look", position: this.position, request, block: this.block });
  }

  /** One moment on; at the end of the history the kernel is asked for one more step. */
  forward() {
    if (!this.atEnd) return this.moveTo(this.position + 1);
    if (this.waitingForStep) return;
    if (!this.status.can_step) {
      this.playing = false;
      return;
    }
    this.waitingForStep = true;
    this.command("step");
  }

  /** To the moment at which the next step is decided, or this one, or the one before. */
  byStep(direction) {
    const { steps } = this.history;
    const index = this.history.stepAt(this.position);
    if (direction > 0) {
      if (index + 1 < this.history.numSteps) this.moveTo(steps.frame.at(index + 1));
      else if (this.atEnd) this.forward();
      else this.moveTo(this.lastFrame);
      return;
    }
    const here = index >= 0 && this.position > steps.frame.at(index) ? index : index - 1;
    this.moveTo(here >= 0 ? steps.frame.at(here) : 0);
  }

  /** To the next or last frame with a marked row. direction: 1 or -1. */
  byMark(direction) {
    const { marks, rows } = this.history;
    for (let i = direction > 0 ? 0 : marks.length - 1; i >= 0 && i < marks.length; i += direction) {
      const frame = rows.frame.at(marks.at(i));
      if ((frame - this.position) * direction > 0) return this.moveTo(frame);
    }
  }

  // ---- the kernel

  command(name, args = {}) {
    this.tell();
    this.setNote("", "", name);
    this.model.send({ do: name, ...args });
    this.emit("command", name);
  }

  /** kind: "error" or "info"; about: the command that it answers. */
  setNote(kind, text, about) {
    this.note = { kind, text, about };
    this.emit("note");
  }

  receive(content, buffers) {
    this.messages.push(performance.now());
    if (this.messages.length > 5000) this.messages.shift();
    if (content.kind === "append") this.appendHistory(content, bytesOf(buffers[0]));
    else if (content.kind === "why") this.takeWhy(content);
    else if (content.kind === "done") this.endCommand(content.do);
    else if (content.kind === "refused") {
      this.waitingForStep = this.playing = false;
      this.setNote("error", content.text, content.do);
    }
    this.invalidate();
  }

  endCommand(name) {
    this.waitingForStep = false;
    if (name === "inject") this.setNote("info", `Planned, from step ${this.step + 1} on.`, name);
    else if (name === "set_option") this.setNote("info", "Set.", name);
  }

  appendHistory({ generation, offset, position, status, tails }, piece) {
    const isNext = generation === this.generation && offset === this.history.size;
    if (!isNext && (generation < this.generation || offset + piece.length <= this.history.size)) return;
    if (!isNext) return this.model.send({ do: "resend" });
    const wasAtEnd = this.atEnd, before = this.history.numFrames;
    this.history.append(piece);
    this.status = status ?? this.status;
    Object.assign(this.tails, tails);
    if (piece.length) this.emit("history");
    if (position !== undefined) this.moveTo(position, false);
    else if (this.waitingForStep) this.moveTo(before);
    else if (wasAtEnd) this.moveTo(this.lastFrame, false);
    this.waitingForStep = false;
  }

  replaceHistory() {
    this.open();
    this.emit("history");
    this.emit("position");
    this.invalidate();
  }

  /** Sentences about the step one looks at; null while the kernel is asked. */
  explanation() {
    const key = `${this.step}`, known = this.why.get(key);
    const upTo = lastAtMost(this.history.frames.step, this.step);
    if (known && known.upTo === upTo) return known.lines;
    if (this.askedWhy !== `${key}/${upTo}`) {
      this.askedWhy = `${key}/${upTo}`;
      this.model.send({ do: "explain", step: this.step, upTo });
    }
    return known ? known.lines : null;
  }

  takeWhy({ step, upTo, lines }) {
    this.why.set(`${step}`, { lines, upTo });
    this.invalidate();
  }
}

function bytesOf(view) {
  if (!view) return new Uint8Array(0);
  if (view instanceof ArrayBuffer) return new Uint8Array(view);
  return new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
}

export default {
  initialize({ model, signal }) {
    return new Store(model, signal);
  },
};
