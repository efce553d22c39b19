// Transport: where one is, and the ways to go on: step, back, play, seek along a strip of what happened.

const SPEEDS = [1, 2, 5, 10, 30, 60];
const ICONS = {
  first: "M3 3h2v10H3z M13 3v10L6 8z",
  back: "M11 3v10L4 8z",
  next: "M5 3v10l7-5z",
  last: "M11 3h2v10h-2z M3 3v10l7-5z",
  play: "M2 3v10l6-5z M8 3v10l6-5z",
  stop: "M4 3h3v10H4z M9 3h3v10H9z",
};
const LANES = new Map([
  [ROWS.FAILED, 0], [ROWS.LOAD_FAILED, 0], [ROWS.FAULT, 0],
  [ROWS.PREEMPTED, 1], [ROWS.GUARD, 1], [ROWS.CONFIG, 1], [ROWS.FINISHED, 2],
]);

async function render({ model, el: root, host, signal }) {
  const store = await openStore(model, host);
  root.classList.add("lab", "lab-transport");
  const where = el("div", { class: "lab-headline", "data-testid": "headline" });
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
  const marks = new StripMarks(store);
  store.on("history", () => marks.forget(), signal);
  store.on("note", () => showNote(note, store.note), signal);

  store.view((state) => {
    const text = headline(state, store), { history } = store;
    setText(where, text);
    setText(what, moment(history, store.position));
    spoken.say(`${text}. ${what.textContent}`);
    buttons.show();
    showLegend(legend, history);
    drawStrip(sheet, theme, marks, store);
    setSlider(sheet.canvas, store, text);
  }, signal);
  signal.addEventListener("abort", () => buttons.stop());
}

function showNote(element, { kind, text }) {
  element.dataset.kind = kind;
  setText(element, text);
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
    const made = el("button", { "aria-label": title, title, on: { click } }, icon(ICONS[sign]), el("span"));
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
  next.classList.add("lab-primary");
  return {
    element: el("div", { class: "lab-buttons", role: "group", "aria-label": "move through the history" },
      first, back, next, last, play, speed),
    show() {
      first.disabled = back.disabled = store.position === 0;
      next.disabled = store.atEnd && !store.status.can_step;
      last.disabled = store.atEnd;
      play.firstChild.firstChild.setAttribute("d", store.playing ? ICONS.stop : ICONS.play);
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

/** The marks, counted per pixel; made anew when the history or the width changes. */
class StripMarks {
  constructor(store) {
    this.store = store;
    this.forget();
  }
  forget() {
    this.width = -1;
  }
  at(width) {
    const { history } = this.store;
    if (this.width === width) return this.columns;
    const scale = (width - 1) / Math.max(1, history.numFrames - 1);
    this.width = width;
    this.columns = { lanes: [0, 1, 2].map(() => new Map()), fence: new Uint8Array(width) };
    for (let i = 0; i < history.marks.length; i++) {
      const row = history.marks.at(i), kind = history.rows.kind.at(row);
      const x = Math.round(history.rows.frame.at(row) * scale);
      const lane = this.columns.lanes[LANES.get(kind)];
      if (!lane.has(x) || kind !== ROWS.GUARD) lane.set(x, kind);
    }
    for (let f = 1; f < history.numFrames; f++) {
      if (history.frames.processed.at(f) > history.frames.processed.at(f - 1)) this.columns.fence[Math.round(f * scale)] = 1;
    }
    return this.columns;
  }
}

function drawStrip(sheet, theme, marks, store) {
  const ctx = sheet.begin(), { width, height } = sheet;
  if (width < 10) return;
  const inner = width - 16, columns = marks.at(inner), left = 8;
  const x = left + (store.position * (inner - 1)) / Math.max(1, store.lastFrame);
  ctx.fillStyle = theme.paper2;
  ctx.fillRect(left - 4, 0, inner + 8, height);
  ctx.fillStyle = theme.ink2;
  ctx.globalAlpha = 0.55;
  for (let i = 0; i < inner; i++) if (columns.fence[i]) ctx.fillRect(left + i, height - 5, 1, 5);
  ctx.globalAlpha = 1;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.font = `9px ${theme.font}`;
  columns.lanes.forEach((lane, number) => {
    for (const [column, kind] of lane) {
      ctx.fillStyle = markColour(theme, kind);
      ctx.fillText(MARK_OF.get(kind).sign, left + column, 6 + number * 10);
    }
  });
  if (store.flag) {
    ctx.fillStyle = theme.alarm;
    ctx.fillRect(left + (store.flag.frame * (inner - 1)) / Math.max(1, store.lastFrame), 0, 1, height);
  }
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
    const inner = box.width - 16;
    store.moveTo(((event.clientX - box.left - 8) / (inner - 1)) * store.lastFrame);
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
  if (advances) items.push(el("span", {}, el("b", { text: "ı", "aria-hidden": "true" }), ` fence advances to ${advances}`));
  legend.replaceChildren(...items, el("span", { class: "lab-keys", text: "← → moment · Shift step · [ ] marked event · Space plays" }));
  legend.shownFor = history;
  legend.shownMarks = history.marks.length;
}

export default { render };
