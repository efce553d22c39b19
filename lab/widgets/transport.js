// Transport: where one is, and the ways to go on: step, back, play, seek along a strip of what happened.

const SPEEDS = [1, 2, 5, 10, 30, 60];
const KEYS = `← and →: one moment back or on; with Shift: one step. Home and End: first and last moment.
[ and ]: the last and the next marked event. Space: play or stop.`;
const LANES = new Map([
  [ROWS.FAILED, 0], [ROWS.LOAD_FAILED, 0], [ROWS.FAULT, 0],
  [ROWS.PREEMPTED, 1], [ROWS.GUARD, 1], [ROWS.CONFIG, 1], [ROWS.FINISHED, 2],
]);

async function render({ model, el: root, host, signal }) {
  const store = await openStore(model, host);
  root.classList.add("lab", "lab-transport");
  const step = el("span"), counts = el("span", { class: "lab-counts" });
  const where = el("div", { class: "lab-headline", "data-testid": "headline" }, step, counts);
  const what = el("div", { class: "lab-moment", "data-testid": "moment" });
  const buttons = makeButtons(store, signal);
  const legend = el("div", { class: "lab-legend" });
  const note = el("div", { class: "lab-note", role: "alert" });
  const strip = el("div", { class: "lab-sheet lab-strip" });
  root.append(
    el("div", { class: "lab-transport-head" }, where, what),
    el("div", { class: "lab-transport-row" }, buttons.element, strip),
    el("div", { class: "lab-transport-foot" }, legend, note),
  );
  const theme = new Theme(root, () => store.invalidate(), signal);
  const spoken = new SpokenLine(root);
  const sheet = new Sheet(strip, { role: "slider", "aria-label": "position in the history" }, () => store.invalidate(), signal);
  takeKeys(sheet.canvas, store);
  followPointer(sheet, store);
  const picture = new StripPicture(store);
  store.on("note", () => showNote(note, CHANGES.has(store.note.about) ? null : store.note), signal);

  store.view((state) => {
    const text = headline(state, store), { history } = store;
    setText(step, stepWords(store));
    setText(counts, ` · ${countWords(state, store)}`);
    setText(what, moment(history, store.position));
    spoken.say(`${text}. ${what.textContent}`);
    buttons.show();
    showLegend(legend, history);
    drawStrip(sheet, theme, picture, store);
    setSlider(sheet.canvas, store, text);
  }, signal);
  signal.addEventListener("abort", () => buttons.stop());
}

function setSlider(canvas, store, text) {
  canvas.setAttribute("aria-valuemin", "0");
  canvas.setAttribute("aria-valuemax", String(store.lastFrame));
  canvas.setAttribute("aria-valuenow", String(store.position));
  canvas.setAttribute("aria-valuetext", text);
}

// ---- buttons

function makeButtons(store, signal) {
  const button = (sign, title, click) => {
    const made = el("button", { "aria-label": title, title, on: { click } }, ...(sign ? [icon(sign), el("span")] : []));
    takeKeys(made, store);
    // Space presses a button that has the focus, as everywhere; it does not play.
    made.addEventListener("keydown", (event) => event.key === " " && event.stopImmediatePropagation(), true);
    return made;
  };
  const player = new Player(store, signal);
  const speed = el("select", { "aria-label": "moments per second while playing", "data-lm-suppress-shortcuts": "true" });
  for (const perSecond of SPEEDS) speed.append(el("option", { value: perSecond, text: `${perSecond}/s` }));
  speed.value = "5";
  speed.addEventListener("change", () => (player.perSecond = Number(speed.value)));
  const first = button("first", "first moment (Home)", () => store.moveTo(0));
  const back = button("back", "back one moment (←), a step with Shift", (event) =>
    event.shiftKey ? store.byStep(-1) : store.moveTo(store.position - 1));
  const play = button("play", "play or stop (Space)", () => player.toggle());
  const next = button("next", "step: on by one moment (→), a step with Shift", (event) =>
    event.shiftKey ? store.byStep(1) : store.forward());
  const last = button("last", "last moment (End)", () => store.moveTo(store.lastFrame));
  const run = button("", "run to the next breakpoint, or the end", () => store.command("run"));
  run.append("run");
  next.classList.add("lab-primary");
  return {
    element: el("div", { class: "lab-buttons", role: "group", "aria-label": "move through the history" },
      first, back, next, last, play, speed, run),
    show() {
      first.disabled = back.disabled = store.position === 0;
      next.disabled = store.atEnd && !store.status.can_step;
      last.disabled = store.atEnd;
      run.hidden = !store.status.can_step;
      setIcon(play.firstChild, store.playing ? "stop" : "play");
      play.setAttribute("aria-pressed", String(store.playing));
      setText(next.lastChild, store.atEnd && store.status.can_step ? " step" : "");
    },
    stop: () => player.stop(),
  };
}

/** Goes on by itself, so many moments a second. */
class Player {
  constructor(store, signal) {
    this.store = store;
    this.perSecond = 5;
    store.on("play", () => this.toggle(), signal);
  }
  toggle() {
    if (this.store.playing) return this.stop();
    if (this.store.atEnd && !this.store.status.can_step) this.store.moveTo(0);
    this.store.playing = true;
    this.tick();
  }
  tick() {
    if (!this.store.playing) return this.stop();
    this.store.forward();
    this.store.invalidate();
    this.timer = setTimeout(() => this.tick(), 1000 / this.perSecond);
  }
  stop() {
    clearTimeout(this.timer);
    this.store.playing = false;
    this.store.invalidate();
  }
}

// ---- the strip

const EDGE = 8;

/** The marks, painted once for each history, size and theme. */
class StripPicture {
  constructor(store) {
    this.store = store;
    this.canvas = document.createElement("canvas");
  }

  at(sheet, theme) {
    const key = `${this.store.generation}/${this.store.history.numFrames}/${sheet.width}@${sheet.scale}`;
    if (this.key !== key || this.patterns !== theme.patterns) {
      Object.assign(this, { key, patterns: theme.patterns });
      this.paint(sheet, theme);
    }
    return this.canvas;
  }

  paint(sheet, theme) {
    const { history, lastFrame } = this.store, inner = sheet.width - 2 * EDGE;
    const columnOf = (frame) => EDGE + Math.round((frame * (inner - 1)) / Math.max(1, lastFrame));
    this.canvas.width = sheet.canvas.width;
    this.canvas.height = sheet.canvas.height;
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(sheet.scale, 0, 0, sheet.scale, 0, 0);
    ctx.fillStyle = theme.paper2;
    ctx.fillRect(EDGE - 4, 0, inner + 8, sheet.height);
    ctx.fillStyle = mix(theme.ink2, theme.paper2, 0.45);
    const { processed } = history.frames;
    for (let f = 1; f < history.numFrames; f++) {
      if (processed.at(f) > processed.at(f - 1)) ctx.fillRect(columnOf(f), sheet.height - 5, 1, 5);
    }
    this.paintMarks(ctx, theme, columnOf);
  }

  paintMarks(ctx, theme, columnOf) {
    const { marks, rows } = this.store.history, taken = new Set();
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.font = `9px ${theme.font}`;
    for (let i = 0; i < marks.length; i++) {
      const row = marks.at(i), kind = rows.kind.at(row), lane = LANES.get(kind), x = columnOf(rows.frame.at(row));
      const place = `${kind}/${x}`;
      if (taken.has(place)) continue;
      taken.add(place);
      ctx.fillStyle = markColour(theme, kind);
      ctx.fillText(MARK_OF.get(kind).sign, x, 6 + lane * 10);
    }
  }
}

function drawStrip(sheet, theme, picture, store) {
  const ctx = sheet.begin(), { width, height } = sheet;
  if (width < 40) return;
  ctx.drawImage(picture.at(sheet, theme), 0, 0, width, height);
  const xOf = (frame) => EDGE + (frame * (width - 2 * EDGE - 1)) / Math.max(1, store.lastFrame);
  if (store.flag) {
    ctx.fillStyle = theme.alarm;
    ctx.fillRect(xOf(store.flag.frame), 0, 1, height);
  }
  const x = xOf(store.position);
  ctx.fillStyle = theme.accent;
  ctx.fillRect(Math.round(x) - 1, 0, 2, height);
  ctx.beginPath();
  ctx.moveTo(x - 5, 0);
  ctx.lineTo(x + 5, 0);
  ctx.lineTo(x, 6);
  ctx.fill();
}

function followPointer(sheet, store) {
  const seek = (event) => {
    const box = sheet.canvas.getBoundingClientRect();
    const inner = box.width - 2 * EDGE;
    store.moveTo(((event.clientX - box.left - EDGE) / (inner - 1)) * store.lastFrame);
  };
  sheet.canvas.addEventListener("pointerdown", (event) => {
    sheet.canvas.setPointerCapture(event.pointerId);
    sheet.canvas.focus();
    seek(event);
  });
  sheet.canvas.addEventListener("pointermove", (event) => event.buttons && seek(event));
}

function showLegend(legend, history) {
  if (legend.shownFor === history && legend.shownMarks === history.marks.length) return;
  const counts = new Map();
  for (let i = 0; i < history.marks.length; i++) {
    const kind = history.rows.kind.at(history.marks.at(i));
    counts.set(kind, (counts.get(kind) ?? 0) + 1);
  }
  const items = LAB.marks.filter(([kind]) => counts.get(kind)).map(([kind, sign, one, many]) =>
    el("span", {}, el("b", { text: sign, "aria-hidden": "true" }), ` ${plural(counts.get(kind), one, many)}`));
  const advances = history.numFrames ? history.frames.processed.at(history.numFrames - 1) : 0;
  if (advances) items.push(el("span", {}, el("b", { text: "ı", "aria-hidden": "true" }), ` fence advances to ${counted(advances)}`));
  legend.replaceChildren(...items, el("span", { class: "lab-keys", title: KEYS, text: "keys ← → [ ] Space" }));
  legend.shownFor = history;
  legend.shownMarks = history.marks.length;
}

export default { render };
