// Live: a run that goes on by itself. Tokens as they stream, rates, and the buttons that stop it at once.

const RATE_WINDOW_US = 2e6;
const MOST_STREAMS = 5;
const TREND_POINTS = 240;

async function render({ model, el: root, host, signal }) {
  const store = await openStore(model, host);
  root.classList.add("lab", "lab-live");
  const state = el("span", { class: "lab-aside", "data-testid": "live-state" });
  const controls = new Controls(store);
  const trends = ["tokens per second", "free blocks", "preemptions"].map((name) => new Trend(name, () => store.invalidate(), signal));
  const streams = el("div", { class: "lab-streams", role: "log", "aria-label": "tokens as they are delivered", "aria-live": "off" });
  root.append(el("div", { class: "lab-panel" },
    el("div", { class: "lab-title" }, "Live", state, controls.element),
    el("div", { class: "lab-live-body" }, el("div", { class: "lab-trends" }, ...trends.map((trend) => trend.element)), streams)));
  const theme = new Theme(root, () => store.invalidate(), signal);
  const rows = [];
  store.view((columns) => {
    const { history, position } = store, mode = store.status.mode;
    setText(state, mode === "running" ? "running; pause to look closer" : mode === "stepping" ? "paused: step, go back, or break something" : "a recording");
    controls.show();
    trends[0].show(theme, rateSeries(history, position), (value) => (value < 10 ? value.toFixed(1) : counted(Math.round(value))));
    trends[1].show(theme, seriesOf(position, (f) => history.frames.free.at(f)), counted);
    trends[2].show(theme, preemptionSeries(history, position), counted);
    showStreams(streams, rows, theme, store, columns);
  }, signal);
}

class Controls {
  constructor(store) {
    this.store = store;
    const button = (text, title, click) => {
      const made = el("button", { title, on: { click } }, el("span", { text }));
      takeKeys(made, store, { " ": () => click() });
      return made;
    };
    this.toggle = button("", "pause or go on", () => store.command(store.status.mode === "running" ? "pause" : "resume"));
    this.abortOne = button("Abort", "abort the selected request", () => store.command("abort", { request: this.chosen() }));
    this.abortAll = button("Abort all", "abort every request that lives", () => {
      for (const id of alive(store)) store.command("abort", { request: id });
    });
    this.sign = icon("stop");
    this.toggle.prepend(this.sign);
    this.element = el("span", { class: "lab-live-controls" }, this.toggle, this.abortOne, this.abortAll);
  }
  chosen() {
    return this.store.request < 0 ? "" : this.store.history.requests[this.store.request].id;
  }
  show() {
    const { mode } = this.store.status, id = this.chosen(), living = alive(this.store);
    setIcon(this.sign, mode === "running" ? "stop" : "next");
    setText(this.toggle.lastChild, mode === "running" ? " Pause" : " Run");
    setText(this.abortOne.lastChild, id ? `Abort ${shorten(id, 12)}` : "Abort selected");
    this.toggle.disabled = mode === "recording";
    this.abortOne.disabled = mode === "recording" || !living.includes(id);
    this.abortAll.disabled = mode === "recording" || !living.length;
  }
}

function alive(store) {
  const { history } = store, state = history.seek(store.position);
  return history.requests.filter((_, i) => state.queue[i] > 0).map((request) => request.id);
}

// ---- series

function seriesOf(position, value) {
  const first = Math.max(0, position - TREND_POINTS + 1), series = [];
  for (let f = first; f <= position; f++) series.push(value(f));
  return series;
}

/** Tokens delivered per second of the engine's clock, over the last two seconds, at each delivery. */
function rateSeries(history, position) {
  const { frame, tokens, time } = history.deliveries;
  let last = frame.length - 1;
  while (last >= 0 && frame.at(last) > position) last--;
  const series = [];
  let begin = last, sum = 0;
  for (let end = last; end >= 0 && series.length < TREND_POINTS; end--) {
    while (begin >= 0 && time.at(end) - time.at(begin) < RATE_WINDOW_US) sum += tokens.at(begin--);
    const span = Math.max(time.at(end) - time.at(Math.max(0, begin)), 1);
    series.unshift((sum * 1e6) / Math.max(span, RATE_WINDOW_US / 4));
    sum -= tokens.at(end);
  }
  return series;
}

function preemptionSeries(history, position) {
  const { marks, rows } = history, first = Math.max(0, position - TREND_POINTS + 1);
  const series = new Array(position - first + 1).fill(0);
  let before = 0;
  for (let i = 0; i < marks.length; i++) {
    const row = marks.at(i), frame = rows.frame.at(row);
    if (frame > position) break;
    if (rows.kind.at(row) !== ROWS.PREEMPTED) continue;
    if (frame < first) before++;
    else series[frame - first]++;
  }
  return series.map((count) => (before += count));
}

/** A number with its recent course. */
class Trend {
  constructor(name, draw, signal) {
    this.value = el("b");
    const box = el("div", { class: "lab-sheet" });
    this.element = el("div", { class: "lab-trend" }, el("span", {}, this.value, ` ${name}`), box);
    this.sheet = new Sheet(box, { "aria-label": `${name}, recent course` }, draw, signal);
  }
  show(theme, series, words) {
    const now = series.length ? series[series.length - 1] : 0;
    setText(this.value, words(now));
    const ctx = this.sheet.begin(), { width, height } = this.sheet, most = Math.max(1, ...series);
    if (series.length < 2) return;
    ctx.strokeStyle = theme.accent;
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    series.forEach((value, i) => ctx.lineTo((i * width) / (series.length - 1), height - 1 - (value / most) * (height - 3)));
    ctx.stroke();
    ctx.lineTo(width, height);
    ctx.lineTo(0, height);
    ctx.fillStyle = mix(theme.accent, theme.paper, 0.85);
    ctx.globalCompositeOperation = "destination-over";
    ctx.fill();
    ctx.globalCompositeOperation = "source-over";
  }
}

// ---- streams

function showStreams(element, rows, theme, store, state) {
  const ids = Object.keys(store.tails);
  const index = new Map(ids.map((id) => [id, store.indexOf(id)]));
  const running = ids.filter((id) => state.queue[index.get(id)] === QUEUE_RUNNING);
  const others = ids.filter((id) => !running.includes(id)).reverse();
  const shown = [...running, ...others].slice(0, MOST_STREAMS);
  while (rows.length < shown.length) rows.push(new Stream(element, store));
  rows.forEach((row, i) => row.show(theme, shown[i], index.get(shown[i])));
}

class Stream {
  constructor(parent, store) {
    this.store = store;
    this.swatch = el("canvas", { class: "lab-swatch", width: 24, height: 24, "aria-hidden": "true" });
    this.name = el("b");
    this.text = el("span");
    this.element = el("div", { class: "lab-stream" }, this.swatch, this.name, el("span", { class: "lab-stream-text" }, this.text));
    this.element.addEventListener("click", () => store.select({ request: store.request === this.request ? -1 : this.request }));
    parent.append(this.element);
  }
  show(theme, id, index) {
    this.element.hidden = id === undefined;
    if (id === undefined) return;
    if (this.request !== index || this.theme !== theme.patterns) paintSwatch(this.swatch, theme, index);
    this.request = index;
    this.theme = theme.patterns;
    setText(this.name, shorten(id, 12));
    setText(this.text, this.store.tails[id].replace(/\s+/g, " "));
    this.element.setAttribute("aria-current", String(this.store.request === index));
  }
}

export default { render };
